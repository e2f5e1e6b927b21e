"""Interceptor of custom backward passes and gradient hooks while a model is exported.

torch.export follows the forward alone: what an `autograd.Function` or a hook does to a gradient leaves no trace in it.
While `traced` is open, both are run as the model calls them, and their backward passes at once after that
(traced_functions.py, traced_hooks.py). Marks in the exported program say which operators belong to such a backward pass
(gradient_marks.py); own_backward.py takes it from there. Nothing of this is left when the block ends.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.modules.module
from torch.autograd.function import _SingleLevelFunction

from ravnest.graph.capture.gradient_marks import numbering
from ravnest.graph.capture.traced_functions import traced_apply
from ravnest.graph.capture.traced_hooks import (
    AFTER_ADDING,
    ON_SEVERAL,
    TracedModuleHooks,
    refusal,
    traced_register_hook,
)


@contextmanager
def traced() -> Iterator[list[str]]:
    """Within the block, custom backward passes and hooks become part of what is traced; CaptureError where they
    cannot. Yields what each of them is, in words, in the order in which the marks number them."""
    with ExitStack() as stack:
        calls = stack.enter_context(numbering())
        # Every way to `apply` ends here, also one that a user keeps under another name.
        stack.enter_context(patch.object(_SingleLevelFunction, "apply", classmethod(traced_apply), create=True))
        stack.enter_context(patch.object(torch.Tensor, "register_hook", traced_register_hook))
        stack.enter_context(patch.object(torch.nn.modules.module, "BackwardHook", TracedModuleHooks))
        for place, name, reason in _REFUSED:
            stack.enter_context(patch.object(place, name, refusal(name, reason)))
        yield calls


_REFUSED: tuple[tuple[Any, str, str], ...] = (
    (torch.Tensor, "register_post_accumulate_grad_hook", AFTER_ADDING),
    (torch.autograd.graph, "register_multi_grad_hook", ON_SEVERAL),
)
"""What registers hooks that have no form as a graph: where it is, its name, and why."""

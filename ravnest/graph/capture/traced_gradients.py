"""Interceptor of custom backward passes and gradient hooks while a model is exported.

torch.export traces the forward alone, so it misses how an `autograd.Function` or a hook changes a gradient. Within a
`traced` block, both run when the model calls them, followed directly by their backward passes (traced_functions.py,
traced_hooks.py). Marks in the exported program show the operators of such a backward pass (gradient_marks.py), which
own_backward.py converts. At the end of the block all interceptions are removed.
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
    """Within the block, custom backward passes and hooks are traced as well; CaptureError if they cannot be. Yields
    their descriptions, in the order of the numbers in the marks."""
    with ExitStack() as stack:
        calls = stack.enter_context(numbering())
        # Every call of `apply` ends here, including those through another name that a user gave it.
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
"""Functions that register hooks without a form in a graph: the object, the function's name, and the reason."""

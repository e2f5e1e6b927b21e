"""Marks in a traced program, which show the operators of a custom backward pass.

The marks are custom operators that compute nothing: one for a function's arguments, one for the stand-in of a value's
gradient, one for values with a backward pass of their own, and one for values whose gradients a hook changes. Marks of
one call share its number. Code that cannot be marked is a CaptureError.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from ravnest.errors import CaptureError
from ravnest.graph.capture.users_line import line_of_error

_library: Any = torch.library.Library("ravnest", "DEF")  # type: ignore[no-untyped-call]
_MARKS: dict[str, Callable[..., Any]] = {
    "enter(Tensor value) -> Tensor": torch.empty_like,
    "gradient_of(Tensor value, int call) -> Tensor": lambda value, _: torch.empty_like(value),
    "own_gradient(Tensor[] outputs, Tensor[] inputs, Tensor?[] found, int call) -> Tensor[]": (
        lambda outputs, *_: [torch.empty_like(o) for o in outputs]
    ),
    "hooked(Tensor[] values, Tensor?[] found, int call) -> ()": lambda *_: None,
}
for _schema, _on_shapes in _MARKS.items():
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _on_shapes, "CompositeExplicitAutograd")
# The result of a hook's mark is never used: without this, torch.export would drop the mark as dead code.
torch.fx.node._side_effectful_functions.add(torch.ops.ravnest.hooked.default)

marks: Any = torch.ops.ravnest
_calls: list[str] = []
"""Description of each call, by its number, while a model is traced."""


@contextmanager
def numbering() -> Iterator[list[str]]:
    """Within the block, `numbered` counts from 0 and appends to the yielded list."""
    global _calls
    before, _calls = _calls, []
    try:
        yield _calls
    finally:
        _calls = before


def numbered(what: str) -> int:
    """A new number for the call with this description."""
    _calls.append(what)
    return len(_calls) - 1


@contextmanager
def told_as(what: str) -> Iterator[None]:
    """Turns an error in the block into a CaptureError that names this call and the line."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CaptureError(
            f"{what} cannot be captured{line_of_error(error)}: {reason[:300]}; use torch operators there, without "
            "branches that depend on the values in a tensor"
        ) from error


def refuse(what: str, reason: str) -> NoReturn:
    """Raise a CaptureError for code that has no form in a graph."""
    raise CaptureError(f"{what} cannot be captured: {reason}")

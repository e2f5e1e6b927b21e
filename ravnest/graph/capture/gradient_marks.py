"""Marks in a traced program: which operators belong to a custom backward pass.

The marks are operators of our own, which compute nothing: what goes into a function; a stand-in for the gradient of a
value; values that have a backward pass of their own; and values whose gradients a hook changes. The number of the call
says what belongs together. Anything that cannot be marked is refused here, in one form.
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
# Nothing uses what a hook's mark yields: without this it would be dropped as dead.
torch.fx.node._side_effectful_functions.add(torch.ops.ravnest.hooked.default)

marks: Any = torch.ops.ravnest
_calls: list[str] = []
"""What each call is, by its number, while something is traced."""


@contextmanager
def numbering() -> Iterator[list[str]]:
    """Within the block, `numbered` counts from 0 and adds to the list that this yields."""
    global _calls
    before, _calls = _calls, []
    try:
        yield _calls
    finally:
        _calls = before


def numbered(what: str) -> int:
    """The number of a call that is this, in words."""
    _calls.append(what)
    return len(_calls) - 1


@contextmanager
def told_as(what: str) -> Iterator[None]:
    """Says of an error in the block what it arose in, and where."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CaptureError(
            f"{what} cannot be captured{line_of_error(error)}: {reason[:300]}; use torch operators there whose path "
            "does not depend on the values in a tensor"
        ) from error


def refuse(what: str, reason: str) -> NoReturn:
    """CaptureError for what has no form as a graph."""
    raise CaptureError(f"{what} cannot be captured: {reason}")

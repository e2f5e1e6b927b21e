"""Checks in front of kernels that do not check what they are given.

torch leaves some arguments to its Python layer, which a graph does not go through: the kernels below then read or write
past the end of a tensor, divide by zero, or leave part of their result unwritten. A guard sees one call and returns
what is wrong with it, as the end of a sentence.

Guards over shapes and plain numbers run when a microbatch of new shapes comes; guards over the values of tensors run
with every call, and are few.
"""

from collections.abc import Callable
from typing import Any, Final

from ravnest.graph.operators import (
    attention_guards,
    index_guards,
    loss_guards,
    norm_guards,
    recurrent_guards,
    window_guards,
)
from ravnest.graph.operators.calls import Call

Guard = Callable[[Call], str]
"""What is wrong with a call; empty where nothing is."""

_SHAPES: Final[dict[str, Guard]] = {
    **recurrent_guards.SHAPES,
    **attention_guards.SHAPES,
    **window_guards.SHAPES,
    **norm_guards.SHAPES,
    **loss_guards.SHAPES,
    **index_guards.SHAPES,
}
_VALUES: Final[dict[str, Guard]] = {
    **recurrent_guards.VALUES,
    **loss_guards.VALUES,
    **index_guards.VALUES,
}

_FOLLOW_VALUES: Final = frozenset(
    """
    bincount gru.data lstm.data masked_select nonzero one_hot repeat_interleave rnn_relu.data rnn_tanh.data
    tensor_split.tensor_indices_or_sections where.default
    """.split()
)


def shape_guard(op: str) -> Guard | None:
    """The check of shapes and numbers in front of this operator."""
    return _for(_SHAPES, op)


def value_guard(op: str, second: Any = None) -> Guard | None:
    """The check of values in front of this operator; `second` is its second argument, where that is fixed."""
    if isinstance(second, int | float) and second != -1 and op.split(".")[1] in index_guards.DIVISIONS:
        return None
    return _for(_VALUES, op)


def refusal(guard: Guard | None, call: Call) -> str:
    """What the guard says of the call. Arguments that it cannot even look at do not fit each other."""
    try:
        return "" if guard is None else guard(call)
    except (AttributeError, IndexError, OverflowError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        return f"gives it arguments that do not fit each other ({error})"


def shape_follows_values(op: str) -> bool:
    """Whether the shape of what comes out depends on the values of a tensor."""
    name = op.partition(".")[2]
    return name in _FOLLOW_VALUES or name.partition(".")[0] in _FOLLOW_VALUES


def _for(guards: dict[str, Guard], op: str) -> Guard | None:
    name = op.partition(".")[2]
    return guards.get(name) or guards.get(name.partition(".")[0])

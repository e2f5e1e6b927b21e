"""Guards: checks before kernels that do not check their own arguments.

torch checks some arguments in its Python layer, which a graph bypasses. With invalid arguments the kernels below read
or write past the end of a tensor, divide by zero, or leave part of their result unwritten. A guard looks at one call
and returns the reason to refuse it, as the end of a sentence, or nothing.

Guards of shapes and plain numbers run for each microbatch with new shapes. Guards of tensor values, of which there are
few, run for every call.
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
"""From a call to the reason to refuse it; empty if it is valid."""

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
    """The guard of shapes and numbers for this operator."""
    return _for(_SHAPES, op)


def value_guard(op: str, second: Any = None) -> Guard | None:
    """The guard of tensor values for this operator; `second` is its second argument, if that is constant."""
    if isinstance(second, int | float) and second != -1 and op.split(".")[1] in index_guards.DIVISIONS:
        return None
    return _for(_VALUES, op)


def refusal(guard: Guard | None, call: Call) -> str:
    """The guard's reason to refuse the call. If the guard itself fails, the arguments do not fit each other."""
    try:
        return "" if guard is None else guard(call)
    except (AttributeError, IndexError, OverflowError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        return f"gives it arguments that do not fit each other ({error})"


def shape_follows_values(op: str) -> bool:
    """Whether the shape of the result depends on the values of a tensor."""
    name = op.partition(".")[2]
    return name in _FOLLOW_VALUES or name.partition(".")[0] in _FOLLOW_VALUES


def _for(guards: dict[str, Guard], op: str) -> Guard | None:
    name = op.partition(".")[2]
    return guards.get(name) or guards.get(name.partition(".")[0])

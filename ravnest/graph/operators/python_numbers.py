"""Arithmetic on sizes: the `py.` operators, on plain numbers of at most 64 bits.

Python's integers have no size limit: an integer squared fifty times fills the memory and blocks the interpreter, which
no signal can end. So each result is limited to the range of a tensor's size. A result outside it is a GraphError.
"""

import operator
from collections.abc import Callable
from typing import Any, Final

import torch

from ravnest.errors import GraphError

_INT64: Final = 1 << 63


def _getitem(source: Any, key: Any) -> Any:
    if not isinstance(source, tuple | list) or isinstance(key, bool) or not isinstance(key, int):
        raise GraphError("py.getitem picks one of several results by its number")
    try:
        return source[key]
    except IndexError:
        raise GraphError(f"py.getitem asks for result {key} of {len(source)}") from None


def _bounded(name: str, function: Callable[..., Any], count: int) -> Callable[..., Any]:
    def call(*numbers: Any) -> Any:
        if len(numbers) != count:
            raise GraphError(f"{name} takes {count} plain numbers, not {len(numbers)}")
        for number in numbers:
            if type(number) not in _PLAIN or (type(number) is int and not -_INT64 <= number < _INT64):
                raise GraphError(f"{name} computes with plain numbers of at most 64 bits, not with {_told(number)}")
        try:
            result = function(*numbers)
        except (ArithmeticError, ValueError) as error:
            raise GraphError(f"{name} of {', '.join(map(str, numbers))}: {error}") from None
        if type(result) is int and not -_INT64 <= result < _INT64:
            raise GraphError(f"{name} of {', '.join(map(str, numbers))} has more than 64 bits")
        return result

    return call


_PLAIN: Final = frozenset({int, float, bool})


def _told(value: object) -> str:
    return "a larger number" if isinstance(value, int) else f"a {type(value).__name__}"


_TWO: Final[dict[str, Callable[..., Any]]] = {
    "py.add": operator.add,
    "py.sub": operator.sub,
    "py.mul": operator.mul,
    "py.floordiv": operator.floordiv,
    "py.truediv": operator.truediv,
    "py.mod": operator.mod,
    "py.eq": operator.eq,
    "py.ne": operator.ne,
    "py.lt": operator.lt,
    "py.le": operator.le,
    "py.gt": operator.gt,
    "py.ge": operator.ge,
    "py.sym_max": torch.sym_max,
    "py.sym_min": torch.sym_min,
}
_ONE: Final[dict[str, Callable[..., Any]]] = {
    "py.neg": operator.neg,
    "py.sym_float": torch.sym_float,
    "py.sym_int": torch.sym_int,
    "py.sym_not": torch.sym_not,
}

TARGETS: Final[dict[str, Callable[..., Any]]] = {"py.getitem": operator.getitem, **_TWO, **_ONE}
"""The functions that torch.export calls, by their portable names."""

FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "py.getitem": _getitem,
    **{name: _bounded(name, function, 2) for name, function in _TWO.items()},
    **{name: _bounded(name, function, 1) for name, function in _ONE.items()},
}
"""The functions that a stage calls, by their portable names."""

_COUNTS: Final = {"py.getitem": 2, **dict.fromkeys(_TWO, 2), **dict.fromkeys(_ONE, 1)}


def unfit_numbers(op: str, args: tuple[Any, ...], kwargs: Any, reference: type) -> str:
    """Why the arguments of a `py.` node that is being read are invalid; empty if they are valid."""
    if kwargs:
        return f"{op} takes no keyword arguments"
    if len(args) != _COUNTS[op]:
        return f"{op} takes {_COUNTS[op]} arguments, not {len(args)}"
    if op == "py.getitem" and isinstance(args[0], tuple):
        return f"{op} picks one of several results by its number"
    if any(not isinstance(argument, reference | int | float) for argument in args):
        return f"{op} computes with plain numbers and with values of the graph"
    return ""

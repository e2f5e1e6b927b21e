"""Free sizes of a graph: symbols such as `s87` that stand for the same number in the whole graph, and expressions.

A stage's specs give the free sizes of its values as text. The size of the batch may be `s87` in one value and `2*s87`
or `s87 + 1` in another: the symbols determine every size. An expression of an unknown form cannot be evaluated, but the
same text still means the same size.
"""

import ast
import functools
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final

import torch

from ravnest.graph.portable import ValueSpec

_LARGEST: Final = 1 << 62
"""Upper bound of a size and of every intermediate result."""
_MAX_POWER: Final = 8
_MAX_DEPTH: Final = 40

_Sizes = Mapping[str, int]


def size_of(text: str, sizes: _Sizes) -> int | None:
    """The value of a size, given the symbols. None if a symbol is missing or the expression has an unknown form."""
    known = sizes.get(text)
    if known is not None or text.isidentifier():
        return known
    parsed = _parsed(text)
    try:
        return None if parsed is None else _value(parsed, sizes, 0)
    except (KeyError, ValueError, ZeroDivisionError):
        return None


def sizes_of(specs: Iterable[ValueSpec], values: Mapping[str, Any]) -> dict[str, int]:
    """The symbols that follow from the shapes of these values, also from sizes such as `2*s87` or `s87 + 1`. If two
    shapes disagree about a symbol, the first one counts, and `misfit` reports the other."""
    found: dict[str, int] = {}
    expressions: list[tuple[str, int]] = []
    for spec in specs:
        value = values.get(spec.name)
        if not isinstance(value, torch.Tensor):
            continue
        for want, have in zip(spec.shape, value.shape, strict=False):
            if isinstance(want, str):
                if want.isidentifier():
                    found.setdefault(want, have)
                else:
                    expressions.append((want, have))
    for text, have in expressions:
        symbols = [name for name in _symbols(text) if name not in found]
        if len(symbols) == 1:
            solved = _solved(text, symbols[0], have, found)
            if solved is not None:
                found[symbols[0]] = solved
    return found


def misfit(specs: Iterable[ValueSpec], values: Mapping[str, Any], sizes: MutableMapping[str, int]) -> str:
    """The first value whose size differs from the one that the symbols require, in words; empty if all fit.

    A size that the symbols do not determine is added to `sizes` under its text, since the same text means the same
    size.
    """
    for spec in specs:
        value = values.get(spec.name)
        if not isinstance(value, torch.Tensor):
            continue
        for dimension, (want, have) in enumerate(zip(spec.shape, value.shape, strict=False)):
            expected = want if isinstance(want, int) else size_of(want, sizes)
            if expected is None:
                expected = sizes.setdefault(str(want), have)
            if have != expected:
                return (
                    f"{spec.name} has the shape {tuple(value.shape)}, whose dimension {dimension} ({want}) is "
                    f"{expected} in this microbatch"
                )
    return ""


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@functools.lru_cache(maxsize=1024)
def _symbols(text: str) -> tuple[str, ...]:
    parsed = _parsed(text)
    if parsed is None:
        return ()
    called = {id(node.func) for node in ast.walk(parsed) if isinstance(node, ast.Call)}
    names = (node.id for node in ast.walk(parsed) if isinstance(node, ast.Name) and id(node) not in called)
    return tuple(dict.fromkeys(names))


def _solved(text: str, symbol: str, have: int, known: _Sizes) -> int | None:
    """The symbol's value, given that of an expression that is linear in it."""
    at = [size_of(text, {**known, symbol: size}) for size in (0, 1)]
    if at[0] is None or at[1] is None or at[0] == at[1]:
        return None
    size, rest = divmod(have - at[0], at[1] - at[0])
    return size if not rest and 0 <= size < _LARGEST and size_of(text, {**known, symbol: size}) == have else None


_TWO: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
_CALLS: Final[Mapping[str, Callable[..., int]]] = {
    "Max": max,
    "Min": min,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "CeilDiv": lambda a, b: -(-a // b),
}
"""Functions by the names that torch uses in a shape."""


def _value(node: ast.expr, sizes: _Sizes, depth: int) -> int:
    """The value of a parsed expression. ValueError for an unsupported form; KeyError for an unknown symbol."""
    if depth > _MAX_DEPTH:
        raise ValueError(depth)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        found = node.value
    elif isinstance(node, ast.Name):
        found = sizes[node.id]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        found = -_value(node.operand, sizes, depth + 1)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, power = _value(node.left, sizes, depth + 1), _value(node.right, sizes, depth + 1)
        if not 0 <= power <= _MAX_POWER:
            raise ValueError(power)
        found = int(base**power)
    elif isinstance(node, ast.BinOp) and type(node.op) in _TWO:
        left, right = _value(node.left, sizes, depth + 1), _value(node.right, sizes, depth + 1)
        found = _TWO[type(node.op)](left, right)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords and len(node.args) >= 1:
        arguments = [_value(argument, sizes, depth + 1) for argument in node.args]
        call = _CALLS.get(node.func.id)
        if call is None or (node.func.id not in ("Max", "Min") and len(arguments) != 2) or len(arguments) < 2:
            raise ValueError(node.func.id)
        found = call(*arguments)
    else:
        raise ValueError(type(node).__name__)
    if not -_LARGEST < found < _LARGEST:
        raise ValueError(found)
    return found

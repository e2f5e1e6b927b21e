"""Recipe of a weight: the constant or the random draw that it was initialised with, as plain data.

A draw is an operator from a short list, its arguments, and the position of the generator before it. The same recipe
makes the same bits on most machines. A processor with other vector instructions may round differently, so the maker
compares the hash of the result. Every value of a recipe from a peer is checked before it is used: an invalid recipe is
a GraphError.
"""

import base64
import binascii
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ravnest.errors import GraphError
from ravnest.graph.initial_weights.generator_position import check_position, generator_at

MAX_ZERO_ROWS: Final = 16

_MIN_KEPT: Final = 0.3
"""Smallest share of a normal distribution between the bounds of a truncated one: fewer are drawn again for long."""


def _normal(tensor: Tensor, generator: torch.Generator, mean: float, std: float) -> None:
    tensor.normal_(mean, std, generator=generator)


def _uniform(tensor: Tensor, generator: torch.Generator, low: float, high: float) -> None:
    tensor.uniform_(low, high, generator=generator)


def _truncated_normal(
    tensor: Tensor, generator: torch.Generator, mean: float, std: float, low: float, high: float
) -> None:
    if not std > 0 or _share_between(mean, std, low, high) <= _MIN_KEPT:
        raise GraphError(f"a normal distribution is truncated to {low:g}…{high:g}, which is too little of it")
    torch.nn.init.trunc_normal_(tensor, mean, std, low, high, generator=generator)


def _share_between(mean: float, std: float, low: float, high: float) -> float:
    below_high, below_low = ((1 + math.erf((bound - mean) / std / math.sqrt(2))) / 2 for bound in (high, low))
    return below_high - below_low


DRAWS: Final[Mapping[str, tuple[int, Callable[..., None]]]] = {
    "normal": (2, _normal),
    "uniform": (2, _uniform),
    "truncated_normal": (4, _truncated_normal),
}
"""The operators of draws: the number of their arguments, and what draws into a tensor."""

CONSTANT: Final = "constant"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one tensor is made."""

    draw: str
    """A key of DRAWS, or CONSTANT."""
    arguments: tuple[float, ...] = ()
    data: bytes = b""
    """For a draw, the position of the generator; for a constant, the bytes of one value."""
    zero_rows: tuple[int, ...] = ()
    """Rows that are set to zero after the draw, such as the row of an embedding's padding."""

    def make(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor; GraphError if the recipe does not fit it."""
        if self.draw == CONSTANT:
            if len(self.data) != dtype.itemsize:
                raise GraphError(f"a constant of {len(self.data)} bytes is no value of {dtype}")
            value = torch.frombuffer(bytearray(self.data), dtype=torch.uint8)
            try:
                return value.repeat(math.prod(shape)).view(dtype).view(shape)
            except (RuntimeError, MemoryError) as error:
                raise GraphError(f"a constant of shape {shape} cannot be made: {error}") from None
        if not dtype.is_floating_point:
            raise GraphError(f"values of {dtype} cannot be drawn")
        with torch.no_grad():
            try:
                tensor = torch.empty(shape, dtype=dtype)
                DRAWS[self.draw][1](tensor, generator_at(self.data), *self.arguments)
                for row in self.zero_rows:
                    tensor[row].zero_()
            except (RuntimeError, IndexError, MemoryError) as error:
                raise GraphError(f"the draw {self.draw}{self.arguments} failed: {error}") from None
        return tensor

    def to_json(self) -> dict[str, Any]:
        """The recipe as plain values."""
        return {
            "draw": self.draw,
            "arguments": list(self.arguments),
            "data": base64.b64encode(self.data).decode(),
            "zero_rows": list(self.zero_rows),
        }

    @classmethod
    def from_json(cls, value: object) -> "Recipe":
        """The recipe in plain values from a peer; GraphError if they are none."""
        if not isinstance(value, dict) or value.keys() != {"draw", "arguments", "data", "zero_rows"}:
            raise GraphError("a recipe does not consist of draw, arguments, data and zero_rows")
        draw, arguments, data, rows = (value[name] for name in ("draw", "arguments", "data", "zero_rows"))
        if draw != CONSTANT and (not isinstance(draw, str) or draw not in DRAWS):
            raise GraphError(f"a recipe draws {str(draw)[:40]!r}; known are {', '.join((CONSTANT, *DRAWS))}")
        count = 0 if draw == CONSTANT else DRAWS[draw][0]
        if not isinstance(arguments, list) or len(arguments) != count or not all(map(_is_number, arguments)):
            raise GraphError(f"a recipe of {draw} does not have {count} numbers as arguments")
        if not isinstance(rows, list) or len(rows) > MAX_ZERO_ROWS or not all(map(_is_row, rows)):
            raise GraphError(f"the zero_rows of a recipe are not at most {MAX_ZERO_ROWS} numbers of rows")
        try:
            decoded = base64.b64decode(str(data), validate=True)
        except binascii.Error:
            raise GraphError("the data of a recipe is not valid base64") from None
        if draw != CONSTANT:
            # A PyTorch that keeps its generator in another form can read the recipe, and fetches the weight instead.
            check_position(decoded)
        return cls(draw, tuple(map(float, arguments)), decoded, tuple(rows))


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(float(value)) and abs(float(value)) < 1e30  # type: ignore[arg-type]


def _is_row(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 48

"""Module names of the parameters that a stage of a plan holds, and their number."""

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from ravnest.graph.cutting.layout import layout
from ravnest.graph.portable import PortableGraph


@dataclass(frozen=True, slots=True)
class Part:
    """The parameters between two places of a model."""

    first: str
    """Name of the first parameter in the model's state_dict, as `last` is that of the last one; empty if there is
    none."""
    last: str
    parameters: int
    """Number of scalar parameters."""

    @property
    def title(self) -> str:
        """First and last module. If both are in one parent module, that is named once: "features.0 to .5"."""
        first, last = _module(self.first), _module(self.last)
        if first == last:
            return first
        around, dot, name = last.rpartition(".")
        return f"{first} to .{name}" if dot and first.rpartition(".")[0] == around else f"{first} to {last}"


@dataclass(frozen=True, slots=True)
class Parts:
    """The trained parameters of a model, in the order of their first use."""

    places: Sequence[int]
    names: Sequence[str]
    sums: Sequence[int]
    """Number of scalar parameters before each parameter."""

    @classmethod
    def of(cls, graph: PortableGraph) -> Self:
        first_use: Mapping[str, int] = layout(graph).first_use
        used = sorted((p for p in graph.parameters if p.name in first_use), key=lambda p: first_use[p.name])
        sizes = (math.prod(p.shape) for p in used)
        return cls(
            [first_use[p.name] for p in used], [p.key for p in used], list(itertools.accumulate(sizes, initial=0))
        )

    @property
    def count(self) -> int:
        """Number of scalar parameters of the model."""
        return self.sums[-1]

    def between(self, start: int, end: int) -> Part:
        """The parameters that a stage between these places owns."""
        i, j = bisect.bisect_left(self.places, start), bisect.bisect_left(self.places, end)
        if i == j:
            return Part("", "", 0)
        return Part(self.names[i], self.names[j - 1], self.sums[j] - self.sums[i])


def _module(name: str) -> str:
    """The module of a parameter; the parameter itself if it belongs to the whole model."""
    return name.rpartition(".")[0] or name

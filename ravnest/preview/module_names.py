"""What a stage of a plan holds, in the model's own names: from which module to which, and how many parameters."""

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from ravnest.graph.layout import layout
from ravnest.graph.portable import PortableGraph


@dataclass(frozen=True, slots=True)
class Part:
    """The parameters between two places of a model."""

    first: str
    """Names of the first and the last of them, as in the model's state_dict; empty where there is none."""
    last: str
    parameters: int
    """How many numbers."""

    @property
    def title(self) -> str:
        """From which module to which; of two that lie in the same one, that is named once: "features.0 to .5"."""
        first, last = _module(self.first), _module(self.last)
        if first == last:
            return first
        around, dot, name = last.rpartition(".")
        return f"{first} to .{name}" if dot and first.rpartition(".")[0] == around else f"{first} to {last}"


@dataclass(frozen=True, slots=True)
class Parts:
    """The trained parameters of a model in the order in which it uses them."""

    places: Sequence[int]
    names: Sequence[str]
    sums: Sequence[int]
    """Numbers in all parameters before each."""

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
        """Numbers in all parameters."""
        return self.sums[-1]

    def between(self, start: int, end: int) -> Part:
        """Those that a stage from one place to another owns."""
        i, j = bisect.bisect_left(self.places, start), bisect.bisect_left(self.places, end)
        if i == j:
            return Part("", "", 0)
        return Part(self.names[i], self.names[j - 1], self.sums[j] - self.sums[i])


def _module(name: str) -> str:
    """The module of a parameter; the parameter itself where it belongs to the model as a whole."""
    return name.rpartition(".")[0] or name

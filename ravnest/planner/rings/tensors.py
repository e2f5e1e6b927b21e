"""Tensors that a ring averages: parameters, buffers and counters, divided into fragments for staggered rounds.

A buffer that training changes (batch-norm statistics) is averaged with the parameters around it. Whole numbers have no
mean: all clusters take the largest. A parameter that is used in several places belongs to the first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ravnest.errors import PlanError
from ravnest.graph.cutting.layout import Layout
from ravnest.graph.portable import PortableGraph, WeightSpec
from ravnest.planner.rings.rings import Ring

MAX_COUNTED: Final = 65_536
"""Limit on the whole numbers in all counters of a model: they travel uncoded in the messages of a round."""


@dataclass(frozen=True, slots=True)
class RingTensors:
    """Tensors in the order of the model's graph, which is the same for every owner.

    Any of the kinds may be missing: a counter is an operator of its own, and a cut may separate it from the others.
    """

    parameters: tuple[WeightSpec, ...] = ()
    buffers: tuple[WeightSpec, ...] = ()
    """States of fractional numbers, averaged without the codec."""
    counters: tuple[WeightSpec, ...] = ()
    """States of whole numbers or truth values: all clusters take the largest."""

    @property
    def all(self) -> tuple[WeightSpec, ...]:
        return (*self.parameters, *self.buffers, *self.counters)

    @property
    def values(self) -> int:
        """Number of averaged values."""
        return sum(math.prod(spec.shape) for spec in (*self.parameters, *self.buffers))


@dataclass(frozen=True, slots=True)
class RingPart:
    """The part of a ring that is averaged in one fragment."""

    ring: Ring
    fragment: int
    """Counted from 0."""
    tensors: RingTensors

    @property
    def values(self) -> int:
        """Number of averaged values."""
        return self.tensors.values

    @property
    def coded_values(self) -> int:
        """Number of those that travel in the ring's codec: the parameters."""
        return sum(math.prod(spec.shape) for spec in self.tensors.parameters)

    def as_ring(self, share: float = 1.0) -> Ring:
        """A ring of the size of this part on the line, where `share` is the codec's share of the uncoded bytes."""
        plain = self.values - self.coded_values
        return replace(self.ring, parameter_bytes=4.0 * (self.coded_values * share + plain))


def tensors_of(graph: PortableGraph, layout: Layout, ring: Ring) -> RingTensors:
    """The tensors that the owners of a ring have in common."""
    states = [s for s in graph.states if ring.start <= layout.state_use.get(s.name, -1) < ring.end]
    return RingTensors(
        parameters=tuple(p for p in graph.parameters if ring.start <= layout.first_use.get(p.name, -1) < ring.end),
        buffers=tuple(s for s in states if s.dtype.is_floating_point),
        counters=tuple(s for s in states if not s.dtype.is_floating_point),
    )


def check_can_be_averaged(graph: PortableGraph) -> None:
    """Raises a PlanError, with the reason, if clusters cannot average this model."""
    one = "train with one cluster (--clusters 1)"
    for spec in (*graph.parameters, *graph.states):
        if spec.dtype.is_complex:
            raise PlanError(f"{spec.key} has complex numbers, which clusters cannot average: {one}.")
    counters = [s for s in graph.states if not s.dtype.is_floating_point]
    total = sum(math.prod(s.shape) for s in counters)
    if total > MAX_COUNTED:
        largest = max(counters, key=lambda s: math.prod(s.shape))
        raise PlanError(
            f"The buffer {largest.key} has {math.prod(largest.shape):,} whole numbers, and clusters can exchange no "
            f"more than {MAX_COUNTED:,} in all such buffers: {one}, or keep it as fractional numbers."
        )


def fragments(rings: Sequence[tuple[Ring, RingTensors]], count: int) -> tuple[RingPart, ...]:
    """The rings in `count` fragments, of which a round averages one; fewer if there are fewer tensors.

    Every tensor is in one part. Every owner sends about the same for each fragment, as far as whole tensors allow: the
    largest tensors come first, and each goes to the fragment for which its owners send the fewest values so far.
    """
    names = {name: i for i, name in enumerate(dict.fromkeys(owner for ring, _ in rings for owner in ring.owners))}
    owners = [np.array([names[owner] for owner in ring.owners]) for ring, _ in rings]
    sent, total = np.zeros((len(names), count)), np.zeros(count)
    chosen: dict[tuple[int, str], int] = {}
    ranked = sorted(
        ((math.prod(s.shape), -number, -i, s.name) for number, (_, t) in enumerate(rings) for i, s in enumerate(t.all)),
        reverse=True,
    )
    for size, number, _, name in ranked:
        here = owners[-number]
        least = min(range(count), key=lambda f: (sent[here, f].max(), total[f], f))
        sent[here, least] += size
        total[least] += size
        chosen[-number, name] = least
    used = {fragment: i for i, fragment in enumerate(sorted(set(chosen.values())))}
    parts = []
    for number, (ring, tensors) in enumerate(rings):
        for fragment in used:
            part = _only(tensors, {s.name for s in tensors.all if chosen[number, s.name] == fragment})
            if part.all:
                parts.append(RingPart(ring, used[fragment], part))
    return tuple(parts)


def by_fragment(parts: Sequence[RingPart]) -> list[list[RingPart]]:
    """The parts of each fragment, from the first."""
    groups: dict[int, list[RingPart]] = {}
    for part in sorted(parts, key=lambda part: part.fragment):
        groups.setdefault(part.fragment, []).append(part)
    return list(groups.values())


def _only(tensors: RingTensors, names: set[str]) -> RingTensors:
    def kept(specs: tuple[WeightSpec, ...]) -> tuple[WeightSpec, ...]:
        return tuple(spec for spec in specs if spec.name in names)

    return RingTensors(kept(tensors.parameters), kept(tensors.buffers), kept(tensors.counters))

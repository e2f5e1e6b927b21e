"""Donors: who gives the stages of a formation what they begin with, where that is a replica of the one before.

The model may be cut elsewhere now. So a stage begins with those parts of the replica that hold some of its tensors, as
many as there are; they come from several providers at once, each over its own line, and are held against the hashes
that their owners told. Nothing of it goes through the coordinator.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from ravnest.coordinator.replicas.tracker import Replica
from ravnest.graph.portable import PortableGraph


@dataclass(frozen=True, slots=True)
class Source:
    """A part that a stage begins with."""

    key: str
    replica: int
    sha256: str
    giver: str
    """Who sends it; empty where it is on the taker's own disk."""


@dataclass(frozen=True, slots=True)
class Donors:
    """A complete replica: which stages it is of, and who has their parts."""

    keys: tuple[str, ...]
    """Of its stages, as parts are named."""
    held: tuple[frozenset[str], ...]
    """Of each stage, the keys of its parameters and states."""
    replica: Replica

    @classmethod
    def of(cls, keys: Sequence[str], graphs: Sequence[PortableGraph], replica: Replica) -> Self:
        held = (frozenset(spec.key for spec in (*graph.parameters, *graph.states)) for graph in graphs)
        return cls(tuple(keys), tuple(held), replica)

    def stages_for(self, graph: PortableGraph) -> list[int]:
        """Those that have some of what this stage holds."""
        wanted = {spec.key for spec in (*graph.parameters, *graph.states)}
        return [stage for stage, held in enumerate(self.held) if not wanted.isdisjoint(held)]

    def can_give(self, graph: PortableGraph, present: Collection[str]) -> bool:
        """Whether of all that this stage holds, somebody who is present has the part."""
        return all(not self.replica.nodes[stage].isdisjoint(present) for stage in self.stages_for(graph))

    def without(self, key: str, node: str) -> Self:
        """The same where this node has not got the part of this stage."""
        nodes = list(self.replica.nodes)
        nodes[self.keys.index(key)] -= {node}
        return replace(self, replica=replace(self.replica, nodes=tuple(nodes)))


def choose_sources(
    donors: Donors, stages: Mapping[str, PortableGraph], present: Collection[str]
) -> dict[str, list[Source]]:
    """For each taker, who gives it what its stage begins with: itself where it has the part, else whoever of those who
    have it gives least so far, so that as many lines as can be are used at once. KeyError where nobody has one."""
    giving: Counter[str] = Counter()
    found: dict[str, list[Source]] = {}
    for taker, graph in stages.items():
        found[taker] = []
        for stage in donors.stages_for(graph):
            have = sorted(donors.replica.nodes[stage].intersection(present))
            if not have:
                raise KeyError(donors.keys[stage])
            giver = taker if taker in have else min(have, key=lambda node: (giving[node], node))
            giving[giver] += giver != taker
            found[taker].append(
                Source(
                    donors.keys[stage],
                    donors.replica.number,
                    donors.replica.sha256(stage),
                    "" if giver == taker else giver,
                )
            )
    return found

"""Rings: for all parameters that have the same owners, these owners, one provider of each cluster.

Clusters may cut the model at different places. All their cuts together divide it into segments, each with one owner in
every cluster. A stage is one piece of the model, so the part that a set of owners has in common is one piece too: a
segment is a ring.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from ravnest.planner.cluster import Cluster
from ravnest.planner.line_arrays import LineArrays
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Network, Pair, Provider
from ravnest.planner.proposal import Proposal
from ravnest.planner.rings.line_shares import WHOLE_LINES, LineShares
from ravnest.planner.rings.order import Order, ring_order, slowest


@dataclass(frozen=True, slots=True)
class Ring:
    """The parameters between two places of the model, and their owners, one provider of each cluster."""

    start: int
    """The place in the model where it begins, as `split` counts them."""
    end: int
    owners: tuple[str, ...]
    """Each sends to the next, and the last to the first; the owner in the plan's first cluster comes first."""
    parameter_bytes: float
    slowest_bytes_per_second: float
    """Rate of its slowest line; without a limit where there is one cluster."""

    @property
    def lines(self) -> tuple[Pair, ...]:
        """The sender and receiver of each line."""
        if len(self.owners) < 2:
            return ()
        return tuple(itertools.pairwise((*self.owners, self.owners[0])))

    @property
    def sent_times(self) -> float:
        """How many times each owner sends its parameters, and receives as much, in a round."""
        return 2 * (len(self.owners) - 1) / len(self.owners)

    @property
    def sent_bytes(self) -> float:
        """Bytes that each owner sends, and receives, in a round."""
        return self.sent_times * self.parameter_bytes


def rings_of(
    plan: Proposal, model: ModelCosts, network: Network, providers: Mapping[str, Provider]
) -> tuple[Ring, ...]:
    """The rings of a plan from the first place of the model to the last; every parameter, and every buffer that
    training changes, is in exactly one of them."""
    all_owners = _Owners.of(network, [providers[name] for cluster in plan.clusters for name in cluster.providers])
    index = {place: i for i, place in enumerate(model.places)}
    rings: list[Ring] = []
    order: Order | None = None
    for start, end, owners in _segments(plan.clusters):
        i, j = index[start], index[end]
        if model.parameters[i] == model.parameters[j] and (model.states is None or model.states[i] == model.states[j]):
            continue
        members = all_owners.numbers(owners)
        rate = all_owners.rate_of_any_order(members)
        if rate is None:
            # Neighbouring rings differ by an owner or two: a good order for one is a good start for the next.
            if order is None or all_owners.relayed(members[order]) > 0:
                order = all_owners.hidden_apart(members)
            rates = all_owners.lines.among(members)
            order = ring_order(rates, order)
            rate = slowest(rates, order)
        in_order = owners if order is None else tuple(owners[k] for k in order)
        size = float(model.parameter_bytes[j] - model.parameter_bytes[i])
        rings.append(Ring(start, end, in_order, size, rate))
    return tuple(rings)


def round_seconds(
    rings: Iterable[Ring],
    network: Network,
    providers: Mapping[str, Provider],
    shares: LineShares = WHOLE_LINES,
) -> float:
    """Time of a round's pieces on the busiest line: all rings run at once and get these shares of the lines of their
    providers. Latency and computing are left out, see `round_time`."""
    up: dict[str, float] = defaultdict(float)
    down: dict[str, float] = defaultdict(float)
    between: dict[Pair, float] = defaultdict(float)
    relayed = 0.0
    for ring in rings:
        for sender, receiver in ring.lines:
            if providers[sender].machine == providers[receiver].machine:
                continue
            up[sender] += ring.sent_bytes
            down[receiver] += ring.sent_bytes
            between[sender, receiver] += ring.sent_bytes
            if network.relayed(providers[sender], providers[receiver]):
                relayed += ring.sent_bytes
    requester = network.requester
    return max(
        relayed / (requester.up_bytes_per_second * shares.relay_up),
        relayed / (requester.down_bytes_per_second * shares.relay_down),
        *(size / (providers[name].up_bytes_per_second * shares.up_of(name)) for name, size in up.items()),
        *(size / (providers[name].down_bytes_per_second * shares.down_of(name)) for name, size in down.items()),
        *(
            size / network.line(providers[sender], providers[receiver]).bytes_per_second
            for (sender, receiver), size in between.items()
        ),
    )


def _segments(clusters: Sequence[Cluster]) -> Iterable[tuple[int, int, tuple[str, ...]]]:
    """Start and end of each segment, and its owner in every cluster."""
    places = sorted({stage.start for cluster in clusters for stage in cluster.stages})
    if not places:
        return
    at = [0] * len(clusters)
    owners = [cluster.providers[0] for cluster in clusters]
    # Clusters by the place of their cuts, so that each is looked at only where it is cut.
    cut_at: dict[int, list[int]] = defaultdict(list)
    for number, cluster in enumerate(clusters):
        for stage in cluster.stages[1:]:
            cut_at[stage.start].append(number)
    last = clusters[0].stages[-1].end
    for start, end in itertools.pairwise((*places, last)):
        for number in cut_at[start]:
            at[number] += 1
            owners[number] = clusters[number].providers[at[number]]
        yield start, end, tuple(owners)


@dataclass(frozen=True, eq=False)
class _Owners:
    """The owners of rings by number, with the lines between them: for a thousand owners these are a million."""

    number: dict[str, int]
    lines: LineArrays

    @classmethod
    def of(cls, network: Network, providers: Sequence[Provider]) -> Self:
        return cls({provider.name: k for k, provider in enumerate(providers)}, LineArrays.of(network, providers))

    def numbers(self, names: Sequence[str]) -> Order:
        return np.array([self.number[name] for name in names])

    def rate_of_any_order(self, members: Order) -> float | None:
        """The slowest line of a ring of these members, if it is the same for every order; None if the order matters.

        Each member sends once and receives once. If the rate of a line follows from its two ends, the slowest line is
        that of the member with the slowest end.
        """
        if len(members) < 2:
            return float("inf")
        lines = self.lines
        if lines.any_measured(members):
            return None
        if lines.hidden[members].sum() > 1 or len(np.unique(lines.machine[members])) < len(members):
            return None
        return float(lines.slower_way[members].min())

    def relayed(self, members: Order) -> int:
        """The number of lines of the ring in this order that the coordinator relays."""
        hidden = self.lines.hidden[members]
        return int((hidden & np.roll(hidden, -1)).sum())

    def hidden_apart(self, members: Order) -> Order:
        """An order in which members that cannot be dialled are no neighbours, as far as there are others to put
        between them: relayed lines share the coordinator's line."""
        hidden = self.lines.hidden[members]
        apart, between = np.flatnonzero(hidden), np.flatnonzero(~hidden)
        pairs = min(len(apart), len(between))
        return np.concatenate([np.stack([apart[:pairs], between[:pairs]], 1).ravel(), apart[pairs:], between[pairs:]])

"""Who averages what with whom: one ring for all parameters that the same providers own, one provider of each cluster.

Clusters may cut the model at different places. All their cuts together divide it into segments, each with one owner in
every cluster. As a stage is one piece, what a set of owners has in common is one piece too: a segment is a ring.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ravnest.planner.cluster import Cluster
from ravnest.planner.model_costs import ModelCosts, Table
from ravnest.planner.problem import Network, Pair, Provider
from ravnest.planner.proposal import Proposal
from ravnest.planner.rings.order import Order, ring_order, slowest


@dataclass(frozen=True, slots=True)
class Ring:
    """The parameters between two places of the model, and who owns them, one provider of each cluster."""

    start: int
    """The place in the model where it begins, as `split` counts them."""
    end: int
    owners: tuple[str, ...]
    """Each sends to the next, and the last to the first; that of the plan's first cluster comes first."""
    parameter_bytes: float
    slowest_bytes_per_second: float
    """Of the line on it that carries least; without a limit where there is one cluster."""

    @property
    def lines(self) -> tuple[Pair, ...]:
        """Who sends to whom."""
        if len(self.owners) < 2:
            return ()
        return tuple(itertools.pairwise((*self.owners, self.owners[0])))

    @property
    def sent_bytes(self) -> float:
        """What each of its owners sends, and receives, in a round."""
        return 2 * (len(self.owners) - 1) / len(self.owners) * self.parameter_bytes


def rings_of(
    plan: Proposal, model: ModelCosts, network: Network, providers: Mapping[str, Provider]
) -> tuple[Ring, ...]:
    """The rings of a plan from the first place of the model to the last; every parameter, and every buffer that
    training changes, is in exactly one of them."""
    lines = _RateArrays.of(network, [providers[name] for cluster in plan.clusters for name in cluster.providers])
    index = {place: i for i, place in enumerate(model.places)}
    rings: list[Ring] = []
    order: Order | None = None
    for start, end, owners in _segments(plan.clusters):
        i, j = index[start], index[end]
        if model.parameters[i] == model.parameters[j] and (model.states is None or model.states[i] == model.states[j]):
            continue
        members = lines.numbers(owners)
        rate = lines.whatever_the_order(members)
        if rate is None:
            # Neighbouring rings differ by an owner or two: what was a good order for one is for the other.
            if order is None or lines.relayed(members[order]) > 0:
                order = lines.hidden_apart(members)
            rates = lines.between(members)
            order = ring_order(rates, order)
            rate = slowest(rates, order)
        in_order = owners if order is None else tuple(owners[k] for k in order)
        size = float(model.parameter_bytes[j] - model.parameter_bytes[i])
        rings.append(Ring(start, end, in_order, size, rate))
    return tuple(rings)


def round_seconds(rings: Iterable[Ring], network: Network, providers: Mapping[str, Provider]) -> float:
    """How long a round takes when all rings run at once and share what each provider can send and receive.

    The way of a byte through each line is not in it: it is short beside a round that takes a while, and hidden by
    sending in many chunks.
    """
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
        relayed / requester.up_bytes_per_second,
        relayed / requester.down_bytes_per_second,
        *(size / providers[name].up_bytes_per_second for name, size in up.items()),
        *(size / providers[name].down_bytes_per_second for name, size in down.items()),
        *(
            size / network.line(providers[sender], providers[receiver]).bytes_per_second
            for (sender, receiver), size in between.items()
        ),
    )


def _segments(clusters: Sequence[Cluster]) -> Iterable[tuple[int, int, tuple[str, ...]]]:
    """Where each begins and ends, and its owner in every cluster."""
    places = sorted({stage.start for cluster in clusters for stage in cluster.stages})
    if not places:
        return
    at = [0] * len(clusters)
    owners = [cluster.providers[0] for cluster in clusters]
    # In the order of the cuts, so that a cluster is looked at only where it is cut.
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


@dataclass(frozen=True, slots=True)
class _RateArrays:
    """What `Network.line` says of every two of these providers, as arrays: for a thousand owners it is a million."""

    number: dict[str, int]
    up: Table
    down: Table
    hidden: np.ndarray[Any, np.dtype[np.bool_]]
    """Those that other machines cannot dial."""
    machine: np.ndarray[Any, np.dtype[np.intp]]
    relay: float
    measured: dict[int, tuple[Order, Table]] = field(default_factory=dict)
    """By sender: the receivers and the rates."""

    @classmethod
    def of(cls, network: Network, providers: Sequence[Provider]) -> "_RateArrays":
        number = {provider.name: k for k, provider in enumerate(providers)}
        machines = {name: k for k, name in enumerate(dict.fromkeys(p.machine for p in providers))}
        found: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for (sender, receiver), line in network.measured.items():
            if sender in number and receiver in number:
                found[number[sender]].append((number[receiver], line.bytes_per_second))
        return cls(
            number,
            np.array([p.up_bytes_per_second for p in providers], float),
            np.array([p.down_bytes_per_second for p in providers], float),
            np.array([not p.reachable for p in providers]),
            np.array([machines[p.machine] for p in providers]),
            min(network.requester.up_bytes_per_second, network.requester.down_bytes_per_second),
            {
                k: (np.array([r for r, _ in lines]), np.array([rate for _, rate in lines], float))
                for k, lines in found.items()
            },
        )

    def numbers(self, names: Sequence[str]) -> Order:
        return np.array([self.number[name] for name in names])

    def whatever_the_order(self, members: Order) -> float | None:
        """The slowest line of every order, where that is the same for all of them; None where the order matters.

        Each member sends once and receives once: with lines that hang on their two ends alone, the slowest is that of
        the member with the slowest end.
        """
        if len(members) < 2:
            return float("inf")
        here = set(members.tolist())
        if any(k in self.measured and not here.isdisjoint(self.measured[k][0].tolist()) for k in here):
            return None
        if self.hidden[members].sum() > 1 or len(np.unique(self.machine[members])) < len(members):
            return None
        return float(min(self.up[members].min(), self.down[members].min()))

    def relayed(self, members: Order) -> int:
        """How many lines of the ring in this order the coordinator passes on."""
        hidden = self.hidden[members]
        return int((hidden & np.roll(hidden, -1)).sum())

    def hidden_apart(self, members: Order) -> Order:
        """An order in which those that cannot be dialled stand apart, as far as there are others to stand between:
        what the coordinator passes on takes of its line, however fast each line is by itself."""
        hidden = self.hidden[members]
        apart, between = np.flatnonzero(hidden), np.flatnonzero(~hidden)
        pairs = min(len(apart), len(between))
        return np.concatenate([np.stack([apart[:pairs], between[:pairs]], 1).ravel(), apart[pairs:], between[pairs:]])

    def between(self, members: Order) -> Table:
        """What the line from each of these to each other one carries."""
        rates: Table = np.minimum(self.up[members][:, None], self.down[members][None, :])
        hidden = self.hidden[members]
        rates[np.ix_(hidden, hidden)] = np.minimum(rates[np.ix_(hidden, hidden)], self.relay)
        column = np.full(len(self.up), -1)
        column[members] = np.arange(len(members))
        for row, member in enumerate(members.tolist()):
            if member in self.measured:
                receivers, known = self.measured[member]
                there = column[receivers]
                rates[row, there[there >= 0]] = known[there >= 0]
        machine = self.machine[members]
        rates[machine[:, None] == machine[None, :]] = np.inf
        return rates

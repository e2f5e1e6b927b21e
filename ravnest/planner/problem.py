"""Planning problem: the machines, the lines between them, and the goal that the job and its requester set."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ravnest.version_policy import DEFAULT_POLICY, POLICIES, VersionPolicy

Pair = tuple[str, str]
"""Sender and receiver."""

NO_LIMIT: Final = math.inf

RELAY_SECONDS: Final = 10e-3
"""Latency that the coordinator adds to a frame that it relays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """One machine. Speeds are relative to the machine on which the model's costs were measured."""

    name: str
    memory_bytes: int
    compute_speed: float = 1.0
    """For products and convolutions."""
    memory_speed: float = 1.0
    """For everything that is limited by moving bytes: the other operators, and updates."""
    operator_seconds: float = 0.0
    """Minimum time of an operator and its backward: on a GPU, starting small operators takes most of the time."""
    min_stage_seconds: float = 0.0
    """Minimum time of a forward and a backward of any stage, on a machine that pretends to be slower."""
    up_bytes_per_second: float = NO_LIMIT
    down_bytes_per_second: float = NO_LIMIT
    latency_seconds: float = 0.0
    """One way to the coordinator."""
    reachable: bool = True
    """Whether other machines can dial it."""
    reliability: float = 1.0
    """Probability that the machine is there when it is needed, see `planner/reliability.py`."""
    host: str = ""
    """Providers of the same host share its cores and have no line between them; empty: a host of its own."""
    cores: int = 1
    threads: float = 1
    """Cores that the provider keeps busy while it computes."""

    @property
    def machine(self) -> str:
        return self.host or self.name


@dataclass(frozen=True, slots=True)
class Line:
    """Bandwidth and latency from one machine to another."""

    bytes_per_second: float = NO_LIMIT
    latency_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Requester:
    """The coordinator's machine: it feeds every cluster, and relays between machines that cannot connect directly."""

    host: str = ""
    up_bytes_per_second: float = NO_LIMIT
    down_bytes_per_second: float = NO_LIMIT


@dataclass(frozen=True, slots=True)
class Network:
    """The lines: those that were measured; others are estimated from the figures of both ends."""

    measured: Mapping[Pair, Line] = field(default_factory=dict)
    requester: Requester = field(default_factory=Requester)

    def line(self, sender: Provider, receiver: Provider) -> Line:
        """The line from one provider to another."""
        if sender.machine == receiver.machine:
            return Line()
        found = self.measured.get((sender.name, receiver.name))
        if found is not None:
            return found
        rate = min(sender.up_bytes_per_second, receiver.down_bytes_per_second)
        # The way over the coordinator: the direct one is hardly longer, and is known once it was measured.
        latency = sender.latency_seconds + receiver.latency_seconds
        if self.relayed(sender, receiver):
            rate = min(rate, self.requester.up_bytes_per_second, self.requester.down_bytes_per_second)
            latency += RELAY_SECONDS
        return Line(rate, latency)

    def relayed(self, one: Provider, other: Provider) -> bool:
        """Whether the coordinator relays between these two."""
        return not (one.reachable or other.reachable) and one.machine != other.machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Settings of the job and its requester that a plan keeps to."""

    in_flight: int | None = None
    """Microbatches in flight in a cluster; None: the planner chooses."""
    max_staleness: int | None = None
    """Hard bound on staleness, in updates."""
    accumulate: int = 1
    versions: str = DEFAULT_POLICY
    """Name of the version policy: the weights that a backward sees, and the state kept for it."""
    predicts: bool = False
    """Whether forwards use predicted weights, which are kept in addition to the newest."""
    average_every: int = 100
    """Microbatches of a cluster between two rounds of averaging."""
    average_share: float = 1.0
    """Bytes sent in a round for each byte of a parameter, after the codec."""
    average_memory: float = 0.0
    """Bytes of memory that averaging needs for each byte of a parameter, if there are several clusters."""
    blocking: bool = False
    """Whether training waits for a round; otherwise rounds run in the background."""
    codecs: tuple[str, ...] = ("float32",)
    """Codecs of activations and gradients, the most precise first. Each link gets one, by the rate of its line; a
    single codec is used on every link."""
    min_clusters: int = 1
    max_clusters: int | None = None
    min_stages: int = 1
    """Minimum stages of a cluster; equal to the number of providers, each of them gets a stage."""
    min_providers: int = 0
    """Minimum number of providers with a stage, over all clusters; only if the number of clusters is set."""

    def __post_init__(self) -> None:
        assert self.max_clusters is None or self.min_clusters <= self.max_clusters
        assert not self.min_providers or self.min_clusters == self.max_clusters

    @property
    def max_in_flight(self) -> int:
        """The most microbatches in flight that staleness, versions and MAX_IN_FLIGHT allow."""
        wanted = MAX_IN_FLIGHT if self.in_flight is None else self.in_flight
        return wanted if self.bound_in_flight is None else min(wanted, self.bound_in_flight)

    @property
    def bound_in_flight(self) -> int | None:
        """Hard bound on microbatches in flight, which holds for later decisions too; None if there is none."""
        bounds = []
        if self.max_staleness is not None:
            # `accumulate` microbatches make an update, and the first of them may have come before.
            bounds.append(self.max_staleness * self.accumulate + 1)
        if self.policy.within_accumulate:
            bounds.append(self.accumulate)
        return min(bounds, default=None)

    @property
    def policy(self) -> VersionPolicy:
        return POLICIES[self.versions]

    def worth(self, in_flight: int) -> float:
        """Worth of a sample trained on with this many in flight, relative to a sample without staleness.

        Staleness up to STALENESS_BOUND is free: every pipeline has it. Beyond, each update costs STALENESS_COST.
        """
        beyond = max(0.0, (in_flight - 1) / self.accumulate - STALENESS_BOUND)
        return 1.0 / (1.0 + STALENESS_COST * beyond)


MAX_IN_FLIGHT: Final = 40
"""Keeps eight stages busy behind lines of 20 Mbit/s and 100 ms that pause for 0.3 s every ten seconds; with 32, they
were busy for 0.91 to 0.95 of the time (tests/planner/in_flight/test_flight_cells.py, benchmarks/RESULTS.md)."""
STALENESS_BOUND: Final = 8
STALENESS_COST: Final = 0.02

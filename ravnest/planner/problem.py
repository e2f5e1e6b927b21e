"""The machines as the planner sees them: what each computes and holds, and how fast two of them talk."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ravnest.version_policy import DEFAULT_POLICY, POLICIES, VersionPolicy

Pair = tuple[str, str]
"""From whom, and to whom."""

NO_LIMIT: Final = math.inf

RELAY_SECONDS: Final = 10e-3
"""Added to the way of what the coordinator passes on: it takes a frame in, and sends it when its line is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """One machine. Speeds are relative to the machine on which the model's costs were measured."""

    name: str
    memory_bytes: int
    compute_speed: float = 1.0
    """Of products and convolutions."""
    memory_speed: float = 1.0
    """Of everything that is limited by moving bytes: the other operators, and updates."""
    operator_seconds: float = 0.0
    """What starting an operator and its backward takes at least, however little they compute: on a GPU, most of it."""
    min_stage_seconds: float = 0.0
    """What a forward and a backward take at least, however small the stage: of a machine that pretends so."""
    up_bytes_per_second: float = NO_LIMIT
    down_bytes_per_second: float = NO_LIMIT
    latency_seconds: float = 0.0
    """One way to the coordinator."""
    reachable: bool = True
    """Whether other machines can dial it."""
    reliability: float = 1.0
    """How likely it is there when it is needed."""
    host: str = ""
    """Providers of the same host share its cores, and talk over no line; none: it is a host of its own."""
    cores: int = 1
    threads: float = 1
    """Cores that it keeps busy while it computes."""

    @property
    def machine(self) -> str:
        return self.host or self.name


@dataclass(frozen=True, slots=True)
class Line:
    """From one machine to another: what it carries in a second, and how long a byte takes."""

    bytes_per_second: float = NO_LIMIT
    latency_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Requester:
    """The coordinator's machine: it feeds every cluster, and passes on what two machines cannot send directly."""

    host: str = ""
    up_bytes_per_second: float = NO_LIMIT
    down_bytes_per_second: float = NO_LIMIT


@dataclass(frozen=True, slots=True)
class Network:
    """What is known of the lines: those that were measured, and for the others what both ends say of themselves."""

    measured: Mapping[Pair, Line] = field(default_factory=dict)
    requester: Requester = field(default_factory=Requester)

    def line(self, sender: Provider, receiver: Provider) -> Line:
        """What carries bytes from one to the other."""
        if sender.machine == receiver.machine:
            return Line()
        found = self.measured.get((sender.name, receiver.name))
        if found is not None:
            return found
        rate = min(sender.up_bytes_per_second, receiver.down_bytes_per_second)
        # By way of the coordinator: the straight way is hardly longer, and is known once it was measured.
        latency = sender.latency_seconds + receiver.latency_seconds
        if self.relayed(sender, receiver):
            rate = min(rate, self.requester.up_bytes_per_second, self.requester.down_bytes_per_second)
            latency += RELAY_SECONDS
        return Line(rate, latency)

    def relayed(self, one: Provider, other: Provider) -> bool:
        """Whether the coordinator passes on what these two send one another."""
        return not (one.reachable or other.reachable) and one.machine != other.machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What the job and its requester fix about a plan."""

    in_flight: int | None = None
    """Microbatches in flight in a cluster, where they are set."""
    max_staleness: int | None = None
    """A bound that always holds."""
    accumulate: int = 1
    versions: str = DEFAULT_POLICY
    """Which weights a backward sees, and what is kept for it: the name of a policy."""
    predicts: bool = False
    """Forwards use predicted weights, which are kept beside the newest."""
    average_every: int = 100
    """Microbatches of a cluster between two rounds of averaging."""
    average_share: float = 1.0
    """What travels in a round for each byte of a parameter: the codec makes it less."""
    average_memory: float = 0.0
    """Bytes that averaging takes for each byte of a parameter, on every provider of several clusters."""
    blocking: bool = False
    """Training waits for a round, instead of going on beside it."""
    codecs: tuple[str, ...] = ("float32",)
    """Of activations and gradients, the one that loses least first: one of them is chosen for each link, from what its
    line carries. One alone: on every link."""
    min_clusters: int = 1
    max_clusters: int | None = None
    min_stages: int = 1
    """Of a cluster; with `min_stages` as many as there are providers, each gets a stage."""
    min_providers: int = 0
    """So many have a stage, in whichever cluster; only where the number of clusters is set."""

    def __post_init__(self) -> None:
        assert self.max_clusters is None or self.min_clusters <= self.max_clusters
        assert not self.min_providers or self.min_clusters == self.max_clusters

    @property
    def max_in_flight(self) -> int:
        """As many as the bounds on staleness and on versions allow, and never more than MAX_IN_FLIGHT."""
        most = MAX_IN_FLIGHT if self.in_flight is None else self.in_flight
        return most if self.bound_in_flight is None else min(most, self.bound_in_flight)

    @property
    def bound_in_flight(self) -> int | None:
        """As many as may ever be in flight, whatever is chosen later; None where nothing bounds them."""
        bounds = []
        if self.max_staleness is not None:
            # Gradients of `accumulate` microbatches make an update, and the first of them may have come before.
            bounds.append(self.max_staleness * self.accumulate + 1)
        if self.policy.within_accumulate:
            bounds.append(self.accumulate)
        return min(bounds, default=None)

    @property
    def policy(self) -> VersionPolicy:
        return POLICIES[self.versions]

    def worth(self, in_flight: int) -> float:
        """What a sample is worth that was trained on with so many in flight, against one that was not stale.

        Up to STALENESS_BOUND staleness costs nothing here: it is what every pipeline has. Beyond it, every further
        update costs STALENESS_COST.
        """
        beyond = max(0.0, (in_flight - 1) / self.accumulate - STALENESS_BOUND)
        return 1.0 / (1.0 + STALENESS_COST * beyond)


MAX_IN_FLIGHT: Final = 40
"""What eight stages need to be busy behind lines of 20 Mbit/s and 100 ms that stand still for 0.3 s every ten seconds:
with 32 they were for 0.91 to 0.95 of the time (tests/planner/in_flight/test_flight_cells.py, benchmarks/RESULTS.md)."""
STALENESS_BOUND: Final = 8
STALENESS_COST: Final = 0.02

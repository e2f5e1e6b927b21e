"""Replica tracker: when each cluster makes a replica, whether it is complete, and which providers have its parts.

A replica is announced with a microbatch, like a checkpoint: every stage copies its state right after it applied that
microbatch, and sends the copy to its holder. The replica is complete when all owners have reported their part. The
coordinator then no longer retains the microbatches up to it. A stage reaches the announced microbatch some time after
it was fed, so the next replica may be announced while one is pending. Replicas are announced so far apart that stages
have sent one before they start to send the next. After a failed replica the tracker backs off.
"""

import math
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.feed.feeder import TrainBatch
from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.replicas.pace import replica_due, replica_timeout_seconds
from ravnest.coordinator.replicas.replica import Replica
from ravnest.errors import printable
from ravnest.net.v1.control_pb2 import Replicated
from ravnest.planner.plan import StagePlan
from ravnest.planner.recovery.state_periods import (
    StageState,
    StatePeriods,
    budget_share,
    state_periods,
    travelling_bytes,
)

MAX_RETAINED: Final = 12288
"""Retained microbatches, beyond those of one update: fewer than a stage remembers of those that it has applied."""
STATE_BYTES: Final = 12
"""Estimated bytes of a part per parameter, until the first part has arrived: most optimizers keep two moments."""
_MAX_REPORTED_SECONDS: Final = 1e6
"""Longest copy time that is accepted from a provider's report."""
_MAX_PENDING: Final = 2
"""Maximum number of pending replicas of a cluster: providers keep the newest two of each stage, and the last complete
one."""
_SPACING: Final = 1.1
"""Minimum time until the next announcement, as a multiple of the time that a stage took to send its part."""
_SHARED_SPACING: Final = 20
"""Minimum time between replicas on a machine that all providers share, as a multiple of the last one's duration."""
_COPY_RATE: Final = 1.5e9
"""Estimated bytes per second at which a stage copies its state, or writes it to a disk that the system caches."""
_MAX_RETAINED_BYTES: Final = 512 << 20
_UNKNOWN_LINE: Final = 1e9
"""Bytes per second assumed for a line without a measurement: both ends are on one machine."""


@dataclass
class _PendingReplica:
    """A replica that was announced and is not complete."""

    place: DataPosition
    began: float
    microbatches: int
    """Microbatches that were fed between the last complete replica and this one."""
    nodes: dict[int, set[str]] = field(default_factory=dict)
    hashes: dict[int, str] = field(default_factory=dict)
    rounded: dict[int, tuple[frozenset[str], str]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    """By stage, the bytes of its part."""
    sent: dict[int, int] = field(default_factory=dict)
    """By stage, the bytes that a line carried for it."""
    seconds: float = 0.0
    """Time of the slowest stage from its snapshot until the holder had its part."""


@dataclass
class _ClusterReplicas:
    """The replicas of one cluster."""

    keys: tuple[str, ...]
    holders: tuple[str, ...] = ()
    """For each stage, the provider that holds its parts besides its owner; empty without one."""
    complete: Replica | None = None
    pending: dict[int, _PendingReplica] = field(default_factory=dict)
    """By replica number, in order."""
    newest: int = 0
    """The highest replica number that was announced."""
    last_began: float = field(default_factory=lambda: time.monotonic())
    last_seconds: float = 0.0
    """Time from the announcement of the last complete replica until it was complete."""
    last_part_seconds: float = 0.0
    """`seconds` of the last complete replica."""
    last_sizes: dict[int, int] = field(default_factory=dict)
    """By stage, the bytes of its part."""
    last_sent: dict[int, int] = field(default_factory=dict)
    """By stage, the bytes that a line carried for it."""
    completed: int = 0
    """Number of complete replicas so far."""
    updates: int = 0
    """Updates that it contains."""
    backoff_seconds: float = 0.0
    """Minimum time until the next try after a failed replica."""
    event_at: float = -math.inf
    is_requested: bool = False
    """A caller waits for a replica: it is announced as soon as possible."""
    is_required: bool = False
    """A replica is announced with the microbatch that is about to be fed."""

    @property
    def largest_bytes(self) -> int:
        """Size of the largest part of the last complete replica; 0 before there is one."""
        return max(self.last_sizes.values(), default=0)


class ReplicaTracker:
    """The replicas of all clusters of one deployment."""

    def __init__(
        self,
        emit: Callable[..., None],
        on_complete: Callable[[], None],
        line_bytes_per_second: Callable[[str], float | None],
        on_announced: Callable[[int, int, DataPosition], None] = lambda cluster, number, place: None,
        shared: bool = False,
        event_seconds: float = 0.0,
        is_exact: bool = False,
    ) -> None:
        """`on_announced` gets the cluster, number and place of each replica before stages are told of it. With `shared`
        all providers run on this machine, so that replicas take compute from training. `event_seconds` is the minimum
        time between events: a replica completes every few seconds, and an event for each would flood the log.
        `is_exact`: no replica is rounded on a line."""
        self._shared, self._event_seconds, self._is_exact = shared, event_seconds, is_exact
        self._emit = emit
        self._on_complete = on_complete
        self._line = line_bytes_per_second
        self._on_announced = on_announced
        self._by_cluster: dict[int, _ClusterReplicas] = {}

    def set_holders(self, cluster: ClusterRun, keys: tuple[str, ...], holders: Mapping[int, str]) -> None:
        """Sets the holders of a cluster that has been deployed; its pending replicas are given up."""
        state = self._by_cluster.setdefault(cluster.id, _ClusterReplicas(keys))
        state.keys, state.pending = keys, {}
        # The new holders have no parts yet: until they do, the loss of one more provider may lose a stage.
        state.is_requested = state.is_requested or state.complete is not None
        state.holders = tuple(holders.get(stage, "") for stage in range(len(keys)))

    def cancel_pending(self, cluster: ClusterRun) -> None:
        """The cluster is being rebuilt. Replayed microbatches announce no replica, so a pending one can never
        become complete."""
        state = self._by_cluster.get(cluster.id)
        if state is not None:
            state.pending = {}

    def remove_provider(self, node_id: str) -> None:
        """This provider is gone, with the parts on its disk."""
        for state in self._by_cluster.values():
            if state.complete is not None:
                nodes = tuple(nodes - {node_id} for nodes in state.complete.nodes)
                state.complete = replace(state.complete, nodes=nodes)
            if node_id in state.holders:
                state.pending = {}

    def add_parts(self, node_id: str, parts: Mapping[tuple[str, int], str]) -> None:
        """A provider has rejoined with these parts on its disk: by key and replica number, how their sha256 begins."""
        for state in self._by_cluster.values():
            for stage, key in enumerate(state.keys):
                found = state.complete
                if found is not None and (key, found.number) in parts:
                    state.complete = found.with_part(stage, node_id, parts[key, found.number])

    def remove_part(self, cluster: ClusterRun, stage: int, node_id: str) -> None:
        """This provider does not have the part of a stage, or has another one than its owner reported."""
        state = self._by_cluster.get(cluster.id)
        if state is not None and state.complete is not None:
            nodes = list(state.complete.nodes)
            nodes[stage] -= {node_id}
            state.complete = replace(state.complete, nodes=tuple(nodes))

    def newest(self, cluster: ClusterRun) -> Replica | None:
        """The newest complete replica."""
        state = self._by_cluster.get(cluster.id)
        return None if state is None else state.complete

    def holder(self, cluster: ClusterRun, stage: int) -> str:
        """The provider that holds the parts of a stage besides its owner; empty without one."""
        state = self._by_cluster.get(cluster.id)
        return state.holders[stage] if state is not None and stage < len(state.holders) else ""

    def makes_replicas_of(self, cluster: ClusterRun) -> bool:
        """Whether the cluster has holders, so that it makes replicas."""
        return cluster.id in self._by_cluster

    def pending(self, cluster: ClusterRun) -> tuple[int, DataPosition, float] | None:
        """The newest pending replica: its number, its place and when it was announced; None without one."""
        state = self._by_cluster.get(cluster.id)
        if state is None or not state.pending:
            return None
        number = next(reversed(state.pending))
        return number, state.pending[number].place, state.pending[number].began

    def part_bytes(self, stage: StagePlan) -> int:
        """Size of the newest part of a stage, or an estimate before there is one."""
        state = self._by_cluster.get(stage.cluster)
        return (state.last_sizes.get(stage.stage) if state is not None else 0) or STATE_BYTES * stage.parameters

    @property
    def largest_part_bytes(self) -> int:
        """Size of the largest part in the newest replicas."""
        return max((state.largest_bytes for state in self._by_cluster.values()), default=0)

    def periods(
        self, cluster: ClusterRun, wished_seconds: float | None, requester_bytes_per_second: float = math.inf
    ) -> StatePeriods:
        """How often this cluster makes replicas and gets a checkpoint, by its lines and the sizes of its parts: those
        of the last complete replica, or else estimates."""
        state = self._by_cluster.get(cluster.id)
        sizes, sent = ({}, {}) if state is None else (state.last_sizes, state.last_sent)
        stages = []
        for number, stage in enumerate(cluster.plan.stages):
            size = sizes.get(number) or STATE_BYTES * stage.parameters
            line = self._line(stage.node) or _UNKNOWN_LINE
            coded = travelling_bytes(size, line, is_exact=self._is_exact, is_local=self._shared)
            # The first part is no difference, and larger than those to come.
            is_known = state is not None and state.completed > 1
            stages.append(StageState(stage.node, sent.get(number, coded) if is_known else coded, size, line))
        return state_periods(
            stages,
            wished_seconds,
            requester_bytes_per_second,
            has_replicas=state is not None,
            share=budget_share(len(self._by_cluster)),
            measured_seconds=0.0 if state is None or state.completed < 2 or self._shared else state.last_part_seconds,
        )

    def request(self, cluster: ClusterRun) -> None:
        """Announces a replica with the next microbatch that completes an update."""
        state = self._by_cluster.get(cluster.id)
        if state is not None:
            state.is_requested = True

    def require(self, cluster: ClusterRun) -> None:
        """Announces a replica with the very microbatch that is about to be fed, whatever the pace says. For a cluster
        without a pending replica."""
        state = self._by_cluster.get(cluster.id)
        if state is not None:
            state.is_required = True

    def give_up_late(self, cluster: ClusterRun) -> None:
        """Gives up the pending replicas if the oldest takes too long."""
        state = self._by_cluster.get(cluster.id)
        if state is None or not state.pending:
            return
        waited_seconds = time.monotonic() - next(iter(state.pending.values())).began
        part_bytes = max(state.largest_bytes, STATE_BYTES * max(stage.parameters for stage in cluster.plan.stages))
        if waited_seconds >= replica_timeout_seconds(part_bytes, self._slowest(cluster), state.last_seconds):
            self._give_up(cluster.id, state, f"not every part was confirmed after {waited_seconds:.0f} s")

    def announce_with(self, cluster: ClusterRun, item: TrainBatch) -> int:
        """The number of the replica that is announced with this microbatch, which completes an update; 0 for none."""
        state = self._by_cluster.get(cluster.id)
        size = sum(tensor.nbytes for tensor in item.tensors.values())
        _limit_retained(cluster, MAX_RETAINED if state is not None else 0, size)
        if state is None or cluster.is_forming or item.microbatch < state.newest:
            # A lost cluster's microbatch may be older than the newest replica here: providers keep the highest numbers.
            return 0
        now = time.monotonic()
        self.give_up_late(cluster)
        if state.pending and (state.complete is None or len(state.pending) >= _MAX_PENDING):
            return 0
        if not state.is_required and now - state.last_began < max(
            state.backoff_seconds, _SPACING * state.last_part_seconds if state.pending else 0.0
        ):
            return 0
        retained = len(cluster.retained)
        due, _ = replica_due(
            seconds_since_last=now - state.last_began,
            # Without a replica a loss costs all that was trained so far.
            period_seconds=0.0 if state.complete is None else self.periods(cluster, None).replica_seconds,
            retained_microbatches=retained,
            retained_bytes=retained * size,
            updates_since=item.after.updates - state.updates,
            copy_seconds=state.largest_bytes / _COPY_RATE,
        )
        if self._shared and now - state.last_began < _SHARED_SPACING * state.last_seconds:
            due = False
        if not (due or state.is_requested or state.is_required):
            return 0
        number = item.microbatch + 1
        state.pending[number] = _PendingReplica(item.after, now, cluster.dropped + len(cluster.retained))
        state.newest, state.last_began, state.is_requested, state.is_required = number, now, False, False
        self._on_announced(cluster.id, number, item.after)
        return number

    def on_replicated(self, node_id: str, message: Replicated, clusters: Collection[ClusterRun]) -> None:
        """An owner reports that its holder has its part, or why not."""
        for cluster in clusters:
            state = self._by_cluster.get(cluster.id)
            if state is None or message.key not in state.keys:
                continue
            found = state.pending.get(message.replica)
            if found is None:
                continue
            if cluster.is_forming:
                # The cluster restarts from the last complete replica: the microbatches since then stay retained.
                return
            stage = state.keys.index(message.key)
            if cluster.plan.stages[stage].node != node_id:
                continue
            if message.error:
                self._give_up(cluster.id, state, f"{node_id}: {printable(message.error)}")
                return
            # Only the holder that the coordinator assigned may be asked for the part.
            found.nodes[stage] = {node_id} | ({message.holder} if message.holder == state.holders[stage] else set()) - {
                ""
            }
            found.hashes[stage] = _hash_or_nothing(message.sha256)
            held = _hash_or_nothing(message.holder_sha256)
            is_rounded = held not in ("", found.hashes[stage])
            found.rounded[stage] = (frozenset([message.holder]), held) if is_rounded else (frozenset(), "")
            found.sizes[stage] = message.size_bytes
            # An owner that does not say what it sent has sent the part as it is.
            found.sent[stage] = min(message.sent_bytes or message.size_bytes, 2 * message.size_bytes)
            # NaN fails the comparison and is rejected.
            found.seconds = max(found.seconds, message.seconds if 0 <= message.seconds < _MAX_REPORTED_SECONDS else 0.0)
            if len(found.nodes) == len(state.keys):
                self._complete(cluster, state, message.replica, found)
            return

    def _slowest(self, cluster: ClusterRun) -> float:
        """Bytes per second of the slowest line that carries a part."""
        return min(self._line(node) or _UNKNOWN_LINE for node in cluster.nodes)

    def _complete(self, cluster: ClusterRun, state: _ClusterReplicas, number: int, done: _PendingReplica) -> None:
        nodes = tuple(frozenset(done.nodes[stage]) for stage in range(len(state.keys)))
        hashes = tuple(done.hashes[stage] for stage in range(len(state.keys)))
        rounded = tuple(done.rounded[stage] for stage in range(len(state.keys)))
        sizes = tuple(done.sizes[stage] for stage in range(len(state.keys)))
        state.complete = Replica(number, done.place, nodes, hashes, rounded, sizes, done.began)
        state.backoff_seconds, state.completed = 0.0, state.completed + 1
        state.last_seconds, state.last_part_seconds = time.monotonic() - done.began, done.seconds
        state.last_sizes, state.last_sent, state.updates = done.sizes, done.sent, done.place.updates
        # In the order of feeding, which differs from the order of numbers after a cluster was lost.
        dropped = min(cluster.dropped, done.microbatches + 1)
        cluster.dropped -= dropped
        for microbatch in list(cluster.retained)[: done.microbatches + 1 - dropped]:
            del cluster.retained[microbatch]
        # Older pending replicas are superseded.
        later = list(state.pending).index(number) + 1
        state.pending = dict(list(state.pending.items())[later:])
        for other in state.pending.values():
            other.microbatches -= done.microbatches + 1
        if time.monotonic() - state.event_at < self._event_seconds:
            self._on_complete()
            return
        state.event_at = time.monotonic()
        self._emit(
            "replica",
            f"every stage has a replica of its state after {done.place.updates} updates",
            cluster=cluster.id,
            replica=number,
            seconds=state.last_seconds,
            bytes=state.largest_bytes,
            sent_bytes=max(done.sent.values(), default=0),
        )
        self._on_complete()

    def _give_up(self, cluster: int, state: _ClusterReplicas, why: str) -> None:
        self._emit("replica_failed", why, cluster=cluster, replica=next(iter(state.pending)))
        state.pending, state.backoff_seconds = {}, min(60.0, max(2.0, 2 * state.backoff_seconds))
        state.last_began = time.monotonic()


def _hash_or_nothing(text: str) -> str:
    return text if re.fullmatch("[0-9a-f]{64}", text) else ""


def _limit_retained(cluster: ClusterRun, max_microbatches: int, microbatch_bytes: int) -> None:
    """Drops the oldest retained microbatches beyond the limits, in case no replica ever completes."""
    while len(cluster.retained) > min(max_microbatches, _MAX_RETAINED_BYTES // max(1, microbatch_bytes)):
        oldest = next(iter(cluster.retained))
        if oldest in cluster.open:
            return
        del cluster.retained[oldest]
        cluster.dropped += 1

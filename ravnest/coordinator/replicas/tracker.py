"""Replicas: what is kept of a cluster's stages beside themselves, so that another machine can go on where one is lost.

A replica is announced with a microbatch, as a checkpoint is: every stage keeps its state right after applying that one,
and sends it to its holder. Once all have said so it is complete, and what was fed up to it need not be kept any more.
The microbatch of the next may be fed while one is under way, as it takes a while until its turn has come: so often that
stages have sent one before they are to send another.
"""

import math
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.feed.feeder import TrainBatch
from ravnest.coordinator.feed.ledger import Place
from ravnest.coordinator.replicas.pace import patience_seconds, replica_due
from ravnest.errors import printable
from ravnest.net.v1.control_pb2 import Replicated

MAX_RETAINED: Final = 3072
"""Microbatches, and those of one more update: fewer than a stage remembers of those that it has applied."""
_STATE_BYTES: Final = 12
"""Estimated size of a part for each parameter, until one has come: most optimizers keep two moments."""
_MAX_SECONDS: Final = 1e6
"""That a provider may say it took to keep a part."""
_MAX_UNDER_WAY: Final = 2
"""Providers keep the newest two of each stage, and the last that is complete."""
_APART: Final = 1.1
"""Times as long as a stage took to send one, until the next is announced."""
_TELL_SECONDS: Final = 30.0
"""One is taken every few seconds; an event for each would be all that there is to read."""
_SHARED_TIMES: Final = 20
"""As long as one took, the next is not begun on a machine that has it all to do."""
_COPY_RATE: Final = 2e9
"""Bytes a second at which a stage copies its state, about; the least that is met today."""
_MAX_RETAINED_BYTES: Final = 512 << 20
_UNKNOWN_LINE: Final = 1e9
"""Bytes a second of a line that nobody has measured: within one machine."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A complete one: the stages of a cluster as they were after the same microbatch."""

    number: int
    """That microbatch, and one."""
    place: Place
    nodes: tuple[frozenset[str], ...]
    """Of each stage, who has its part."""
    hashes: tuple[str, ...] = ()
    """Of each stage, the sha256 of its part as its owner told it; empty where it did not."""

    def sha256(self, stage: int) -> str:
        return self.hashes[stage] if stage < len(self.hashes) else ""

    def whole(self, present: Collection[str]) -> bool:
        """Whether of each stage somebody who is present has its part."""
        return all(not nodes.isdisjoint(present) for nodes in self.nodes)


@dataclass
class _UnderWay:
    """One that was announced, and is not complete."""

    place: Place
    began: float
    fed: int
    """How many were fed between the last that is complete and it."""
    nodes: dict[int, set[str]] = field(default_factory=dict)
    hashes: dict[int, str] = field(default_factory=dict)
    bytes: int = 0
    """Of its largest part."""
    seconds: float = 0.0
    """What the slowest stage took to keep it."""


@dataclass
class _Kept:
    """The replicas of one cluster."""

    keys: tuple[str, ...]
    holders: tuple[str, ...] = ()
    """Of each stage who keeps its parts beside its owner; empty: nobody."""
    complete: Replica | None = None
    under_way: dict[int, _UnderWay] = field(default_factory=dict)
    """By number, in order."""
    newest: int = 0
    """The highest that was announced."""
    last_began: float = field(default_factory=lambda: time.monotonic())
    last_seconds: float = 0.0
    keeping_seconds: float = 0.0
    """Of the last that is complete, what the slowest stage took to keep it."""
    last_bytes: int = 0
    updates: int = 0
    waits: float = 0.0
    """After one that failed, the next is not tried for so long."""
    told: float = -math.inf
    wanted: bool = False
    """Somebody waits for one: it is announced as soon as may be."""


class Replicas:
    """Of all clusters of a formation."""

    def __init__(
        self,
        emit: Callable[..., None],
        changed: Callable[[], None],
        line_bytes_per_second: Callable[[str], float | None],
        announced: Callable[[int, int, Place], None] = lambda cluster, number, place: None,
        shared: bool = False,
    ) -> None:
        """`announced` is told of each before it is: cluster, number, place. Of a machine that is `shared` by all
        providers, what a replica costs is taken from training."""
        self._shared = shared
        self._emit = emit
        self._changed = changed
        self._line = line_bytes_per_second
        self._announced = announced
        self._kept: dict[int, _Kept] = {}

    def formed(self, cluster: ClusterRun, keys: tuple[str, ...], holders: Mapping[int, str]) -> None:
        """A cluster has been formed, and these keep its stages' parts; what was under way there is given up."""
        kept = self._kept.setdefault(cluster.id, _Kept(keys))
        kept.keys, kept.under_way = keys, {}
        # Others keep its parts from now on, and have none yet: until they do, one more loss may be one too many.
        kept.wanted = kept.wanted or kept.complete is not None
        kept.holders = tuple(holders.get(stage, "") for stage in range(len(keys)))

    def broken_off(self, cluster: ClusterRun) -> None:
        """The cluster is being formed anew: what comes again brings no replica along, so the one under way never will
        be whole."""
        kept = self._kept.get(cluster.id)
        if kept is not None:
            kept.under_way = {}

    def gone(self, node_id: str) -> None:
        """What this node kept cannot be had any more."""
        for kept in self._kept.values():
            if kept.complete is not None:
                nodes = tuple(nodes - {node_id} for nodes in kept.complete.nodes)
                kept.complete = replace(kept.complete, nodes=nodes)
            if node_id in kept.holders:
                kept.under_way = {}

    def returned(self, node_id: str, parts: Collection[tuple[str, int]]) -> None:
        """A node is back with these parts on its disk, by key and number."""
        for kept in self._kept.values():
            found = kept.complete
            if found is None:
                continue
            has = [
                nodes | {node_id} if (key, found.number) in parts else nodes
                for key, nodes in zip(kept.keys, found.nodes, strict=True)
            ]
            kept.complete = replace(found, nodes=tuple(map(frozenset, has)))

    def lacks(self, cluster: ClusterRun, stage: int, node_id: str) -> None:
        """This node has not got the part of a stage, or another one than its owner kept."""
        kept = self._kept.get(cluster.id)
        if kept is not None and kept.complete is not None:
            nodes = list(kept.complete.nodes)
            nodes[stage] -= {node_id}
            kept.complete = replace(kept.complete, nodes=tuple(nodes))

    def of(self, cluster: ClusterRun) -> Replica | None:
        """The newest complete one."""
        kept = self._kept.get(cluster.id)
        return None if kept is None else kept.complete

    def holder(self, cluster: ClusterRun, stage: int) -> str:
        """Who keeps the parts of a stage, beside its owner; empty: nobody."""
        kept = self._kept.get(cluster.id)
        return kept.holders[stage] if kept is not None and stage < len(kept.holders) else ""

    @property
    def largest_bytes(self) -> int:
        """Of a part, of the newest replicas."""
        return max((kept.last_bytes for kept in self._kept.values()), default=0)

    def want(self, cluster: ClusterRun) -> None:
        """One is to be taken with the next microbatch that completes an update."""
        kept = self._kept.get(cluster.id)
        if kept is not None:
            kept.wanted = True

    def with_microbatch(self, cluster: ClusterRun, item: TrainBatch) -> int:
        """The number of the replica that the cluster is to keep with this microbatch, which completes an update; or
        0."""
        kept = self._kept.get(cluster.id)
        size = sum(tensor.nbytes for tensor in item.tensors.values())
        _bound(cluster, MAX_RETAINED if kept is not None else 0, size)
        if kept is None or cluster.forming or item.microbatch < kept.newest:
            # What another cluster left is older than what was fed here before it: providers keep the highest numbers.
            return 0
        now = time.monotonic()
        if kept.under_way:
            oldest = next(iter(kept.under_way.values()))
            part_bytes = max(kept.last_bytes, _STATE_BYTES * max(stage.parameters for stage in cluster.plan.stages))
            if now - oldest.began >= patience_seconds(part_bytes, self._slowest(cluster), kept.last_seconds):
                self._give_up(cluster.id, kept, f"not all of it was there after {now - oldest.began:.0f} s")
            elif kept.complete is None or len(kept.under_way) >= _MAX_UNDER_WAY:
                return 0
        if now - kept.last_began < max(kept.waits, _APART * kept.keeping_seconds if kept.under_way else 0.0):
            return 0
        retained = len(cluster.retained)
        due, _ = replica_due(
            seconds_since_last=now - kept.last_began,
            last_seconds=kept.last_seconds,
            last_bytes=kept.last_bytes,
            line_bytes_per_second=self._slowest(cluster),
            retained_microbatches=retained,
            retained_bytes=retained * size,
            updates_since=item.after.updates - kept.updates,
            copy_seconds=kept.last_bytes / _COPY_RATE,
        )
        if self._shared and now - kept.last_began < _SHARED_TIMES * kept.last_seconds:
            due = False
        if not (due or kept.wanted):
            return 0
        number = item.microbatch + 1
        kept.under_way[number] = _UnderWay(item.after, now, cluster.dropped + len(cluster.retained))
        kept.newest, kept.last_began, kept.wanted = number, now, False
        self._announced(cluster.id, number, item.after)
        return number

    def heard(self, node_id: str, message: Replicated, clusters: Collection[ClusterRun]) -> None:
        """An owner says that its part is kept, or why it is not."""
        for cluster in clusters:
            kept = self._kept.get(cluster.id)
            if kept is None or message.key not in kept.keys:
                continue
            found = kept.under_way.get(message.replica)
            if found is None:
                continue
            if cluster.forming:
                # It is formed from the one before, and what was fed since then is to stay.
                return
            stage = kept.keys.index(message.key)
            if cluster.plan.stages[stage].node != node_id:
                continue
            if message.error:
                self._give_up(cluster.id, kept, f"{node_id}: {printable(message.error)}")
                return
            # Only whom it was told to give it to: nobody else is to be asked for it.
            found.nodes[stage] = {node_id, *([message.holder] if message.holder == kept.holders[stage] != "" else [])}
            found.hashes[stage] = message.sha256 if re.fullmatch("[0-9a-f]{64}", message.sha256) else ""
            found.bytes = max(found.bytes, message.size_bytes)
            # Not of what is no number.
            found.seconds = max(found.seconds, message.seconds if 0 <= message.seconds < _MAX_SECONDS else 0.0)
            if len(found.nodes) == len(kept.keys):
                self._complete(cluster, kept, message.replica, found)
            return

    def _slowest(self, cluster: ClusterRun) -> float:
        """Bytes a second of the slowest line that carries a part."""
        return min(self._line(node) or _UNKNOWN_LINE for node in cluster.nodes)

    def _complete(self, cluster: ClusterRun, kept: _Kept, number: int, done: _UnderWay) -> None:
        nodes = tuple(frozenset(done.nodes[stage]) for stage in range(len(kept.keys)))
        hashes = tuple(done.hashes[stage] for stage in range(len(kept.keys)))
        kept.complete, kept.waits = Replica(number, done.place, nodes, hashes), 0.0
        kept.last_seconds, kept.keeping_seconds = time.monotonic() - done.began, done.seconds
        kept.last_bytes, kept.updates = done.bytes, done.place.updates
        # In the order in which they were fed, which is not that of their numbers after a cluster was lost.
        dropped = min(cluster.dropped, done.fed + 1)
        cluster.dropped -= dropped
        for microbatch in list(cluster.retained)[: done.fed + 1 - dropped]:
            del cluster.retained[microbatch]
        # What is older than it need not be waited for.
        later = list(kept.under_way).index(number) + 1
        kept.under_way = dict(list(kept.under_way.items())[later:])
        for other in kept.under_way.values():
            other.fed -= done.fed + 1
        if time.monotonic() - kept.told < _TELL_SECONDS:
            self._changed()
            return
        kept.told = time.monotonic()
        self._emit(
            "replica",
            f"all stages as they were after {done.place.updates} updates are kept by others",
            cluster=cluster.id,
            replica=number,
            seconds=kept.last_seconds,
            bytes=done.bytes,
        )
        self._changed()

    def _give_up(self, cluster: int, kept: _Kept, why: str) -> None:
        self._emit("replica_failed", why, cluster=cluster, replica=next(iter(kept.under_way)))
        kept.under_way, kept.waits = {}, min(60.0, max(2.0, 2 * kept.waits))
        kept.last_began = time.monotonic()


def _bound(cluster: ClusterRun, most: int, size_bytes: int) -> None:
    """What is retained does not grow without end where no replica can be had, of microbatches that are about so
    large."""
    while len(cluster.retained) > min(most, _MAX_RETAINED_BYTES // max(1, size_bytes)):
        oldest = next(iter(cluster.retained))
        if oldest in cluster.open:
            return
        del cluster.retained[oldest]
        cluster.dropped += 1

"""Collector of checkpoints: the parts of a complete replica go to the coordinator in the background.

The stages do nothing for it and wait for nothing: the parts lie on the disks of their owners and holders. They are
pinned there until the collection ends. A lost provider is replaced by another one with the part (`PartUploads`).
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

from ravnest.coordinator.checkpoints.reader import CheckpointInfo
from ravnest.coordinator.checkpoints.saver import Saver
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.replicas.choose_replica import KnownReplica, UploadLine, choose_replica, choose_senders
from ravnest.coordinator.replicas.holders import ReplicaHolders
from ravnest.coordinator.replicas.part_uploads import PartRequest, PartUploads
from ravnest.coordinator.replicas.replica import Replica
from ravnest.coordinator.run.collecting import ReplicaChoice
from ravnest.coordinator.run.context import RunContext
from ravnest.coordinator.run.orders import stage_key
from ravnest.settings import Checkpoint

_LOOK_SECONDS: Final = 5.0
"""Time after which a pending replica is looked at again, while no microbatch is fed."""


class ReplicaCollector:
    """Implements `run.collecting.Collector` for one deployment."""

    def __init__(
        self,
        context: RunContext,
        deployment: str,
        holders: ReplicaHolders,
        uploads: PartUploads,
        settings: Checkpoint,
    ) -> None:
        self._context = context
        self._deployment = deployment
        self._holders = holders
        self._uploads = uploads
        self._settings = settings

    def choose(
        self, cluster: ClusterRun, number: int, place: DataPosition, collected_updates: int
    ) -> tuple[ReplicaChoice, str] | None:
        replicas = self._holders.replicas
        if not replicas.makes_replicas_of(cluster):
            return None
        now, newest, pending = time.monotonic(), replicas.newest(cluster), replicas.pending(cluster)
        complete = None
        if newest is not None and newest.is_available(self._context.present):
            complete = KnownReplica(newest.number, newest.place, now - newest.announced_at)
        coming = None if pending is None else KnownReplica(pending[0], pending[1], now - pending[2])
        return choose_replica(number, place, collected_updates, self._settings, complete, coming)

    def require(self, cluster: ClusterRun) -> None:
        self._holders.replicas.require(cluster)

    async def next_replica(
        self,
        cluster: ClusterRun,
        wanted_updates: int,
        collected_updates: int,
        failed: set[int],
        is_over: Callable[[], bool],
        is_stuck: Callable[[], bool],
    ) -> ReplicaChoice | None:
        replicas = self._holders.replicas

        def found() -> Replica | None:
            newest = replicas.newest(cluster)
            least = wanted_updates if replicas.pending(cluster) is not None else collected_updates + 1
            is_it = newest is not None and newest.place.updates >= least and newest.number not in failed
            return newest if is_it else None

        def is_idle() -> bool:
            return is_stuck() and replicas.pending(cluster) is None

        while not is_over():
            if (replica := found()) is not None:
                age_seconds = time.monotonic() - replica.announced_at
                return ReplicaChoice(replica.number, replica.place, age_seconds, False)
            if is_idle():
                return None
            if replicas.pending(cluster) is None:
                replicas.request(cluster)
            replicas.give_up_late(cluster)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._context.until(lambda: is_over() or found() is not None or is_idle())
        return None

    async def collect(
        self, cluster: ClusterRun, saver: Saver, number: int, is_urgent: Callable[[], bool]
    ) -> CheckpointInfo | None:
        replica = self._holders.replicas.newest(cluster)
        if replica is None or replica.number != number:
            return None
        wanted, reason = self._requests(cluster, replica)
        what = f"the replica after {replica.place.updates} updates is collected: {reason}"
        self._context.emit("collecting", what, replica=number, updates=replica.place.updates, urgent=is_urgent())
        self._holders.pin(cluster, number)
        try:
            return await self._uploads.collect(saver, number, wanted, is_urgent)
        finally:
            self._holders.unpin(cluster)

    def _requests(self, cluster: ClusterRun, replica: Replica) -> tuple[dict[int, PartRequest], str]:
        """The parts of a replica, each with the providers to ask in order, and why in this order."""
        stages = cluster.plan.stages
        present, members, reports = self._context.present, self._context.members, self._context.progress.reports
        parts = {}
        for stage in stages:
            size = replica.sizes_bytes[stage.stage] if replica.sizes_bytes else 0
            parts[stage.stage] = size, replica.nodes[stage.stage] & present
        lines = {}
        for node in {node for _, nodes in parts.values() for node in nodes}:
            sending = reports[node].transfers if node in reports else ()
            left = sum(max(0, each.total_bytes - each.done_bytes) for each in sending)
            lines[node] = UploadLine(members.line_rate(node), left)
        senders, reason = choose_senders(parts, lines)
        wanted = {
            stage.stage: PartRequest(
                stage_key(self._deployment, stage),
                senders[stage.stage],
                {node: replica.sha256(stage.stage, node) for node in senders[stage.stage]},
            )
            for stage in stages
        }
        return wanted, reason

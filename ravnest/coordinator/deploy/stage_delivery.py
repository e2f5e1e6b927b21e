"""Delivery of stages to providers: the orders go out, and the coordinator waits until every stage is built.

A provider that stops making progress with its stage is given up after a timeout, and the delivery is aborted when a
provider of the cluster is lost.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Final

from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.replicas.sources import DeploymentAbortedError
from ravnest.coordinator.replicas.tracker import ReplicaTracker
from ravnest.coordinator.run.context import RunContext
from ravnest.coordinator.swarm.members import Member
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Deploy, Ready, Threads

_MAX_READY_SECONDS: Final = 3600.0
_MIN_BYTES_PER_SECOND: Final = 1e5
"""Rate that is assumed for a part that another provider sends: the coordinator hears nothing of its progress."""


class StageDelivery:
    """The delivery of one deployment's stages."""

    def __init__(self, context: RunContext, replicas: ReplicaTracker, threads: int) -> None:
        """`threads` is the number of threads for providers that do not choose one themselves."""
        self.ready: dict[str, Ready] = {}
        """By provider, its last message that its stage is ready."""
        self._context = context
        self._replicas = replicas
        self._threads = threads
        self._heard_at: dict[str, float] = {}
        """By provider, when it was given its stage or last received some of it."""

    async def give(self, member: Member, order: Deploy) -> None:
        """Sends the order for a stage to its provider."""
        if not member.machine.threads:
            message = CoordinatorMessage(threads=Threads(threads=self._threads))
            await self._context.tell(member.node_id, message)
        self._heard_at[member.node_id] = time.monotonic()
        await self._context.tell(member.node_id, CoordinatorMessage(deploy=order))

    def on_fetching(self, node_id: str) -> None:
        """A provider has received some more of its stage."""
        self._heard_at[node_id] = time.monotonic()

    def on_ready(self, node_id: str, ready: Ready) -> None:
        """A provider has built its stage."""
        self.ready[node_id] = ready
        self._context.notify()

    def is_ready(self, cluster: ClusterRun, node_id: str) -> bool:
        """Whether the provider has the stage of this generation of the cluster."""
        ready = self.ready.get(node_id)
        return ready is not None and ready.generation == cluster.generation

    async def until_ready(self, clusters: Sequence[ClusterRun]) -> None:
        """Returns when all stages of these clusters are ready. DeploymentAbortedError if one of them is lost."""

        def unready() -> list[str]:
            return [node for cluster in clusters for node in cluster.nodes if not self.is_ready(cluster, node)]

        timeout_seconds = max(
            self._context.timeouts.stage_ready_seconds,
            min(_MAX_READY_SECONDS, self._replicas.largest_part_bytes / _MIN_BYTES_PER_SECOND),
        )
        while unready() and not self._why_aborted(clusters):
            due = min(self._heard_at[node] for node in unready()) + timeout_seconds
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - time.monotonic())):
                    await self._context.until(lambda: not unready() or bool(self._why_aborted(clusters)))
            for node in [] if self._why_aborted(clusters) else unready():
                silent_seconds = time.monotonic() - self._heard_at[node]
                if silent_seconds >= timeout_seconds:
                    reason = f"it was given a stage and has received none of it for {silent_seconds:.0f} s"
                    self._context.give_up(node, reason)
        self.check_complete(clusters)

    def check_complete(self, clusters: Sequence[ClusterRun]) -> None:
        """DeploymentAbortedError if a provider of these clusters is lost, or if another deployment has replaced
        them."""
        if why := self._why_aborted(clusters):
            raise DeploymentAbortedError(why)

    def _why_aborted(self, clusters: Sequence[ClusterRun]) -> str:
        for cluster in clusters:
            if cluster.is_lost:
                return cluster.reason
            if missing := self._context.missing_from(cluster):
                return f"{missing[0]} is gone"
        return ""

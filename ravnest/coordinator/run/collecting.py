"""Contract between the checkpointer and the replicas of a deployment: a checkpoint is a replica that is collected."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ravnest.coordinator.checkpoints.reader import CheckpointInfo
from ravnest.coordinator.checkpoints.saver import Saver
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.feed.ledger import DataPosition


@dataclass(frozen=True, slots=True)
class ReplicaChoice:
    """The replica that becomes the next checkpoint."""

    number: int
    place: DataPosition
    age_seconds: float
    """Time since it was announced."""
    is_new: bool
    """Whether it has to be announced with the microbatch that is about to be fed."""


class Collector(Protocol):
    """Collects replicas of one deployment as checkpoints. All methods run on the network's event loop."""

    def choose(
        self, cluster: ClusterRun, number: int, place: DataPosition, collected_updates: int
    ) -> tuple[ReplicaChoice, str] | None:
        """The replica for a checkpoint that is due with the microbatch `number - 1`, after which the data stands at
        `place`, and why it is that one. None if the cluster makes no replicas."""

    def require(self, cluster: ClusterRun) -> None:
        """Announces a replica with the very microbatch that is about to be fed."""

    async def next_replica(
        self,
        cluster: ClusterRun,
        wanted_updates: int,
        collected_updates: int,
        failed: set[int],
        is_over: Callable[[], bool],
        is_stuck: Callable[[], bool],
    ) -> ReplicaChoice | None:
        """Waits for a complete replica with at least `wanted_updates`, or after a failure for any with more than
        `collected_updates` whose number is not in `failed`. None once `is_over`, or when no replica is pending and
        `is_stuck`, because no microbatch comes that could announce another."""

    async def collect(
        self, cluster: ClusterRun, saver: Saver, number: int, is_urgent: Callable[[], bool]
    ) -> CheckpointInfo | None:
        """Collects the parts of this complete replica for the saver's pending checkpoint of the same number. None when
        a part cannot be obtained, or the checkpoint was given up. `is_urgent`: whether training waits for it."""

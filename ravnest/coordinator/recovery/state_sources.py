"""State for a stage without a replica: from the owners of the same rings in another cluster, or from a checkpoint.

All clusters have the same parameters, each with what it learned since the last round. If both the provider of a stage
and the holder of its replica are lost, another cluster's newest replica has the stage's tensors, even if that cluster
cuts the model elsewhere. Only the parts that hold some of these tensors are sent. If they do not arrive, the next
attempt uses another cluster, or the newest checkpoint. If there is neither, the stage gets no state from here.
"""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from ravnest.coordinator.checkpoints.reader import load_checkpoint
from ravnest.coordinator.deploy.cluster_rebuild import BorrowedState
from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.replicas.replica import Replica
from ravnest.coordinator.replicas.sources import ReplicaSources
from ravnest.coordinator.run.job_run import JobRun
from ravnest.coordinator.run.orders import stage_key
from ravnest.graph.portable import PortableGraph

RETRY_SECONDS: Final = 60.0
"""Minimum time between retries of the same source cluster after a failed transfer."""


def lenders(
    deployment: str,
    lacking: Sequence[PortableGraph],
    others: Mapping[int, tuple[ClusterRun, Replica | None]],
    present: Collection[str],
) -> dict[int, ReplicaSources]:
    """By cluster, the sources of these stages' tensors, the newest replica first. A cluster is left out if a part that
    is needed has no provider that is present."""
    found = {}
    for cluster, replica in others.values():
        if replica is None:
            continue
        stages = cluster.plan.stages
        sources = ReplicaSources.of([stage_key(deployment, s) for s in stages], [s.graph for s in stages], replica)
        if all(sources.covers(graph, present) for graph in lacking):
            found[cluster.id] = sources
    return dict(sorted(found.items(), key=lambda each: (-each[1].replica.place.updates, each[0])))


def samples_lost(cluster: ClusterRun, counted: int) -> int:
    """The samples that a cluster loses if a stage starts from the state after the last round: those since then that
    cannot be fed again. `counted` is the number of the cluster's samples in that state."""
    averaged = cluster.among_first(counted)
    again = sum(kept.item.samples for microbatch, kept in cluster.retained.items() if microbatch not in averaged)
    return max(0, cluster.fed_samples - counted - again)


class StateSources:
    """State sources of one run. All methods run on the network's event loop."""

    def __init__(self, run: JobRun) -> None:
        self._run = run
        self._asked_at: dict[tuple[str, int, int], float] = {}
        """By deployment, cluster and source cluster, when state was last requested from it."""

    async def state_for(
        self, deployment: Deployment, cluster: ClusterRun, stages: Collection[int]
    ) -> BorrowedState | None:
        """The state that these stages of the cluster can start from; None if there is none."""
        lacking = [cluster.plan.stages[stage].graph for stage in sorted(stages)]
        well = [other for other in deployment.clusters.whole if other is not cluster and not other.is_forming]
        if well and all(deployment.replicas.newest(other) is None for other in well):
            # The other clusters began or were resumed a moment ago, and will have a replica soon.
            await deployment.holders.wait_for_fresh(well[0])
        others = {other.id: (other, deployment.replicas.newest(other)) for other in well if not other.is_lost}
        assert deployment.rounds is not None, "there are other clusters"
        lost = samples_lost(cluster, deployment.rounds.counted_samples(cluster.nodes))
        present = self._run.context.present
        for number, sources in lenders(deployment.id, lacking, others, present).items():
            which, now = (deployment.id, cluster.id, number), time.monotonic()
            if now - self._asked_at.get(which, -RETRY_SECONDS) < RETRY_SECONDS:
                continue
            self._asked_at[which] = now
            words = f"from the owners of its rings in cluster {number}, after {sources.replica.place.updates} updates"
            return BorrowedState(frozenset(stages), "rings", lost, words, sources=sources)
        info = await asyncio.to_thread(self._run.store.latest)
        if info is None:
            return None
        contents = await asyncio.to_thread(load_checkpoint, info)
        words = f"from the checkpoint after {info.updates} updates"
        prepared = replace(self._run.prepared, restored=contents)
        return BorrowedState(frozenset(stages), "checkpoint", lost, words, prepared=prepared)

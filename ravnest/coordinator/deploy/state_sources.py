"""State for a stage of which nobody has a replica: from the owners of the same rings in other clusters, else from the
newest checkpoint.

All clusters hold the same parameters, each with what it learned since the last round. So where both who had a stage and
who held its replica are gone, another cluster's newest replica has its tensors, however that one is cut; those parts
alone are given that hold some of them. What happens on failure: where they do not come, it is asked again, and the next
cluster or the checkpoint is named then; where there is none, nothing is borrowed.
"""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from ravnest.coordinator.checkpoints.store import CheckpointStore, load_checkpoint
from ravnest.coordinator.deploy.deployment import BorrowedState, Deployment
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.plan.prepared_job import PreparedJob
from ravnest.coordinator.replicas.sources import ReplicaSources
from ravnest.coordinator.replicas.tracker import Replica
from ravnest.coordinator.run.orders import stage_key
from ravnest.coordinator.run.surroundings import Surroundings
from ravnest.graph.portable import PortableGraph

AGAIN_SECONDS: Final = 60.0
"""For so long a cluster is not asked again by one to which what it lends did not come."""


def lenders(
    deployment: str,
    lacking: Sequence[PortableGraph],
    others: Mapping[int, tuple[ClusterRun, Replica | None]],
    present: Collection[str],
) -> dict[int, ReplicaSources]:
    """By cluster, who can lend what these stages hold, the one with the newest replica first: those of which, of every
    stage that has some of it, somebody who is present has the part."""
    found = {}
    for cluster, replica in others.values():
        if replica is None:
            continue
        stages = cluster.plan.stages
        donors = ReplicaSources.of([stage_key(deployment, s) for s in stages], [s.graph for s in stages], replica)
        if all(donors.covers(graph, present) for graph in lacking):
            found[cluster.id] = donors
    return dict(sorted(found.items(), key=lambda each: (-each[1].replica.place.updates, each[0])))


def samples_lost(cluster: ClusterRun, counted: int) -> int:
    """Of what a cluster was fed, how many samples are lost to a stage that begins with what all clusters had after the
    last round, with so many samples of this one in it: those since then that cannot be fed again."""
    averaged = cluster.among_first(counted)
    again = sum(kept.item.samples for microbatch, kept in cluster.retained.items() if microbatch not in averaged)
    return max(0, cluster.fed_samples - counted - again)


class StateSources:
    """Of one run. All methods belong to the network's loop."""

    def __init__(self, around: Surroundings, store: CheckpointStore, prepared: PreparedJob) -> None:
        """`store` has the run's checkpoints."""
        self._around = around
        self._store = store
        self._prepared = prepared
        self._asked: dict[tuple[str, int, int], float] = {}
        """By deployment and cluster, when which one was last asked to lend it something."""

    async def state_for(
        self, formation: Deployment, cluster: ClusterRun, stages: Collection[int]
    ) -> BorrowedState | None:
        """What these stages of the cluster can begin with; None where nobody has anything."""
        lacking = [cluster.plan.stages[stage].graph for stage in sorted(stages)]
        well = [other for other in formation.clusters.whole if other is not cluster and not other.is_forming]
        if well and all(formation.replicas.newest(other) is None for other in well):
            # They have begun, or were taken over, a moment ago: there will be one soon.
            await formation.holders.wait_for_fresh(well[0])
        others = {other.id: (other, formation.replicas.newest(other)) for other in well if not other.is_lost}
        present = {member.node_id for member in self._around.swarm.members.connected()}
        lost = self._lost(formation, cluster)
        for number, donors in lenders(formation.id, lacking, others, present).items():
            which, now = (formation.id, cluster.id, number), time.monotonic()
            if now - self._asked.get(which, -AGAIN_SECONDS) < AGAIN_SECONDS:
                continue
            self._asked[which] = now
            words = f"from the same rings' owners in cluster {number}, after {donors.replica.place.updates} updates"
            return BorrowedState(frozenset(stages), "rings", lost, words, donors=donors)
        info = await asyncio.to_thread(self._store.latest)
        if info is None:
            return None
        contents = await asyncio.to_thread(load_checkpoint, info)
        words = f"from the checkpoint of {info.updates} updates"
        prepared = replace(self._prepared, restored=contents)
        return BorrowedState(frozenset(stages), "checkpoint", lost, words, prepared=prepared)

    def _lost(self, formation: Deployment, cluster: ClusterRun) -> int:
        assert formation.averaging is not None, "there are other clusters"
        return samples_lost(cluster, formation.averaging.rounds.counted_samples(cluster.nodes))

"""Replacement of slow stages: gives up a provider without which its cluster is better off.

`health/slow_stages.py` judges who is slow and whether replacing it pays.
"""

import time
from collections.abc import Callable

from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.health.slow_stages import StagePace, Work, who_is_slow, worth_replacing
from ravnest.coordinator.plan.observed_limits import ObservedLimits
from ravnest.coordinator.run.in_flight import counts_of
from ravnest.net.v1.control_pb2 import Report
from ravnest.planner.problem import Provider
from ravnest.planner.search.fixed_layout import cuts_of, same_cuts


class SlowStageReplacement:
    """Of one run: gives up whom its cluster is better off without."""

    def __init__(
        self,
        standbys: Callable[[], dict[str, Provider]],
        believed: ObservedLimits,
        give_up: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`standbys` are those who could take a stage."""
        self._standbys = standbys
        self._believed = believed
        self._give_up = give_up
        self._clock = clock
        self._paces: dict[str, tuple[tuple[str, int], StagePace]] = {}
        """By who reports: in which deployment and stage that is, and its pace."""

    def reported(self, formation: Deployment, cluster: ClusterRun, node_id: str, report: Report) -> None:
        """What a stage of a cluster that trains has done so far."""
        counts = counts_of(report)
        if counts is None or cluster.is_forming:
            return
        which, now = (formation.id, cluster.nodes.index(node_id)), self._clock()
        known, pace = self._paces.get(node_id, (None, StagePace()))
        if known != which:
            pace = StagePace()
        self._paces[node_id] = which, pace
        # What it computes alone: that it waits for its state to be uploaded makes no stage slow.
        pace.take(Work(counts.backwards, counts.forward_seconds + counts.backward_seconds), now)
        paces = {node: self._paces[node][1] for node in cluster.nodes if node in self._paces}
        found = who_is_slow(cluster.nodes, paces, now)
        if found is None or found[0] != node_id:
            return
        rates = self._rates_without(formation, cluster, node_id)
        planned = formation.plan.clusters[cluster.id]
        if why := worth_replacing(pace.seconds, planned.samples, rates):
            self._believed.note_slow(node_id, pace.seconds / pace.usual_seconds)
            del self._paces[node_id]
            self._give_up(node_id, f"{found[1]}; {why}")

    def _rates_without(self, formation: Deployment, cluster: ClusterRun, node_id: str) -> dict[str, float]:
        """What the cluster would do with each of those who stand by in the place of this one, where it can."""
        basis, planned = formation.plan.basis, formation.plan.clusters[cluster.id].cost
        rates = {}
        for name, standby in self._standbys().items():
            order = [standby if member == node_id else basis.providers[member] for member in planned.providers]
            cuts = cuts_of(basis.model, planned)
            found = same_cuts(basis.model, basis.goal, basis.network, order, cuts, planned.in_flight)
            if found is not None:
                rates[name] = found.samples_per_second
        return rates

"""Replacement of slow stages: gives up a provider without which its cluster is faster.

`health/slow_stages.py` decides which stage is slow, and whether its replacement pays.
"""

import time

from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.health.slow_stages import StagePace, Work, who_is_slow, worth_replacing
from ravnest.coordinator.health.watchdog import Watchdog
from ravnest.coordinator.plan.observed_limits import ObservedLimits
from ravnest.coordinator.recovery.standbys import Standbys
from ravnest.coordinator.run.in_flight import counts_of
from ravnest.net.v1.control_pb2 import Report
from ravnest.planner.search.fixed_layout import cuts_of, same_cuts


class SlowStageReplacement:
    """The pace of every stage of one run, and what follows when one becomes slow."""

    def __init__(
        self,
        standbys: Standbys,
        limits: ObservedLimits,
        watchdog: Watchdog,
    ) -> None:
        """`limits` remembers how slow a provider was, so that later plans expect it."""
        self._standbys = standbys
        self._limits = limits
        self._watchdog = watchdog
        self._paces: dict[str, tuple[tuple[str, int], StagePace]] = {}
        """By provider, the deployment and stage that it reports on, and the stage's pace."""

    def reported(self, deployment: Deployment, cluster: ClusterRun, node_id: str, report: Report) -> None:
        """A stage of a cluster that trains reports what it has done so far."""
        counts = counts_of(report)
        if counts is None or cluster.is_forming:
            return
        which, now = (deployment.id, cluster.nodes.index(node_id)), time.monotonic()
        known, pace = self._paces.get(node_id, (None, StagePace()))
        if known != which:
            pace = StagePace()
        self._paces[node_id] = which, pace
        # Only the time of its computations: a stage that waits for the upload of its state is not slow.
        pace.take(Work(counts.backwards, counts.forward_seconds + counts.backward_seconds), now)
        paces = {node: self._paces[node][1] for node in cluster.nodes if node in self._paces}
        found = who_is_slow(cluster.nodes, paces, now)
        if found is None or found[0] != node_id:
            return
        rates = self._rates_without(deployment, cluster, node_id)
        planned = deployment.plan.clusters[cluster.id]
        if why := worth_replacing(pace.seconds, planned.samples, rates):
            self._limits.note_slow(node_id, pace.seconds / pace.usual_seconds)
            del self._paces[node_id]
            self._watchdog.give_up(node_id, f"{found[1]}; {why}")

    def _rates_without(self, deployment: Deployment, cluster: ClusterRun, node_id: str) -> dict[str, float]:
        """By standby that could hold the stage, the cluster's predicted rate with it in place of this provider."""
        basis, planned = deployment.plan.basis, deployment.plan.clusters[cluster.id].cost
        rates = {}
        for name, standby in self._standbys.ready().items():
            order = [standby if member == node_id else basis.providers[member] for member in planned.providers]
            cuts = cuts_of(basis.model, planned)
            found = same_cuts(basis.model, basis.goal, basis.network, order, cuts, planned.in_flight)
            if found is not None:
                rates[name] = found.samples_per_second
        return rates

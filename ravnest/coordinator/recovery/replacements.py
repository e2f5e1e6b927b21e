"""Replacements: which providers block their cluster, and what could take their place. The watchdog judges by both."""

from typing import Final

from ravnest.coordinator.deploy.current_deployment import CurrentDeployment
from ravnest.coordinator.health.lease import Replacement
from ravnest.coordinator.recovery.standbys import Standbys
from ravnest.coordinator.run.context import RunContext

_MEMORY_TO_SPARE: Final = 1.2
"""Memory that the other providers must have for a redeployment, as a multiple of the stages' memory: other cuts need
more."""


class Replacements:
    """The replacements of one run. All methods run on the network's event loop."""

    def __init__(self, context: RunContext, current: CurrentDeployment, standbys: Standbys) -> None:
        self._context = context
        self._current = current
        self._standbys = standbys

    def blocks(self, node_id: str) -> bool:
        """Whether other providers wait for this one: its cluster has something in flight, or is being rebuilt."""
        cluster = self._current.cluster_of(node_id)
        return cluster is not None and bool(cluster.is_forming or cluster.open or cluster.again or cluster.evaluating)

    def busy_clusters(self) -> list[list[str]]:
        """The providers of each cluster with something in flight, in the order of its stages."""
        return [c.nodes for c in self._current.clusters if not c.is_forming and self.blocks(c.nodes[0])]

    def replacement(self, node_id: str) -> Replacement:
        """The kind of replacement for a provider."""
        deployment = self._current.deployment
        if deployment is None:
            return "none"
        if any(name != node_id for name in self._standbys.ready()):
            return "standby"
        if len(deployment.clusters.whole) > 1:
            return "reform"
        needed = sum(stage.memory_bytes for stage in deployment.planned.clusters[0].stages)
        others = [member for member in self._context.members.connected() if member.node_id != node_id]
        available = sum(member.machine.memory_bytes for member in others)
        return "reform" if available >= _MEMORY_TO_SPARE * needed else "none"

"""Standbys: the providers without a stage, the stage that each is kept warm for, and the holders of all replicas."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ravnest.coordinator.deploy.current_deployment import CurrentDeployment
from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.health.provider_health import is_well
from ravnest.coordinator.plan.provider_profiles import provider_of
from ravnest.coordinator.run.job_run import JobRun
from ravnest.coordinator.swarm.members import Member
from ravnest.coordinator.swarm.reachability import Reach
from ravnest.planner.problem import Provider
from ravnest.planner.recovery.assign_standbys import Warm, assign_standbys


class Standbys:
    """The standbys of one run. All methods run on the network's event loop."""

    def __init__(self, run: JobRun, current: CurrentDeployment) -> None:
        self.on_new: Callable[[Sequence[Provider]], None] = lambda newcomers: None
        """Called with standbys that were not there before."""
        self._run = run
        self._context = run.context
        self._current = current
        self._warm: dict[str, Warm] = {}
        self._is_ordering = False
        self._must_order = False

    def ready(self) -> dict[str, Provider]:
        """The standbys that are not suspected and may take a stage, as the planner sees them. They include a provider
        that was lost with its stage and has returned before another provider had that stage."""
        return {name: p for name, p in self._providers().items() if is_well(self._context.members, name)}

    def warm_for(self, node_id: str) -> tuple[int, int] | None:
        """The cluster and the stage that a standby is kept warm for."""
        warm = self._warm.get(node_id)
        return None if warm is None or warm.cluster is None or warm.stage is None else (warm.cluster, warm.stage)

    def look(self) -> None:
        """Assigns the standbys again: a provider has come or gone, or a stage has another owner."""
        deployment = self._current.deployment
        if deployment is None:
            return
        new = self._assign(deployment)
        # Replicas are ordered one after the other, and an earlier assignment may still be in progress.
        self._must_order = True
        if not self._is_ordering:
            self._is_ordering = True
            self._context.spawn(self._order_replicas())
        if new:
            self.on_new(new)

    def _members(self) -> list[Member]:
        """The connected providers that hold no stage and may get one."""
        stage_of, exclusions = self._current.stage_of, self._run.exclusions
        present = self._context.members.connected()
        return [m for m in present if m.node_id not in stage_of and m.node_id not in exclusions]

    def _providers(self) -> dict[str, Provider]:
        members = self._context.members
        found = {member.node_id: self._provider(member) for member in self._members()}
        for cluster in self._current.clusters:
            if cluster.is_forming:
                for node_id in filter(members.is_present, cluster.losses.returned):
                    found[node_id] = self._provider(members[node_id])
        return found

    def _assign(self, deployment: Deployment) -> list[Provider]:
        """Assigns each standby to the stage that it is kept warm for; returns the new standbys."""
        basis, members, standbys = deployment.plan.basis, self._context.members, self._providers()
        # The basis has the reliability of the holders at the time of the plan.
        holders = {
            name: replace(each, reliability=members.reliability(name).value) for name, each in basis.providers.items()
        }
        warm = assign_standbys(
            [deployment.plan.clusters[cluster.id].cost for cluster in deployment.clusters.whole],
            list(standbys.values()),
            {**holders, **standbys},
            basis.network,
        )
        ids = [cluster.id for cluster in deployment.clusters.whole]
        before, self._warm = self._warm, {name: _numbered(each, ids) for name, each in warm.items()}
        for name, each in self._warm.items():
            if before.get(name) is None or before[name].stage != each.stage:
                self._context.emit("standby", each.reason, provider=name, cluster=each.cluster, for_stage=each.stage)
        # A provider that returns before another has its stage is not new.
        return [standbys[name] for name in sorted(standbys.keys() - before.keys() - deployment.stage_of.keys())]

    async def _order_replicas(self) -> None:
        try:
            while self._must_order:
                self._must_order = False
                deployment = self._current.now
                idle = [name for name, each in self._warm.items() if each.stage is None]
                await deployment.holders.assign(self._warm, [*deployment.stage_of, *idle])
        finally:
            self._is_ordering = False

    def _provider(self, member: Member) -> Provider:
        reach = member.reach or Reach("", "not known yet")
        reliability = self._context.members.reliability(member.node_id).value
        costs = self._current.now.prepared.costs
        return provider_of(member, costs, reach, self._run.machine, self._run.limits, reliability)


def _numbered(warm: Warm, ids: list[int]) -> Warm:
    """The assignment with the cluster's id, in place of its position among the clusters that are not lost."""
    if warm.cluster is None:
        return warm
    return Warm(warm.standby, ids[warm.cluster], warm.stage, warm.provider, warm.reason)

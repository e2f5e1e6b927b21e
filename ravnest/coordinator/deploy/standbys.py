"""Those without a stage: which one each is kept warm for, and who keeps the replicas of every stage."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.plan.observed_limits import ObservedLimits
from ravnest.coordinator.plan.provider_profiles import Machine, provider_of
from ravnest.coordinator.run.surroundings import Surroundings
from ravnest.coordinator.swarm.members import Member
from ravnest.coordinator.swarm.reachability import Reach
from ravnest.planner.problem import Provider
from ravnest.planner.recovery.standbys import Warm, assign_standbys


class Standbys:
    """Of one run. All methods belong to the network's loop."""

    def __init__(
        self,
        around: Surroundings,
        machine: Machine,
        formation: Callable[[], Deployment | None],
        leaving: Collection[str],
        came: Callable[[Sequence[Provider]], None],
        believed: ObservedLimits,
    ) -> None:
        """Nothing is given to those who are `leaving`. `came` is told of standbys that were not there before."""
        self._around = around
        self._machine = machine
        self._formation = formation
        self._came = came
        self._believed = believed
        self._warm: dict[str, Warm] = {}
        self._ordering = False
        self._again = False
        self._leaving = leaving

    def members(self) -> list[Member]:
        """Those who are there and hold nothing."""
        formation = self._formation()
        taken = formation.stage_of if formation is not None else {}
        present = self._around.swarm.members.connected()
        return [m for m in present if m.node_id not in taken and m.node_id not in self._leaving]

    def providers(self) -> dict[str, Provider]:
        """The same as the planner sees them. Of a cluster that lacks a stage, one that is back is among them."""
        found = {member.node_id: self._provider(member) for member in self.members()}
        formation = self._formation()
        for cluster in formation.clusters.whole if formation is not None else ():
            if cluster.is_forming:
                for node_id in filter(self._around.swarm.members.is_present, cluster.returned):
                    found[node_id] = self._provider(self._around.swarm.members[node_id])
        return found

    def warm_for(self, node_id: str) -> tuple[int, int] | None:
        """Cluster and stage that a standby has at hand."""
        warm = self._warm.get(node_id)
        return None if warm is None or warm.cluster is None or warm.stage is None else (warm.cluster, warm.stage)

    def look(self) -> None:
        """Somebody has come or gone, or a stage has another owner."""
        formation = self._formation()
        if formation is None:
            return
        new = self._assign(formation)
        # Replicas are ordered one after the other: some of those concerned may still be being tried.
        self._again = True
        if not self._ordering:
            self._ordering = True
            self._around.course.spawn(self._order())
        if new:
            self._came(new)

    def _assign(self, formation: Deployment) -> list[Provider]:
        """Says which stage each is kept warm for from now on; those who were not there before."""
        basis = formation.plan.basis
        standbys = self.providers()
        members = self._around.swarm.members
        # The basis says how reliable the holders were when the plan was made.
        holders = {
            name: replace(each, reliability=members.reliability(name).value) for name, each in basis.providers.items()
        }
        warm = assign_standbys(
            [formation.plan.clusters[cluster.id].cost for cluster in formation.clusters.whole],
            list(standbys.values()),
            {**holders, **standbys},
            basis.network,
        )
        ids = [cluster.id for cluster in formation.clusters.whole]
        before, self._warm = self._warm, {name: _numbered(each, ids) for name, each in warm.items()}
        for name, each in self._warm.items():
            if before.get(name) is None or before[name].stage != each.stage:
                self._around.course.emit(
                    "standby", each.reason, provider=name, cluster=each.cluster, for_stage=each.stage
                )
        # One that is back before another has its stage is not new.
        return [standbys[name] for name in sorted(standbys.keys() - before.keys() - formation.stage_of.keys())]

    async def _order(self) -> None:
        try:
            while self._again:
                self._again = False
                formation = self._formation()
                if formation is None:
                    return
                free = [name for name, each in self._warm.items() if each.stage is None]
                await formation.holders.assign(self._warm, [*formation.stage_of, *free])
        finally:
            self._ordering = False

    def _provider(self, member: Member) -> Provider:
        formation = self._formation()
        assert formation is not None
        reach = member.reach or Reach("", "not known yet")
        reliability = self._around.swarm.members.reliability(member.node_id).value
        return provider_of(member, formation.prepared.costs, reach, self._machine, self._believed, reliability)


def _numbered(warm: Warm, ids: list[int]) -> Warm:
    """With the cluster's own number in place of that among those that train."""
    if warm.cluster is None:
        return warm
    return Warm(warm.standby, ids[warm.cluster], warm.stage, warm.provider, warm.reason)

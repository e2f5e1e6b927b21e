"""Search for takers: the provider that takes each lost stage of a cluster, and whether it has a state to start from.

The decision itself is the planner's (planner/recovery/choose_taker.py). It weighs the standbys against redeploying the
whole run.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from ravnest.coordinator.deploy.current_deployment import CurrentDeployment
from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.deploy.redeployment import Redeployment
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.recovery.standbys import Standbys
from ravnest.coordinator.replicas.replica import Replica
from ravnest.coordinator.run.context import RunContext
from ravnest.errors import PlanError
from ravnest.planner.plan import Plan
from ravnest.planner.recovery.choose_taker import Candidacy, Candidate, Recut, Taking, candidates_for, choose_taker


class TakerChoice:
    """Chooses takers for the clusters of one run."""

    def __init__(
        self, context: RunContext, current: CurrentDeployment, standbys: Standbys, redeployment: Redeployment
    ) -> None:
        self._context = context
        self._current = current
        self._standbys = standbys
        self._redeployment = redeployment

    async def choose(self, cluster: ClusterRun) -> tuple[dict[int, Taking] | None, Plan | None]:
        """The takers of the lost stages by stage, and None. If a stage has no taker: None, and the plan that would
        replace the current deployment (None if no plan is possible)."""
        deployment, members = self._current.now, self._context.members
        planned = deployment.plan.clusters[cluster.id].cost
        standbys = self._standbys.ready()
        plan: Plan | None = None
        taken: set[str] = set()
        found: dict[int, Taking] = {}
        for stage, loss in sorted(cluster.losses.stages.items()):
            holder = cluster.nodes[stage]
            if holder != loss.node and members.is_present(holder):
                # The loss of another provider aborted the rebuild.
                reason = f"{holder} takes the stage of {loss.node}, as decided before another provider was lost"
                taken.add(holder)
                found[stage] = Taking("takes", holder, reason)
                continue
            # A provider that has returned may take its own stage again, and no other one.
            may = {
                name: Candidacy(provider, self._standbys.warm_for(name) == (cluster.id, stage))
                for name, provider in standbys.items()
                if name not in taken and (name, stage) not in cluster.losses.unfit
                if name == loss.node or name not in deployment.stage_of
            }
            if loss.node in may:
                # It has the replicas of its own stage on its disk.
                may[loss.node] = replace(may[loss.node], is_warm=True)
            candidates, rate = candidates_for(deployment.plan.basis, planned, holder, may), planned.samples_per_second
            taking = choose_taker(holder, candidates, rate, None)
            if taking.kind != "takes":
                against = partial(_against_new_plan, deployment, cluster, holder, candidates)
                try:
                    plan = plan or await self._redeployment.plan(deployment, partial(_is_better, against))
                    taking = against(plan)
                except PlanError as error:
                    taking = choose_taker(holder, candidates, rate, Recut(None, str(error)))
            if taking.kind != "takes" or taking.taker is None:
                self._context.emit("nobody_takes", taking.reason, cluster=cluster.id, stage=stage)
                return None, plan
            taken.add(taking.taker)
            found[stage] = taking
        return found, None

    def without_state(self, cluster: ClusterRun, replica: Replica | None, stages: Collection[int]) -> dict[int, str]:
        """The stages among these that cannot start from a replica or from the initial state, each with the reason: all
        providers with that state are gone, or microbatches that would have to be fed again are not retained."""
        members = self._context.members
        if replica is not None:
            return {
                stage: f"all providers with stage {stage} after {replica.place.updates} updates are gone"
                for stage in sorted(stages)
                if not any(map(members.is_present, replica.nodes[stage]))
            }
        if cluster.dropped:
            return dict.fromkeys(sorted(stages), "microbatches that would have to be fed again are not retained")
        sources, present = self._current.now.transfers.sources, self._context.present
        return {
            stage: f"the providers that had the initial state of stage {stage} are gone"
            for stage in sorted(stages)
            if sources is not None and not sources.covers(cluster.plan.stages[stage].graph, present)
        }


def _is_better(against: "partial[Taking]", plan: Plan) -> bool:
    return against(plan).kind != "takes"


def _against_new_plan(
    deployment: Deployment, cluster: ClusterRun, lost: str, candidates: Sequence[Candidate], plan: Plan
) -> Taking:
    """The taker of a stage, if this plan could be deployed instead. The plan is credited with its rate beyond the rates
    of the other clusters."""
    others = sum(each.plan.predicted_samples_per_second for each in deployment.clusters.whole if each is not cluster)
    recut = Recut(max(0.0, plan.steady_samples_per_second - others), plan.reason)
    before = deployment.plan.clusters[cluster.id].cost.samples_per_second
    return choose_taker(lost, candidates, before, recut)

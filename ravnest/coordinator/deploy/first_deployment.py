"""First deployment of a run: gathers providers, resumes what survived an earlier coordinator, plans and deploys."""

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress

from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.deploy.deployment_record import DeploymentRecord
from ravnest.coordinator.deploy.gather_providers import gather
from ravnest.coordinator.deploy.plan_events import tell_plan
from ravnest.coordinator.deploy.present_planner import PresentPlanner
from ravnest.coordinator.deploy.resume_running_stages import ResumedStages, resume_stages, wait_for_return
from ravnest.coordinator.deploy.rollout import Rollout
from ravnest.coordinator.deploy.surviving_state import SurvivingState, continue_at
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.plan.plan_run import goal_of
from ravnest.coordinator.replicas.sources import DeploymentAbortedError
from ravnest.coordinator.report.phase import Phase
from ravnest.coordinator.run.job_run import JobRun
from ravnest.coordinator.swarm.members import Member
from ravnest.errors import PlanError
from ravnest.planner.plan import Plan
from ravnest.planner.problem import Goal
from ravnest.planner.search.fixed_layout import ClusterLayout, filled
from ravnest.units import counted


class FirstDeployment:
    """Makes the first deployment of a run. All methods run on the network's event loop."""

    def __init__(self, run: JobRun, planner: PresentPlanner, rollout: Rollout) -> None:
        self._run = run
        self._planner = planner
        self._rollout = rollout
        self._surviving = SurvivingState(run)

    async def make(self) -> Deployment:
        """Waits for the requested number of providers, or for as many as can hold the model, and deploys the run on
        them. Its stages are ready; they are not fed yet."""
        run, context, asked = self._run, self._run.context, self._planner.asked
        goal = goal_of(run.prepared.job, asked.providers, asked.clusters)
        context.enter(Phase.GATHERING)
        await self._planner.load_lines()
        if context.swarm.waits_for_all:
            needed, expected, fitting = asked.providers, 0, goal
        else:
            # The number is that of the run before. It trains with fewer if not all of them come back.
            needed, expected, fitting = None, asked.providers or 0, goal_of(run.prepared.job, None, asked.clusters)

        def fits(present: list[Member]) -> Awaitable[Plan]:
            return self._planner.fits(present, fitting)

        seconds = context.timeouts.gather_seconds
        gathering = gather(context.members, needed, fits, context.say, expected, seconds)
        members, first_plan, why = await context.while_well(gathering)
        if len(members) < expected:
            goal = fitting
        elif expected:
            members, first_plan = members[:expected], None
        context.emit("gathered", f"{len(members)} providers: {why}")
        recorded = await self._recorded()
        if recorded is not None and (resumed := await self._resume_stages(goal, *recorded)) is not None:
            return resumed
        sources = await self._surviving.find()
        if sources is not None and asked.providers is None:
            # More providers may have joined during the wait for the holders of its parts.
            members = context.members.in_order()
        layouts = () if recorded is None else self._layouts_of(recorded[0], goal)
        while True:
            plan = await self._plan(members, goal, layouts, first_plan)
            layouts = ()
            tell_plan(context, plan, run.prepared.job)
            deployment = self._rollout.create(run.prepared, plan, sources)
            try:
                await self._rollout.deploy(deployment)
                return deployment
            except DeploymentAbortedError as error:
                context.emit("deployment_broken_off", str(error))
                if sources is not None:
                    sources = await self._surviving.after_failure(deployment.transfers.sources, str(error))
                members, goal, first_plan = await self._planner.wait_and_plan(run.prepared, str(error), [])

    async def _plan(
        self, members: list[Member], goal: Goal, layouts: Sequence[ClusterLayout], begin: Plan | None
    ) -> Plan:
        """The plan with these layouts if their providers are still connected, otherwise the best plan."""
        context, prepared = self._run.context, self._run.prepared
        context.enter(Phase.PLANNING)
        names = [name for layout in layouts for name in layout.providers]
        if layouts and context.present.issuperset(names):
            with suppress(PlanError):
                named = [context.members[name] for name in names]
                return await self._planner.plan(prepared, named, goal, layouts=layouts)
        return await self._planner.plan(prepared, members, goal, begin=begin)

    async def _recorded(self) -> tuple[DeploymentRecord, bool] | None:
        """The last deployment of an earlier coordinator, and whether it was being replaced or rebuilt at the end."""
        state = self._run.context.swarm.state
        found = None if state is None else await asyncio.to_thread(state.standing)
        return None if found is None else (DeploymentRecord.from_json(found[0]), found[1])

    async def _resume_stages(self, goal: Goal, record: DeploymentRecord, was_changing: bool) -> Deployment | None:
        """The recorded deployment with its running stages; None if they cannot be resumed."""
        run, context = self._run, self._run.context
        # The wait is useful in any case: if the stages cannot be resumed, the run is deployed on the same providers.
        await wait_for_return(context, record)
        context.enter(Phase.RESUMING)

        async def plan(layouts: Sequence[ClusterLayout]) -> Plan:
            named = [context.members[name] for layout in layouts for name in layout.providers]
            found = await self._planner.plan(run.prepared, named, goal, layouts=layouts)
            tell_plan(context, found, run.prepared.job)
            return found

        resumed: ResumedStages | str = "the run was being redeployed"
        if not was_changing:
            resumed = await resume_stages(run, self._rollout, record, plan)
        if isinstance(resumed, str):
            context.emit("not_taken_over", f"cannot resume the running stages: {resumed}")
            return None
        continue_at(run, record.place)
        for cluster in resumed.deployment.clusters.all:
            _note_lost(cluster, resumed.lost[cluster.id])
        reason = (
            f"{counted(resumed.stages, 'stage continues', 'stages continue')} after {context.ledger.updates} updates, "
            f"with {counted(resumed.applied, 'microbatch', 'microbatches')} applied since then"
        )
        context.emit(
            "resumed_swarm",
            reason,
            updates=context.ledger.updates,
            source="stages",
            stages=resumed.stages,
            applied=resumed.applied,
        )
        context.say(f"resuming the running stages: {reason}")
        await self._rollout.announce(resumed.deployment)
        return resumed.deployment

    def _layouts_of(self, record: DeploymentRecord, goal: Goal) -> Sequence[ClusterLayout]:
        """The recorded clusters, with other providers in place of the absent ones; none if there are too few."""
        if len(record.layouts) < goal.min_clusters:
            return ()
        return filled(record.layouts, self._run.context.present - self._run.exclusions.nodes) or ()


def _note_lost(cluster: ClusterRun, stages: Mapping[int, str]) -> None:
    """Notes stages that their recorded providers do not hold any more, so that recovery gives them to others."""
    now = time.monotonic()
    for stage, node in stages.items():
        reason = f"{node} did not hold stage {stage} any more when the coordinator was restarted"
        cluster.losses.note(stage, node, reason, now, now)
        if cluster.nodes[stage] == node:
            cluster.losses.returned.add(node)

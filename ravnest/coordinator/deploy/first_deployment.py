"""First deployment of a run: gathers providers, resumes what survived an earlier coordinator, plans and deploys."""

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ravnest.coordinator.checkpoints.reader import load_checkpoint
from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.deploy.deployment_record import DeploymentRecord
from ravnest.coordinator.deploy.gather_providers import gather
from ravnest.coordinator.deploy.plan_events import tell_plan
from ravnest.coordinator.deploy.present_planner import PresentPlanner
from ravnest.coordinator.deploy.resume_running_stages import ResumedStages, resume_stages, wait_for_return
from ravnest.coordinator.deploy.rollout import Rollout
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.plan.plan_run import goal_of
from ravnest.coordinator.replicas.part_uploads import PartUploads
from ravnest.coordinator.replicas.sources import DeploymentAbortedError
from ravnest.coordinator.replicas.surviving import AnnouncedReplica, find_surviving_replica
from ravnest.coordinator.report.phase import Phase
from ravnest.coordinator.run.checkpointer import saver_for
from ravnest.coordinator.run.job_run import JobRun
from ravnest.coordinator.swarm.members import Member
from ravnest.errors import PlanError
from ravnest.graph.cutting.partition import split
from ravnest.planner.plan import Plan
from ravnest.planner.problem import Goal
from ravnest.planner.search.fixed_layout import ClusterLayout, filled
from ravnest.units import counted


class FirstDeployment:
    """Makes the first deployment of a run. All methods run on the network's event loop."""

    def __init__(self, run: JobRun, planner: PresentPlanner, rollout: Rollout, uploads: PartUploads) -> None:
        """`uploads` collects the parts of a replica that survived an earlier coordinator."""
        self._run = run
        self._planner = planner
        self._rollout = rollout
        self._uploads = uploads

    async def make(self) -> Deployment:
        """Waits for the requested number of providers, or for as many as can hold the model, and deploys the run on
        them. Its stages are ready; they are not fed yet."""
        run, context, asked = self._run, self._run.context, self._planner.asked
        goal = goal_of(run.prepared.job, asked.providers, asked.clusters)
        context.enter(Phase.GATHERING)
        await self._planner.load_lines()

        def fits(present: list[Member]) -> Awaitable[Plan]:
            return self._planner.fits(present, goal)

        members, first_plan, why = await context.while_well(gather(context.members, asked.providers, fits, context.say))
        context.emit("gathered", f"{len(members)} providers: {why}")
        layouts: Sequence[ClusterLayout] = ()
        if (recorded := await self._recorded()) is not None:
            record, was_changing = recorded
            resumed = await self._resume_stages(goal, record, was_changing)
            if resumed is not None:
                return resumed
            layouts = self._layouts_of(record, goal)
        await self._resume_replica(members)
        while True:
            plan = await self._plan(members, goal, layouts, first_plan)
            layouts = ()
            tell_plan(context, plan, run.prepared.job)
            deployment = self._rollout.create(run.prepared, plan)
            try:
                await self._rollout.deploy(deployment)
                return deployment
            except DeploymentAbortedError as error:
                context.emit("deployment_broken_off", str(error))
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
        self._continue_at(record.place)
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

    async def _resume_replica(self, members: Sequence[Member]) -> None:
        """Continues from a replica that the providers still hold, if it is newer than the checkpoint."""
        run, context, state = self._run, self._run.context, self._run.context.swarm.state
        if state is None:
            return
        known = [AnnouncedReplica.from_json(text) for text in await asyncio.to_thread(state.replicas)]
        updates = context.ledger.updates
        found = find_surviving_replica(known, context.members.in_order(), updates)
        if found is None:
            if known:
                reason = f"the providers hold no complete replica newer than the checkpoint of {updates} updates"
                context.emit("resumed_swarm", reason, updates=updates, source="checkpoint")
            return
        context.enter(Phase.RESUMING)
        announced = found.announced
        graphs = await asyncio.to_thread(split, run.prepared.captured.graph, list(announced.starts[1:]))
        saver = saver_for(run.store, run.prepared, dict(enumerate(graphs)), updates)
        info = await self._uploads.collect(saver, announced.number, announced.place, found.parts)
        if info is None:
            reason = "the providers that had parts of a replica could not send them"
            context.emit("not_regained", reason)
            context.emit("resumed_swarm", f"from the checkpoint: {reason}", updates=updates, source="checkpoint")
            return
        context.emit("resumed_swarm", found.reason, updates=info.updates, source="replica")
        context.say(f"resuming from a replica: {found.reason}")
        self._continue_at(announced.place)
        contents = await asyncio.to_thread(load_checkpoint, info)
        run.prepared = replace(run.prepared, restored=contents)

    def _continue_at(self, place: DataPosition) -> None:
        context = self._run.context
        context.ledger.begin_at(place)
        self._run.start = self._run.dispatcher.fed_place = place
        context.progress.clock.samples_at_start = context.ledger.samples


def _note_lost(cluster: ClusterRun, stages: Mapping[int, str]) -> None:
    """Notes stages that their recorded providers do not hold any more, so that recovery gives them to others."""
    now = time.monotonic()
    for stage, node in stages.items():
        reason = f"{node} did not hold stage {stage} any more when the coordinator was restarted"
        cluster.losses.note(stage, node, reason, now, now)
        if cluster.nodes[stage] == node:
            cluster.losses.returned.add(node)

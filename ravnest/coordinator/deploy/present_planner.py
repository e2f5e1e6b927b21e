"""Planner of a run for the providers that are connected at the moment.

If they cannot hold the model, it waits for others, and the run ends if no other provider can join.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ravnest.coordinator.plan.plan_run import MEASURING, RunPlanner, goal_of
from ravnest.coordinator.plan.prepared_job import PreparedJob
from ravnest.coordinator.report.phase import Phase
from ravnest.coordinator.run.job_run import JobRun
from ravnest.coordinator.swarm.members import Member
from ravnest.errors import PlanError, TrainingError
from ravnest.planner.cluster import Cluster
from ravnest.planner.plan import Plan
from ravnest.planner.problem import Goal
from ravnest.planner.search.fixed_layout import ClusterLayout


@dataclass(frozen=True, slots=True)
class RequestedSize:
    """The numbers that the requester asked for; None if the planner chooses."""

    providers: int | None
    clusters: int | None


def always_pays(plan: Plan) -> bool:
    """Says of every plan that it is worth deploying, so that the planner measures its lines."""
    return True


class PresentPlanner:
    """Plans one run. All methods run on the network's event loop."""

    def __init__(self, run: JobRun, asked: RequestedSize) -> None:
        self.asked = asked
        self.is_waiting = False
        """Whether the connected providers cannot hold the model, and others are awaited."""
        self._run = run
        context = run.context
        self._planner = RunPlanner(context.swarm, run.machine, run.limits, context.begin_step)

    async def load_lines(self) -> None:
        """Loads the lines between providers that an earlier coordinator of the swarm has measured."""
        state = self._run.context.swarm.state
        if state is not None:
            self._planner.lines |= await asyncio.to_thread(state.lines, time.time())

    async def fits(self, present: list[Member], goal: Goal) -> Plan:
        """A first plan that shows that these providers can hold the model; PlanError if they cannot."""
        return await self._planner.plan(self._run.prepared, present, goal, pays=lambda plan: False)

    async def plan(
        self,
        prepared: PreparedJob,
        members: list[Member],
        goal: Goal,
        *,
        layouts: Sequence[ClusterLayout] = (),
        begin: Plan | None = None,
        pays: Callable[[Plan], bool] = always_pays,
        known: Sequence[Cluster] = (),
    ) -> Plan:
        """The plan for these members, see `RunPlanner.plan`. New measurements of lines are kept in the store."""
        context, lines = self._run.context, self._planner.lines
        before = dict(lines)
        planning = self._planner.plan(prepared, members, goal, layouts, begin=begin, pays=pays, known=known)
        try:
            plan = await context.while_well(planning)
        finally:
            if context.progress.step == MEASURING:
                context.begin_step("")
        new = {pair: line for pair, line in lines.items() if before.get(pair) != line}
        if new and context.swarm.state is not None:
            await asyncio.to_thread(context.swarm.state.measured, new, time.time())
        return plan

    async def plan_present(
        self,
        prepared: PreparedJob,
        first: Sequence[str] = (),
        begin: Plan | None = None,
        pays: Callable[[Plan], bool] = always_pays,
        known: Sequence[Cluster] = (),
    ) -> tuple[list[Member], Goal, Plan]:
        """The members, the goal and the plan for the connected providers that may get a stage; PlanError if they cannot
        hold the model. The providers named `first` come before the others. For the other arguments see
        `RunPlanner.plan`."""
        asked, exclusions = self.asked, self._run.exclusions
        present = sorted(
            (m for m in self._run.context.members.in_order() if m.node_id not in exclusions),
            key=lambda m: first.index(m.node_id) if m.node_id in first else len(first),
        )
        members = present[: asked.providers] if asked.providers is not None else present
        failed = [f"{node_id} failed: {message}" for node_id, message in exclusions.failed.items()]
        refusal = PlanError("; ".join(["no provider is connected", *failed]))
        for goal in self._goals(prepared, len(members)) if members else ():
            try:
                plan = await self.plan(prepared, members, goal, begin=begin, pays=pays, known=known)
                return members, goal, plan
            except PlanError as error:
                refusal = error
                members = present
        raise refusal

    async def wait_and_plan(
        self, prepared: PreparedJob, reason: str, first: Sequence[str], begin: Plan | None = None
    ) -> tuple[list[Member], Goal, Plan]:
        """The same, but waits for other providers if those that are connected cannot hold the model. TrainingError,
        which begins with the `reason`, if no other provider can join."""
        context = self._run.context
        told = ""
        try:
            while True:
                try:
                    return await self.plan_present(prepared, first, begin)
                except PlanError as error:
                    why = str(error)
                if not context.swarm.open_to_more:
                    raise TrainingError(f"{reason}; the remaining providers cannot continue: {why}")
                if why != told:
                    told = why
                    context.enter(Phase.GATHERING)
                    context.emit("waiting", why)
                    self.is_waiting = True
                    context.notify()
                    context.say(f"waiting for more providers: {why}")
                await self._until_members_change()
        finally:
            self.is_waiting = False

    async def _until_members_change(self) -> None:
        members = self._run.context.members
        before = {member.node_id for member in members.in_order()}
        changed = members.changes.until(lambda: {member.node_id for member in members.in_order()} != before)
        await self._run.context.while_well(changed)

    def _goals(self, prepared: PreparedJob, present: int) -> list[Goal]:
        """The requested goal as far as this number of providers can reach it, then the best number of clusters up to
        the requested one."""
        asked, job = self.asked, prepared.job
        goals = []
        if asked.providers is not None and asked.clusters is not None:
            goals.append(goal_of(job, present, min(asked.clusters, present)))
        goals.append(replace(goal_of(job, None, None), max_clusters=asked.clusters))
        return goals

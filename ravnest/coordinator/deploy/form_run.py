"""Forming a run: the first time, and anew where stages were lost that nobody can take as they are.

Anew means: the model is planned and deployed over those who are there from the newest state that can be had, and what
was fed since is fed again. The state is a replica where somebody has all parts of it, which go from those who have them
to those who need them; and the newest checkpoint otherwise, then the data is walked again from its place.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ravnest.coordinator.access.swarm_store import Position
from ravnest.coordinator.checkpoints.saver import place_of
from ravnest.coordinator.checkpoints.store import CheckpointInfo, CheckpointStore, load_checkpoint
from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.deploy.deployment_record import DeploymentRecord
from ravnest.coordinator.deploy.gather_providers import gather
from ravnest.coordinator.deploy.plan_events import tell_plan
from ravnest.coordinator.deploy.takeover import Takeover, take_over, wait_for_those_of_before
from ravnest.coordinator.feed.cluster_state import ClusterRun, FedMicrobatch
from ravnest.coordinator.feed.feeder import EvalBatch, TrainBatch
from ravnest.coordinator.feed.ledger import DataPosition, Ledger
from ravnest.coordinator.plan.observed_limits import ObservedLimits
from ravnest.coordinator.plan.plan_run import RunPlanner, goal_of
from ravnest.coordinator.plan.prepared_job import PreparedJob
from ravnest.coordinator.plan.provider_profiles import Machine
from ravnest.coordinator.replicas.part_uploads import PartUploads
from ravnest.coordinator.replicas.sources import DeploymentAbortedError, ReplicaSources
from ravnest.coordinator.replicas.surviving import AnnouncedReplica, find_surviving_replica
from ravnest.coordinator.run.checkpointer import saver_for
from ravnest.coordinator.run.orders import stage_key
from ravnest.coordinator.run.surroundings import Surroundings
from ravnest.coordinator.swarm.members import Member
from ravnest.errors import PlanError, TrainingError
from ravnest.graph.partition import split
from ravnest.monitor.display import Display
from ravnest.planner.cluster import Cluster
from ravnest.planner.plan import Plan
from ravnest.planner.problem import Goal
from ravnest.planner.search.fixed_layout import ClusterLayout, filled
from ravnest.units import counted


@dataclass(frozen=True, slots=True)
class RequestedSize:
    """What the requester has asked for; None where it is the planner's to say."""

    providers: int | None
    clusters: int | None


@dataclass(frozen=True, slots=True)
class Redeployed:
    """A run that was formed anew."""

    formation: Deployment
    rewind_to: DataPosition | None
    """From where the data is to be walked again; None where nothing is missing."""


@dataclass(frozen=True, slots=True)
class _State:
    """What a run goes on from."""

    prepared: PreparedJob
    left: Sequence[FedMicrobatch]
    """To be fed again."""
    rewind_to: DataPosition | None
    words: str
    donors: ReplicaSources | None = None
    """Who has it; None where it is in `prepared`."""


Take = Callable[[Deployment], None]
"""Listens to a formation from now on: it is about to be deployed."""


class Forming:
    """Of one run. All methods belong to the network's loop."""

    def __init__(
        self,
        around: Surroundings,
        store: CheckpointStore,
        machine: Machine,
        asked: RequestedSize,
        prepared: PreparedJob,
        phase: Callable[[str], None],
        display: Display,
        believed: ObservedLimits,
        release: Callable[[Deployment], None],
        lost_before: Callable[[ClusterRun, Mapping[int, str]], None],
    ) -> None:
        """`release` is called with every formation once it stands: its clusters are fed from then on. `lost_before` is
        told of stages of a formation that was taken over which nobody holds, before that."""
        self.uploads = PartUploads(around.course, around.swarm, around.ledger)
        """Where parts of replicas go."""
        self.leaving: set[str] = set()
        """Who wants to go, or has failed too often: they are not counted upon."""
        self._aside: dict[str, str] = {}
        self.waits = False
        """Whether those who are there cannot hold the model, and others are waited for."""
        self._around = around
        self._store = store
        self._asked = asked
        self._prepared = prepared
        self._start = around.ledger.applied
        self._phase = phase
        self._display = display
        self._planner = RunPlanner(around.swarm, machine, believed, phase)
        self._release = release
        self._lost_before = lost_before

    def set_aside(self, node_id: str, why: str) -> None:
        """This one has failed too often: it gets no stage any more, in this stay."""
        self._aside[node_id] = why
        self.leaving.add(node_id)

    def take_back(self, node_id: str) -> None:
        """Its stay is over; in the next one it may be better."""
        if self._aside.pop(node_id, None) is not None:
            self.leaving.discard(node_id)

    async def first(self, take: Take) -> Deployment:
        """Waits for as many providers as were asked for, or as it takes, and deploys the run on them."""
        around, prepared, asked = self._around, self._prepared, self._asked
        goal = goal_of(prepared.job, asked.providers, asked.clusters)
        self._phase("waiting for providers")
        if (swarm_state := around.swarm.state) is not None:
            self._planner.lines |= await asyncio.to_thread(swarm_state.lines, time.time())

        def fits(present: list[Member]) -> Awaitable[Plan]:
            return self._planner.plan(prepared, present, goal, pays=lambda plan: False)

        gathering = gather(around.swarm.members, asked.providers, fits, self._display.message)
        members, first_plan, why = await around.course.while_well(gathering)
        around.course.emit("gathered", f"{len(members)} providers: {why}")
        layouts: Sequence[ClusterLayout] = ()
        if (stood := await self._stood()) is not None:
            taken = await self._taken_over(prepared, goal, take, *stood)
            if taken is not None:
                return taken
            layouts = self._as_they_lay(stood[0], goal)
        prepared = await self._regained(prepared, members)
        before: Deployment | None = None
        while True:
            self._phase("planning")
            plan: Plan | None = None
            names = [name for layout in layouts for name in layout.providers]
            # Somebody may have gone while parts were fetched.
            if layouts and self._present().issuperset(names):
                with contextlib.suppress(PlanError):
                    named = [around.swarm.members[name] for name in names]
                    plan = await self._plan(prepared, named, goal, layouts=layouts)
            layouts = ()
            plan = plan or await self._plan(prepared, members, goal, begin=first_plan)
            tell_plan(around.course, self._display, plan, prepared.job)
            formation = self._made(prepared, plan, before, take)
            try:
                await self._deploy(formation)
            except DeploymentAbortedError as error:
                around.course.emit("deployment_broken_off", str(error))
                before = formation
                members, goal, first_plan = await self._those_left(prepared, str(error), [])
                continue
            self._release(formation)
            return formation

    async def _stood(self) -> tuple[DeploymentRecord, bool] | None:
        """How the run stood when its coordinator ended, and whether that was changing."""
        state = self._around.swarm.state
        found = None if state is None else await asyncio.to_thread(state.standing)
        return None if found is None else (DeploymentRecord.from_json(found[0]), found[1])

    async def _taken_over(
        self, prepared: PreparedJob, goal: Goal, take: Take, standing: DeploymentRecord, changing: bool
    ) -> Deployment | None:
        """The run with its stages as they are, where all who hold those of a cluster are back with them; None where
        nobody is. Clusters that lack some get them from then on."""
        around = self._around
        course, ledger, members = around.course, around.ledger, around.swarm.members
        # Also where it is not taken over: it is deployed on the same ones then.
        await wait_for_those_of_before(around, standing)
        self._phase("taking over")

        async def plan(layouts: Sequence[ClusterLayout]) -> Plan:
            named = [members[name] for layout in layouts for name in layout.providers]
            found = await self._plan(prepared, named, goal, layouts=layouts)
            tell_plan(course, self._display, found, prepared.job)
            return found

        taken: Takeover | str = "it was being formed anew"
        if not changing:
            make = partial(self._made, prepared, before=None, take=take, standing=standing)
            taken = await take_over(around, standing, plan, make)
        if isinstance(taken, str):
            course.emit("not_taken_over", f"the stages are not taken over as they are: {taken}")
            return None
        ledger.begin_at(standing.place)
        self._start = standing.place
        around.progress.clock.samples_at_start = ledger.samples
        for cluster in taken.formation.clusters.all:
            self._lost_before(cluster, taken.lost[cluster.id])
        reason = (
            f"{counted(taken.stages, 'stage goes', 'stages go')} on, after {ledger.updates} updates "
            f"and {counted(taken.applied, 'microbatch', 'microbatches')} that they have applied since"
        )
        course.emit("resumed_swarm", reason, updates=ledger.updates)
        self._display.message(f"taking over where it was: {reason}")
        await self._announce(taken.formation)
        self._release(taken.formation)
        return taken.formation

    def _as_they_lay(self, standing: DeploymentRecord, goal: Goal) -> Sequence[ClusterLayout]:
        """The clusters of before, with others in the place of those who are absent; none where they cannot be."""
        if len(standing.layouts) < goal.min_clusters:
            return ()
        return filled(standing.layouts, self._present() - self.leaving) or ()

    async def _regained(self, prepared: PreparedJob, members: Sequence[Member]) -> PreparedJob:
        """With what providers have kept from before their coordinator ended, where that is newer."""
        around, state = self._around, self._around.swarm.state
        if state is None:
            return prepared
        known = [AnnouncedReplica.from_json(text) for text in await asyncio.to_thread(state.replicas)]
        found = find_surviving_replica(known, around.swarm.members.in_order(), around.ledger.updates)
        if found is None:
            if known:
                updates = around.ledger.updates
                reason = f"nobody has kept anything whole that is newer than the checkpoint of {updates} updates"
                around.course.emit("resumed_swarm", reason, updates=updates)
            return prepared
        self._phase("taking up where it was")
        announced = found.announced
        graphs = await asyncio.to_thread(split, prepared.captured.graph, list(announced.starts[1:]))
        saver = saver_for(self._store, prepared, dict(enumerate(graphs)), around.ledger.updates)
        info = await self.uploads.collect(saver, announced.number, announced.place, found.parts)
        if info is None:
            reason = "those who had parts of a replica could not give them"
            around.course.emit("not_regained", reason)
            around.course.emit("resumed_swarm", f"from the checkpoint: {reason}", updates=around.ledger.updates)
            return prepared
        around.course.emit("resumed_swarm", found.reason, updates=info.updates)
        self._display.message(f"taking up where it was: {found.reason}")
        around.ledger.begin_at(announced.place)
        self._start = announced.place
        around.progress.clock.samples_at_start = around.ledger.samples
        contents = await asyncio.to_thread(load_checkpoint, info)
        self._prepared = replace(prepared, restored=contents)
        return self._prepared

    async def anew(
        self,
        before: Deployment,
        reason: str,
        take: Take,
        saved: CheckpointInfo | None = None,
        decided: Plan | None = None,
    ) -> Redeployed:
        """Forms the run anew with those who are there; waits for others where these cannot hold the model, and raises a
        TrainingError where nobody else can come. `saved` is where the run stands, where nothing is under way. `decided`
        is the plan that this was decided with: it is deployed, unless it does not hold any more."""
        course, ledger = self._around.course, self._around.ledger
        began = time.monotonic()
        course.emit("reform_begun", reason)
        self._display.message(f"forming anew: {reason}")
        self._around.progress.clock.pause()
        cluster = before.clusters.whole[0]
        for each in before.clusters.whole:
            # Whoever is lost from now on is not replaced there.
            each.begin_forming(reason)
        self._phase("forming anew")
        if saved is None:
            state = await self._state(before, cluster)
        else:
            contents = await asyncio.to_thread(load_checkpoint, saved)
            words = f"from where it was after {saved.updates} updates"
            state = _State(replace(self._prepared, restored=contents), (), None, words)
        old = before.clusters.all
        holders = before.plan.stages
        decide_seconds = 0.0
        while True:
            since = time.monotonic()
            _, _, plan = await self._those_left(state.prepared, reason, [stage.node for stage in holders], decided)
            if decided is not None and plan is not decided:
                why = "the providers or their lines have changed since the change was decided"
                course.emit("planned_again", f"{why}: {plan.reason}")
            tell_plan(course, self._display, plan, state.prepared.job)
            try:
                formation = before = self._made(state.prepared, plan, before, take, state.donors)
                decide_seconds += time.monotonic() - since
                await self._deploy(formation)
            except DeploymentAbortedError as error:
                course.emit("deployment_broken_off", str(error))
                decided = None
                if before.donors is not None and before.donors.replica.is_available(self._present()):
                    state = replace(state, donors=before.donors)
                elif before.donors is not None:
                    state = await self._checkpointed()
                continue
            break
        deployed = time.monotonic()
        again = len(state.left)
        if state.rewind_to is not None:
            again = ledger.go_back(state.rewind_to)
            formation.feeding.go_back(state.rewind_to)
        else:
            ledger.replayed += again
            # Only now: until the other formation took its place, the old one may have completed some of it.
            evaluations = [item for each in old for item in each.evaluating.values()]
            await self._feed_again(formation, state.left, cluster.open, evaluations)
        self._release(formation)
        seconds = time.monotonic() - began
        text = (
            f"{counted(len(plan.clusters), 'cluster')} of {counted(len(plan.stages), 'stage')} in all, after "
            f"{seconds:.1f} s, {state.words}; {counted(again, 'microbatch is', 'microbatches are')} fed again"
        )
        course.emit(
            "reformed",
            text,
            clusters=len(plan.clusters),
            seconds=seconds,
            replayed=again,
            decide_seconds=decide_seconds,
            fetch_seconds=deployed - began - decide_seconds,
            resume_seconds=began + seconds - deployed,
        )
        self._display.message(f"formed anew: {text}")
        return Redeployed(formation, state.rewind_to)

    async def _state(self, before: Deployment, cluster: ClusterRun) -> _State:
        """The newest that can be had."""
        replica, donors = before.replicas.newest(cluster), None
        if replica is not None:
            stages = cluster.plan.stages
            keys, graphs = [stage_key(before.id, stage) for stage in stages], [stage.graph for stage in stages]
            donors = ReplicaSources.of(keys, graphs, replica)
        else:
            donors = before.donors
        if donors is not None and donors.replica.is_available(self._present()) and not cluster.dropped:
            # A checkpoint that was under way came from stages that are given up.
            before.checkpointing.abort()
            words = f"from a replica of {donors.replica.place.updates} updates"
            return _State(self._prepared, list(cluster.retained.values()), None, words, donors)
        return await self._checkpointed()

    def _present(self) -> set[str]:
        return {member.node_id for member in self._around.swarm.members.connected()}

    async def _checkpointed(self) -> _State:
        """The newest that was saved."""
        info = await asyncio.to_thread(self._store.latest)
        if info is None:
            return _State(self._prepared, (), self._start, "from the beginning: nothing had been saved")
        contents = await asyncio.to_thread(load_checkpoint, info)
        words = f"from the checkpoint of {info.updates} updates"
        return _State(replace(self._prepared, restored=contents), (), place_of(info), words)

    async def replacement(
        self, formation: Deployment, pays: Callable[[Plan], bool], known: Sequence[Cluster] = ()
    ) -> Plan:
        """The plan that would take the place of a formation now, with its lines measured if it `pays`. PlanError where
        those who are there cannot hold the model."""
        holders = [stage.node for stage in formation.plan.stages]
        _, _, plan = await self.plan_left(self._prepared, holders, pays=pays, known=known)
        return plan

    async def plan_left(
        self,
        prepared: PreparedJob,
        first: Sequence[str] = (),
        begin: Plan | None = None,
        pays: Callable[[Plan], bool] = lambda plan: True,
        known: Sequence[Cluster] = (),
    ) -> tuple[list[Member], Goal, Plan]:
        """The plan for those who are there and stay, the providers named `first` before the others, with what is asked
        of it; PlanError where they cannot hold the model. For the other arguments see `RunPlanner.plan`."""
        asked = self._asked
        present = sorted(
            (m for m in self._around.swarm.members.in_order() if m.node_id not in self.leaving),
            key=lambda m: first.index(m.node_id) if m.node_id in first else len(first),
        )
        members = present[: asked.providers] if asked.providers is not None else present
        failed = [f"{node_id} failed: {message}" for node_id, message in self._aside.items()]
        refusal = PlanError("; ".join(["nobody is there", *failed]))
        for goal in _goals(prepared, asked, len(members)) if members else ():
            try:
                plan = await self._plan(prepared, members, goal, begin=begin, pays=pays, known=known)
                return members, goal, plan
            except PlanError as error:
                refusal = error
                members = present
        raise refusal

    async def _those_left(
        self, prepared: PreparedJob, reason: str, first: Sequence[str], begin: Plan | None = None
    ) -> tuple[list[Member], Goal, Plan]:
        """As `plan_left`, but waits for others where those who are there cannot hold the model; TrainingError where
        nobody else can come."""
        around = self._around
        told = ""
        try:
            while True:
                try:
                    return await self.plan_left(prepared, first, begin)
                except PlanError as error:
                    why = str(error)
                if not around.swarm.open_to_more:
                    raise TrainingError(f"{reason}; those who are left cannot go on: {why}")
                if why != told:
                    told = why
                    self._phase("waiting for providers")
                    around.course.emit("waiting", why)
                    self.waits = True
                    around.course.notify()
                    self._display.message(f"waiting for more machines: {why}")
                names = {member.node_id for member in around.swarm.members.in_order()}

                def changed(names: set[str] = names) -> bool:
                    return {member.node_id for member in around.swarm.members.in_order()} != names

                await around.course.while_well(around.swarm.members.changes.until(changed))
        finally:
            self.waits = False

    async def _plan(
        self,
        prepared: PreparedJob,
        members: list[Member],
        goal: Goal,
        *,
        layouts: Sequence[ClusterLayout] = (),
        begin: Plan | None = None,
        pays: Callable[[Plan], bool] = lambda plan: True,
        known: Sequence[Cluster] = (),
    ) -> Plan:
        around, lines = self._around, self._planner.lines
        planning = self._planner.plan(prepared, members, goal, layouts, begin=begin, pays=pays, known=known)
        before = dict(lines)
        plan: Plan = await around.course.while_well(planning)
        new = {pair: line for pair, line in lines.items() if before.get(pair) != line}
        if new and around.swarm.state is not None:
            await asyncio.to_thread(around.swarm.state.measured, new, time.time())
        return plan

    def _made(
        self,
        prepared: PreparedJob,
        plan: Plan,
        before: Deployment | None,
        take: Take,
        donors: ReplicaSources | None = None,
        standing: DeploymentRecord | None = None,
    ) -> Deployment:
        formation = Deployment(self._around, prepared, plan, self._store, before, donors, standing)
        for cluster in formation.clusters.all:
            cluster.begin_forming("it is being deployed")
        take(formation)
        return formation

    async def _deploy(self, formation: Deployment) -> None:
        around, plan = self._around, formation.plan
        members = [around.swarm.members[stage.node] for stage in plan.stages if stage.node in around.swarm.members]
        if len(members) < len(plan.stages):
            raise DeploymentAbortedError("a provider of the plan is gone")
        if around.swarm.state is not None:
            await asyncio.to_thread(around.swarm.state.changes)
            await asyncio.to_thread(around.swarm.state.planned, [stage.node for stage in plan.stages])
            await asyncio.to_thread(around.swarm.state.reached, position_of(around.ledger))
        self._phase("deploying stages")
        await formation.deploy(members)
        await self._announce(formation)

    async def _announce(self, formation: Deployment) -> None:
        """A formation has its stages: everybody is to know."""
        around, progress = self._around, self._around.progress
        members = [around.swarm.members[node] for node in formation.stage_of if node in around.swarm.members]
        progress.devices = {**progress.devices, **{m.node_id: m.machine.device for m in members}}
        progress.plan, progress.clusters = formation.plan, formation.clusters
        progress.rounds = None if formation.averaging is None else formation.averaging.rounds
        await formation.holders.delete_outdated([member.node_id for member in around.swarm.members.connected()])

    async def _feed_again(
        self,
        formation: Deployment,
        left: Sequence[FedMicrobatch],
        opened: Mapping[int, TrainBatch],
        evaluations: Sequence[EvalBatch],
    ) -> None:
        """All of it to the first cluster, in order."""
        cluster = formation.clusters.all[0]
        for item, _ in left:
            if item.microbatch in opened:
                cluster.open[item.microbatch] = item
            else:
                cluster.again.add(item.microbatch)
        if left and not left[-1].ends:
            # The rest of an update that has begun is still to be fed: nothing comes to rest before.
            formation.clusters.group = cluster
        for evaluation in evaluations:
            cluster.evaluating[evaluation.microbatch] = evaluation
        with contextlib.suppress(DeploymentAbortedError):
            # Somebody else takes the stage of whoever is gone, and all of it is fed again then.
            await formation.feed_again(cluster, left)


def _goals(prepared: PreparedJob, asked: RequestedSize, present: int) -> list[Goal]:
    """What was asked for, as far as those who are there can do it; else as many clusters as are best, up to that."""
    job = prepared.job
    goals = []
    if asked.providers is not None and asked.clusters is not None:
        goals.append(goal_of(job, present, min(asked.clusters, present)))
    goals.append(replace(goal_of(job, None, None), max_clusters=asked.clusters))
    return goals


def position_of(ledger: Ledger) -> Position:
    """Where the ledger stands, for a coordinator that is started again."""
    return Position(ledger.fed, ledger.completed, ledger.updates, ledger.samples, time.time())

"""Redeployment: the model is planned and deployed again on the providers that are connected.

It follows a loss that no standby can repair, and a change of the swarm that is worth it. Stages start from the newest
state: from a replica of which all parts are available (the parts go from the providers that have them to those that
need them), or else from the newest checkpoint. Microbatches since the replica are fed again. From a checkpoint, the
requester's thread walks the data again.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ravnest.coordinator.checkpoints.reader import CheckpointInfo, load_checkpoint
from ravnest.coordinator.checkpoints.saver import place_of
from ravnest.coordinator.deploy.average_now import average_now
from ravnest.coordinator.deploy.current_deployment import CurrentDeployment
from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.deploy.plan_events import tell_plan
from ravnest.coordinator.deploy.present_planner import PresentPlanner
from ravnest.coordinator.deploy.rollout import Rollout
from ravnest.coordinator.feed.cluster_state import ClusterRun, FedMicrobatch
from ravnest.coordinator.feed.feeder import EvalBatch, TrainBatch
from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.plan.prepared_job import PreparedJob
from ravnest.coordinator.replicas.sources import DeploymentAbortedError, ReplicaSources
from ravnest.coordinator.report.phase import Phase
from ravnest.coordinator.run.job_run import JobRun
from ravnest.coordinator.run.orders import stage_key
from ravnest.errors import DiskFullError, TrainingError
from ravnest.planner.cluster import Cluster
from ravnest.planner.plan import Plan
from ravnest.units import counted


@dataclass(frozen=True, slots=True)
class StartState:
    """The state that a redeployed run starts from."""

    prepared: PreparedJob
    left: Sequence[FedMicrobatch]
    """Microbatches to feed again."""
    rewind_to: DataPosition | None
    """The position from which the data is walked again; None if nothing is missing."""
    words: str
    """Origin of the state, as text for the user."""
    source: Literal["replica", "checkpoint", "start", "saved"]
    """The same in one word: `saved` is a checkpoint that was taken for the redeployment."""
    sources: ReplicaSources | None = None
    """The providers that have the state; None if it is in `prepared`."""


class Redeployment:
    """Redeploys one run, one redeployment at a time. All methods run on the network's event loop."""

    def __init__(self, run: JobRun, current: CurrentDeployment, planner: PresentPlanner, rollout: Rollout) -> None:
        self.on_ready: Callable[[Deployment], None] = lambda deployment: None
        """Called when all stages of a new deployment are ready: its clusters are fed from then on."""
        self._run = run
        self._current = current
        self._planner = planner
        self._rollout = rollout
        self._lock = asyncio.Lock()

    async def plan(self, deployment: Deployment, pays: Callable[[Plan], bool], known: Sequence[Cluster] = ()) -> Plan:
        """The plan that would replace this deployment now; its lines are measured if it `pays`. PlanError if the
        connected providers cannot hold the model."""
        holders = [stage.node for stage in deployment.plan.stages]
        _, _, plan = await self._planner.plan_present(self._run.prepared, holders, pays=pays, known=known)
        return plan

    async def when_drained(self, before: Deployment, reason: str, decided: Plan | None = None) -> None:
        """Drains the pipeline, makes all clusters equal, saves a checkpoint and redeploys from there. Nothing happens
        if the disk has no room, or if another deployment replaces this one meanwhile."""
        run, context = self._run, self._run.context

        def is_ready() -> bool:
            # In the middle of an update, its first gradients have not been applied to any weights.
            return run.walk.is_undisturbed and before.is_drained and before.clusters.group is None

        # With a fresh replica, the state need not pass through the coordinator: only a little is fed again.
        has_replica = len(before.clusters.all) == 1 and await before.holders.wait_for_fresh(before.clusters.all[0])
        run.dispatcher.paused = reason
        try:
            while self._current.is_current(before):
                if not is_ready():
                    await context.until(lambda: not self._current.is_current(before) or is_ready())
                    continue
                context.progress.clock.pause()
                saved = None
                if not has_replica:
                    await average_now(context, self._current, "before the redeployment")
                    saved = await run.checkpointer.now()
                if self._current.is_current(before) and is_ready():
                    await self.redeploy(before, reason, saved, decided)
        except DiskFullError as error:
            context.emit("not_formed_anew", str(error))
        finally:
            run.dispatcher.paused = ""
            context.notify()

    async def redeploy(
        self, before: Deployment, reason: str, saved: CheckpointInfo | None = None, decided: Plan | None = None
    ) -> None:
        """Redeploys at once, unless another deployment has already replaced this one. It starts from the checkpoint
        that was `saved`, or from the newest state, and deploys the plan that was `decided` if it still holds. Waits for
        other providers if the connected ones cannot hold the model; TrainingError if no other can join."""
        async with self._lock:
            if not self._current.is_current(before):
                return
            try:
                await self._redeploy(before, reason, saved, decided)
            except TrainingError as error:
                if error is self._run.context.failure:
                    raise
                raise TrainingError(f"{error}; {self._run.checkpointer.advice}") from None

    async def _redeploy(
        self, before: Deployment, reason: str, saved: CheckpointInfo | None, decided: Plan | None
    ) -> None:
        run, context = self._run, self._run.context
        began = time.monotonic()
        context.emit("reform_begun", reason)
        context.say(f"redeploying: {reason}")
        context.progress.clock.pause()
        for each in before.clusters.whole:
            # Stages that are lost from now on are not replaced there.
            each.begin_forming(reason)
        cluster = before.clusters.whole[0]
        context.enter(Phase.REDEPLOYING)
        state = await self._newest_state(before, cluster) if saved is None else await self._saved_state(saved)
        deployment, state, decide_seconds = await self._deploy(before, reason, state, decided)
        deployed = time.monotonic()
        if state.rewind_to is not None:
            replayed = context.ledger.go_back(state.rewind_to)
            run.dispatcher.rewind(state.rewind_to)
        else:
            replayed = len(state.left)
            context.ledger.replayed += replayed
            # Only now: until the new deployment was current, the old one may have completed some evaluations.
            evaluations = [item for each in before.clusters.all for item in each.evaluating.values()]
            await self._replay(deployment, state.left, cluster.open, evaluations)
        self.on_ready(deployment)
        seconds, plan = time.monotonic() - began, deployment.plan
        text = (
            f"{counted(len(plan.clusters), 'cluster')} with {counted(len(plan.stages), 'stage')} after "
            f"{seconds:.1f} s, {state.words}; {counted(replayed, 'microbatch is', 'microbatches are')} fed again"
        )
        context.emit(
            "reformed",
            text,
            clusters=len(plan.clusters),
            source=state.source,
            seconds=seconds,
            replayed=replayed,
            decide_seconds=decide_seconds,
            fetch_seconds=deployed - began - decide_seconds,
            resume_seconds=began + seconds - deployed,
        )
        context.say(f"redeployed: {text}")
        if state.rewind_to is not None:
            run.walk.rewind(state.rewind_to)
        context.enter(run.walk.phase)

    async def _deploy(
        self, before: Deployment, reason: str, state: StartState, decided: Plan | None
    ) -> tuple[Deployment, StartState, float]:
        """Plans and deploys until it succeeds. Returns the deployment, the state that it started from and the time
        spent on planning."""
        context = self._run.context
        holders = [stage.node for stage in before.plan.stages]
        decide_seconds = 0.0
        while True:
            since = time.monotonic()
            _, _, plan = await self._planner.wait_and_plan(state.prepared, reason, holders, decided)
            if decided is not None and plan is not decided:
                why = "the providers or their lines have changed since the plan was chosen"
                context.emit("planned_again", f"{why}: {plan.reason}")
            tell_plan(context, plan, state.prepared.job)
            deployment = self._rollout.create(state.prepared, plan, state.sources)
            decide_seconds += time.monotonic() - since
            try:
                await self._rollout.deploy(deployment)
                return deployment, state, decide_seconds
            except DeploymentAbortedError as error:
                context.emit("deployment_broken_off", str(error))
            decided, sources = None, deployment.transfers.sources
            if sources is not None and sources.replica.is_available(context.present):
                state = replace(state, sources=sources)
            elif sources is not None:
                state = await self._checkpointed()

    async def _newest_state(self, before: Deployment, cluster: ClusterRun) -> StartState:
        """The newest state that is available."""
        run = self._run
        replica = before.replicas.newest(cluster)
        sources = before.transfers.sources
        if replica is not None:
            stages = cluster.plan.stages
            keys, graphs = [stage_key(before.id, stage) for stage in stages], [stage.graph for stage in stages]
            sources = ReplicaSources.of(keys, graphs, replica)
        if sources is not None and sources.replica.is_available(run.context.present) and not cluster.dropped:
            # The pending checkpoint came from stages that are given up.
            run.checkpointer.abort()
            words = f"from the replica after {sources.replica.place.updates} updates"
            return StartState(run.prepared, list(cluster.retained.values()), None, words, "replica", sources)
        return await self._checkpointed()

    async def _checkpointed(self) -> StartState:
        """The newest state that was saved."""
        run = self._run
        info = await asyncio.to_thread(run.store.latest)
        if info is None:
            words = "from the beginning, because nothing had been saved"
            return StartState(run.prepared, (), run.start, words, "start")
        contents = await asyncio.to_thread(load_checkpoint, info)
        words = f"from the checkpoint after {info.updates} updates"
        return StartState(replace(run.prepared, restored=contents), (), place_of(info), words, "checkpoint")

    async def _saved_state(self, saved: CheckpointInfo) -> StartState:
        """The state that was saved a moment ago, with nothing in flight."""
        contents = await asyncio.to_thread(load_checkpoint, saved)
        words = f"from the state after {saved.updates} updates"
        return StartState(replace(self._run.prepared, restored=contents), (), None, words, "saved")

    async def _replay(
        self,
        deployment: Deployment,
        left: Sequence[FedMicrobatch],
        opened: Mapping[int, TrainBatch],
        evaluations: Sequence[EvalBatch],
    ) -> None:
        """Feeds these microbatches and evaluations again to the first cluster, in order."""
        cluster = deployment.clusters.all[0]
        for item, _ in left:
            if item.microbatch in opened:
                cluster.open[item.microbatch] = item
            else:
                cluster.again.add(item.microbatch)
        if left and not left[-1].ends:
            # The rest of an update that has begun is still to be fed; the pipeline cannot drain before.
            deployment.clusters.group = cluster
        for evaluation in evaluations:
            cluster.evaluating[evaluation.microbatch] = evaluation
        with contextlib.suppress(DeploymentAbortedError):
            # A provider was lost again: recovery replaces it, and feeds everything again.
            await deployment.replay(cluster, left)

"""The coordinator: plans, deploys, feeds, averages, evaluates, saves, watches. One run of one job.

It lives on the network's loop; the thread that owns the requester's Python hands it items one by one (`take`) and is
held back there while the swarm has enough. What happens on failure: a provider that vanishes or a stage that fails ends
its cluster, and the other clusters go on; the end of the last one, a loss that is not finite or a disk that is full is
one error that every wait raises from then on; checkpoints already written stay.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable

from ravnest.amounts import counted
from ravnest.averaging.deadlines import Deadlines
from ravnest.coordinator.averaging_run import AveragingRun
from ravnest.coordinator.checkpointing import Checkpointing
from ravnest.coordinator.checkpoints import CheckpointInfo, CheckpointStore
from ravnest.coordinator.clusters import ClusterRun, Clusters
from ravnest.coordinator.course import Course
from ravnest.coordinator.deploying import Orders
from ravnest.coordinator.evaluation import Evaluation
from ravnest.coordinator.feeder import EpochEnd, EvalBatch, EvalEnd, Item, TrainBatch
from ravnest.coordinator.feeding import BETTER_REASON_SECONDS, Feeding
from ravnest.coordinator.flights import Flights
from ravnest.coordinator.gathering import gather
from ravnest.coordinator.measures import describe, figures
from ravnest.coordinator.members import Member
from ravnest.coordinator.planning import Machine, check_fit, goal_of, plan_measured
from ravnest.coordinator.prepare import Prepared
from ravnest.coordinator.progress import Progress
from ravnest.coordinator.recording import Recorder
from ravnest.coordinator.rounds import Rounds
from ravnest.coordinator.run_plan import RunPlan
from ravnest.coordinator.saving import saver_of
from ravnest.coordinator.state import Position
from ravnest.coordinator.swarm import Swarm
from ravnest.coordinator.telling import tell_plan
from ravnest.coordinator.tracing import Tracing
from ravnest.errors import RavnestError, RefusedError, RunError, TrainingError, printable
from ravnest.job import Job
from ravnest.monitor.display import Display
from ravnest.monitor.events import EventLog
from ravnest.monitor.metrics import MetricLog
from ravnest.monitor.run_directory import RunDirectory
from ravnest.monitor.summary import Fault
from ravnest.net.frames import Frame, FrameKind
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Failed, ProviderMessage, Start, Threads

_VANISHED_SECONDS = 0.2
"""How long after a provider has vanished the reason is waited for: whoever started its process knows better."""
_DISPLAY_SECONDS = 0.25
_SUMMARY_SECONDS = 2.0


class Coordinator:
    """Made on any thread; every method but `__init__` belongs to the network's loop."""

    def __init__(
        self,
        swarm: Swarm,
        run: RunDirectory,
        events: EventLog,
        metrics: MetricLog,
        progress: Progress,
        display: Display,
    ) -> None:
        self.progress = progress
        self._swarm = swarm
        self._run = run
        self._recorder = Recorder(progress, metrics)
        self._display = display
        self._ledger = progress.ledger
        self._course = Course(swarm, events)
        self._deployment = secrets.token_hex(4)
        self._generation = 0
        self._ready: set[str] = set()
        self._reported: dict[str, float] = {}
        self._lost: set[str] = set()
        self._deployed = False
        self._resumed = progress.ledger.updates > 0
        self._stage_of: dict[str, int] = {}
        """Of every provider that holds one in a cluster that trains, its number there."""
        self._scores: set[str] = set()
        """What an evaluation measures."""
        self._clusters = Clusters(())
        self._feeding: Feeding | None = None
        self._checkpointing: Checkpointing | None = None
        self._averaging: AveragingRun | None = None
        """Where there are several clusters."""
        self._flights: Flights | None = None
        self._evaluation: Evaluation | None = None

    @property
    def on_failure(self) -> Callable[[], None]:
        """Called when training cannot go on, for whoever is busy elsewhere and not waiting here."""
        return self._course.on_failure

    @on_failure.setter
    def on_failure(self, call: Callable[[], None]) -> None:
        self._course.on_failure = call

    async def start(self) -> None:
        """Begins to listen to the swarm and to show the run."""
        self._swarm.events = self
        for member in self._swarm.members.connected():
            self.joined(member)
        self._course.spawn(self._show())

    async def deploy(
        self, prepared: Prepared, providers: int | None, clusters: int | None, threads: int, cores: int
    ) -> RunPlan:
        """Waits for the providers, plans, and returns when every stage is built and linked.

        Without a number of providers, it waits for as many as have the memory for the model together; without one of
        clusters, there are as many as are fastest.
        """
        job, machine = prepared.job, Machine(cores, threads)
        goal = goal_of(job, providers, clusters)
        self.phase("waiting for providers")
        gathering = gather(
            self._swarm.members,
            providers,
            lambda present: check_fit(prepared, present, machine, clusters),
            self._display.message,
        )
        members, why = await self._course.while_well(gathering)
        self._course.emit("gathered", f"{len(members)} providers: {why}")
        self.phase("planning")
        planning = plan_measured(self._swarm, prepared, members, goal, machine, self.phase)
        plan: RunPlan = await self._course.while_well(planning)
        tell_plan(self._course, self._display, plan, job)
        taking_part = {stage.node for stage in plan.stages}
        members = [member for member in members if member.node_id in taking_part]
        if self._swarm.state is not None:
            await asyncio.to_thread(self._swarm.state.planned, [s.node for s in plan.stages])
            await asyncio.to_thread(self._swarm.state.reached, self._position())
        self.progress.devices = {m.node_id: m.device for m in members}
        self._set_up(prepared, plan)
        self.phase("deploying stages")
        await self._deploy_stages(prepared, plan, members, threads)
        self.progress.plan, self.progress.clusters = plan, self._clusters
        self._deployed = True
        self.phase("training")
        return plan

    async def take(self, item: Item) -> None:
        """Takes the next item of the data, once there is room for it; raises what made training impossible."""
        if isinstance(item, TrainBatch):
            await self._take_batch(item)
        elif isinstance(item, EvalBatch):
            await self._take_evaluation(item)
        elif isinstance(item, EvalEnd):
            await self._end_evaluation()
        elif isinstance(item, EpochEnd):
            self._end_epoch(item)

    async def check(self) -> None:
        """Raises what made training impossible, if anything did."""
        await self._course.until(lambda: True)

    async def finish(self) -> CheckpointInfo:
        """Waits for what is in flight, makes all clusters alike, and saves the final state."""
        assert self._checkpointing is not None
        await self._course.until(lambda: self._ledger.outstanding == 0)
        self.progress.pause_clock()
        since = time.monotonic()
        await self._average_now("at the end")
        self.phase("saving")
        info = await self._checkpointing.now()
        if len(self._clusters.whole) > 1:
            # Those that are not saved have something to report, too: the last of what they did.
            await self._course.until(lambda: all(self._reported.get(node, 0.0) > since for node in self._stage_of))
        return info

    async def stop_early(self, timeout_seconds: float) -> CheckpointInfo | None:
        """Saves if what is in flight can be finished in time, otherwise the last checkpoint of this run stands."""
        if self._deployed:
            self.phase("stopping")
            with contextlib.suppress(TimeoutError, RavnestError):
                async with asyncio.timeout(timeout_seconds):
                    return await self.finish()
        return self._last_info

    async def close(self) -> None:
        """Ends everything this run started; the swarm stays for the next one."""
        self._swarm.events = None
        await self._course.close()
        if self._checkpointing is not None:
            self._checkpointing.abort()
        if self._averaging is not None:
            self._averaging.rounds.close()
        self._recorder.close()

    def write_trace(self) -> None:
        """Brings trace.json up to date; RunError when the disk refuses. On any thread."""
        if self._recorder.tracing is not None:
            self._recorder.tracing.write()

    def phase(self, text: str) -> None:
        self.progress.phase = text
        self.progress.fetching = {}
        self._display.show(self.progress.snapshot())

    # What providers do.

    def joined(self, member: Member) -> None:
        self._lost.discard(member.node_id)
        what = f"{member.node_id} joined with {describe(member)}"
        self._course.emit("joined", what, provider=member.node_id, **figures(member))

    def said(self, node_id: str, message: ProviderMessage) -> None:
        kind = message.WhichOneof("body")
        if kind is None or node_id not in self._stage_of:
            # What a standby knows of the run, it does not know from this coordinator.
            return
        if getattr(getattr(message, kind), "deployment", None) != self._deployment:
            return
        if kind == "ready":
            self._ready.add(node_id)
            self._fetched(node_id, 1.0)
            self._course.notify()
        elif kind == "fetching":
            fetching = message.fetching
            self._fetched(node_id, min(1.0, fetching.received_bytes / max(1, fetching.total_bytes)))
        elif kind == "report":
            self._take_report(node_id, message)
        elif kind == "saved" and self._checkpointing is not None:
            self._checkpointing.saved(node_id, message.saved.checkpoint)
            self._look_afresh()
        elif kind == "failed":
            self._take_failure(node_id, message.failed)
        elif self._averaging is not None:
            self._averaging.rounds.heard(node_id, message)

    def returned(self, node_id: str, frame: Frame) -> None:
        if frame.generation != self._generation or self._feeding is None:
            # Of a run before this one, which was given up while this was under way.
            return
        if frame.kind is FrameKind.DONE:
            if self.progress.first_update_seconds is None:
                self._course.emit("first_update", "the first microbatch has passed every stage")
            self._feeding.completed(node_id, frame.microbatch)
            self.progress.completed()
            self._course.notify()
        elif frame.kind is FrameKind.RESULT and self._evaluation is not None:
            if frame.scalars.keys() != self._scores:
                raise RefusedError(f"{node_id} sent a result of other measures than {sorted(self._scores)}")
            cluster = self._clusters.of(node_id)
            if cluster is not None and cluster.evaluating.pop(frame.microbatch, None) is not None:
                self._evaluation.came(frame.microbatch, {k: float(v) for k, v in frame.scalars.items()})
                self._course.notify()

    def disconnected(self, node_id: str, reason: str) -> None:
        self._course.emit("disconnected", reason, provider=node_id)
        if self._averaging is not None:
            # It may be back soon; whoever averages does not wait for it.
            self._averaging.rounds.gone(node_id, f"{node_id} is disconnected: {reason}")

    def reconnected(self, node_id: str) -> None:
        self._course.emit("reconnected", f"{node_id} is connected again", provider=node_id)

    def vanished(self, node_id: str, reason: str) -> None:
        """A provider's stay in the swarm has ended."""
        self._course.later(_VANISHED_SECONDS, lambda: self.lost(node_id, reason))

    def lost(self, node_id: str, reason: str) -> None:
        """A provider is gone, and why."""
        if self._course.closing or node_id in self._lost:
            return
        stage = self._stage_of.get(node_id)
        if stage is None and self._swarm.members.is_present(node_id):
            # It has come back in the meantime, and there was nothing to lose.
            return
        self._lost.add(node_id)
        self._course.emit("lost", reason, provider=node_id)
        cluster = self._clusters.of(node_id)
        if stage is not None:
            number = 0 if cluster is None else cluster.id
            self.progress.faults.append(Fault(kind="provider_lost", provider=node_id, cluster=number, at=time.time()))
        held = "" if stage is None else f", which held stage {stage},"
        text = f"{node_id}{held} is gone: {reason}"
        if self._deployed and stage is not None:
            self._end_stage(node_id, text)
        elif stage is not None or not (self._deployed or self._swarm.open_to_more):
            self._course.fail(TrainingError(text))

    async def uploaded(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        if self._checkpointing is None:
            raise RefusedError(f"{node_id} may not upload {name[:80]!r}")
        await self._checkpointing.uploaded(node_id, name, chunks)

    # Deploying.

    def _set_up(self, prepared: Prepared, plan: RunPlan) -> None:
        """Makes what the run of this plan consists of."""
        job, course = prepared.job, self._course
        self._swarm.generation += 1
        self._generation = self._swarm.generation
        self._clusters = Clusters(plan.clusters)
        self._stage_of = {s.node: s.stage for s in plan.stages}
        self._scores = {"loss", *job.metrics}
        if job.pipeline.record_updates:
            self._recorder.record_updates(self._run.updates_path)
        if job.pipeline.trace:
            self._recorder.tracing = Tracing(self._run.trace_path, job.pipeline.trace, plan.stages)
        self._feeding = Feeding(
            course, self._swarm, self._clusters, self._generation, self._ledger, self._recorder, self.progress
        )
        self._flights = Flights(course, self._deployment, self._clusters.all, job.pipeline.in_flight is not None)
        store = CheckpointStore(self._run.checkpoints_path, job.checkpoint.keep)
        self._checkpointing = Checkpointing(
            course,
            self._swarm,
            lambda cluster: saver_of(store, prepared, cluster, self._ledger.updates),
            self._clusters.all[0],
            self._deployment,
            self._ledger,
        )
        if plan.rings:
            rounds = self.progress.rounds = self._rounds_of(plan, job)
            self._averaging = AveragingRun(
                course,
                self._feeding,
                self._checkpointing,
                rounds,
                self._ledger,
                self._deployment,
                plan.average_every,
                job.averaging.blocking,
                self._display.message,
            )

    def _rounds_of(self, plan: RunPlan, job: Job) -> Rounds:
        course = self._course
        # A round reaches a cluster's stages when all that was fed before it has gone through.
        waits = [
            (running.in_flight + running.ahead) * planned.period_seconds + planned.round_trip_seconds
            for running, planned in zip(plan.clusters, plan.plan.clusters, strict=True)
        ]
        return Rounds(
            plan,
            self._deployment,
            job.averaging.outlier,
            Deadlines(max(waits), plan.round_seconds),
            lambda node_id, message: course.spawn(course.tell(node_id, message)),
            course.emit,
            course.notify,
        )

    async def _deploy_stages(self, prepared: Prepared, plan: RunPlan, members: list[Member], threads: int) -> None:
        by_id = {member.node_id: member for member in members}
        reaches = await self._course.while_well(self._swarm.reaches(members))
        orders = await Orders.make(prepared, plan, by_id, reaches, self._deployment, self._generation)
        self._swarm.artifacts = orders.artifacts
        links = (*orders.links, *orders.ring_links)
        self._swarm.allow_relays({link.name: frozenset((link.before, link.after)) for link in links})
        for link in links:
            self._course.emit("linked", f"{link.before} to {link.after}: {link.reason}", link=link.name)
        chooses_itself = {member.node_id for member in members if member.threads}
        for node_id, order in orders.by_node.items():
            if node_id not in chooses_itself:
                await self._swarm.tell(node_id, CoordinatorMessage(threads=Threads(threads=threads)))
            await self._swarm.tell(node_id, CoordinatorMessage(deploy=order))
        await self._course.until(lambda: self._ready >= set(self._stage_of))
        self._swarm.artifacts = {}
        # Only now: a stage dials its neighbours, which must be there by then.
        for node_id in orders.by_node:
            await self._swarm.tell(node_id, CoordinatorMessage(start=Start(deployment=self._deployment)))
        several = f" in {len(plan.clusters)} clusters" if len(plan.clusters) > 1 else ""
        self._course.emit("deployed", f"{len(plan.stages)} stages{several} are ready")

    def _fetched(self, node_id: str, share: float) -> None:
        """How much of its stage a provider has. Nothing is shown of stages that are there in no time."""
        if self.progress.fetching or share < 1:
            before = self.progress.fetching or {node: float(node in self._ready) for node in self._stage_of}
            self.progress.fetching = before | {node_id: share}

    # Items.

    async def _take_batch(self, item: TrainBatch) -> None:
        assert self._feeding is not None
        if self._averaging is not None:
            await self._averaging.before_batch()
        await self._feeding.batch(item, lambda: self._checkpoint_with(item))

    def _checkpoint_with(self, item: TrainBatch) -> int:
        """The number of the checkpoint to be taken with this microbatch, or 0: of several clusters, after a round."""
        assert self._feeding is not None and self._checkpointing is not None
        if len(self._clusters.whole) > 1 or self._feeding.replaying:
            return 0
        number = self._checkpointing.with_microbatch(item)
        if number:
            self._look_afresh()
        return number

    async def _take_evaluation(self, item: EvalBatch) -> None:
        assert self._feeding is not None
        if self._evaluation is None:
            await self._course.until(lambda: self._ledger.outstanding == 0)
            self.progress.pause_clock()
            self._look_afresh()
            await self._average_now("before an evaluation")
            self._evaluation = Evaluation()
            self.phase("evaluating")
        self._evaluation.sent(item.microbatch, item.samples)
        await self._feeding.evaluation(item)

    async def _end_evaluation(self) -> None:
        evaluation = self._evaluation
        if evaluation is None:
            self._course.emit("evaluated", "eval_data is empty: there is nothing to evaluate on")
            self._display.message("eval_data is empty: nothing was evaluated")
            return
        await self._course.until(lambda: evaluation.outstanding == 0)
        self._evaluation = None
        self._look_afresh()
        means = evaluation.means()
        self._recorder.evaluated(means)
        self._course.emit("evaluated", f"on {evaluation.samples} samples", **means)
        self.phase("training")

    def _look_afresh(self) -> None:
        """Training stands still for a moment: nothing is to be concluded from that."""
        if self._flights is not None:
            self._flights.restart()

    async def _average_now(self, reason: str) -> None:
        if self._averaging is not None:
            self.phase("averaging")
            await self._averaging.now(reason)

    def _end_epoch(self, item: EpochEnd) -> None:
        assert self._feeding is not None
        self.progress.epoch_batches = item.batches
        if item.samples is not None:
            self.progress.epoch_samples = item.samples
        self._ledger.end_epoch(item.after)
        self._feeding.fed_place = item.after
        self._course.emit("epoch", f"epoch {item.after.epoch} has been fed", samples=item.after.samples)

    # Faults and reports.

    def _lose(self, cluster: ClusterRun, reason: str) -> None:
        """A cluster that lacks a stage does not train any more; the others go on, with what it had not completed."""
        assert self._feeding is not None and self._checkpointing is not None and self._averaging is not None
        rounds = self._averaging.rounds
        unlearnt = cluster.samples - rounds.counted_samples(cluster.nodes)
        replayed = self._feeding.lose(cluster, reason)
        for node_id in cluster.nodes:
            self._stage_of.pop(node_id, None)
            rounds.gone(node_id, reason)
        if self._checkpointing.is_of(cluster):
            self._checkpointing.move_to(self._clusters.whole[0])
        text = (
            f"cluster {cluster.id} has ended: {reason}; {counted(len(self._clusters.whole), 'cluster')} "
            f"left, fed with {counted(replayed, 'microbatch', 'microbatches')} of it again; what it learnt from its "
            f"last {unlearnt} samples had not been averaged and is lost"
        )
        self._course.emit("cluster_lost", text, cluster=cluster.id, replayed=replayed, samples=unlearnt)
        self._display.message(text)

    def _take_report(self, node_id: str, message: ProviderMessage) -> None:
        cluster = self._clusters.of(node_id)
        assert cluster is not None
        with self._course.failing():
            self._recorder.take(node_id, cluster.id, self._stage_of[node_id], message.report)
        self._reported[node_id] = time.monotonic()
        self._course.notify()
        if self._flights is not None and self._evaluation is None:
            self._flights.reported(cluster, self._stage_of[node_id], message.report)
        if self._averaging is not None:
            self._averaging.rounds.reported(node_id, message.report)

    def _take_failure(self, node_id: str, failed: Failed) -> None:
        message, kind = printable(failed.message), printable(failed.kind)
        self._course.emit("stage_failed", message, provider=node_id, failure=kind, microbatch=failed.microbatch)
        if kind == "not_finite":
            self._course.fail(TrainingError(f"{message}; {self._what_now()}"))
            return
        # A stage that lost its neighbour says so before the neighbour's own end is noticed, which is the better reason.
        seconds = BETTER_REASON_SECONDS if kind == "link" else 0.0
        self._course.later(seconds, lambda: self._end_stage(node_id, f"{node_id} failed: {message}"))

    def _end_stage(self, node_id: str, reason: str) -> None:
        """A stage cannot go on: its cluster ends, unless it has ended already, and with the last one the run."""
        cluster = self._clusters.of(node_id)
        if cluster is not None and self._deployed and len(self._clusters.whole) > 1:
            self._lose(cluster, reason)
        elif node_id in self._stage_of:
            self._course.fail(TrainingError(f"{reason}; {self._what_now()}"))

    @property
    def _last_info(self) -> CheckpointInfo | None:
        return None if self._checkpointing is None else self._checkpointing.last

    def _what_now(self) -> str:
        saved = self._checkpointing is not None and self._checkpointing.has_saved
        if not saved and not self._resumed:
            return "nothing had been saved yet"
        return "the last good checkpoint is kept, continue from it with --resume"

    async def _show(self) -> None:
        """Keeps the display and the summary fresh while the run goes on."""
        since = 0.0
        while True:
            await asyncio.sleep(_DISPLAY_SECONDS)
            since += _DISPLAY_SECONDS
            self._display.show(self.progress.snapshot())
            if since >= _SUMMARY_SECONDS:
                since = 0.0
                try:
                    self.progress.summary("running", self.progress.phase).write(self._run)
                    if self._recorder.tracing is not None and self._recorder.tracing.due:
                        await asyncio.to_thread(self.write_trace)
                    if self._swarm.state is not None and self._stage_of:
                        await asyncio.to_thread(self._swarm.state.reached, self._position())
                except RunError as error:
                    self._course.fail(error)

    def _position(self) -> Position:
        ledger = self._ledger
        return Position(ledger.fed, ledger.completed, ledger.updates, ledger.samples, time.time())

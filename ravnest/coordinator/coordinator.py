"""The coordinator: plans, deploys, feeds, evaluates, saves, watches. One run of one job.

It lives on the network's loop; the thread that owns the requester's Python hands it items one by one (`take`) and is
held back there while the swarm has enough. What happens on failure: a stage that fails, a provider that vanishes, a
disk that is full, each becomes one error that every wait raises from then on; checkpoints already written stay.
"""

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from ravnest.coordinator.checkpoints import CheckpointInfo, CheckpointStore
from ravnest.coordinator.deploying import Orders
from ravnest.coordinator.evaluation import Evaluation
from ravnest.coordinator.feeder import EpochEnd, EvalBatch, EvalEnd, Item, TrainBatch
from ravnest.coordinator.gathering import gather
from ravnest.coordinator.ledger import Entry
from ravnest.coordinator.measures import describe, figures
from ravnest.coordinator.members import Member
from ravnest.coordinator.planning import RUN_CLUSTERS, Machine, RunPlan, check_fit, goal_of, plan_measured
from ravnest.coordinator.prepare import Prepared
from ravnest.coordinator.progress import Progress
from ravnest.coordinator.recording import Recorder
from ravnest.coordinator.resuming import trained_with
from ravnest.coordinator.saving import Mark, Saver
from ravnest.coordinator.stage_parts import BadPartError, StagePart
from ravnest.coordinator.state import Position
from ravnest.coordinator.swarm import Swarm
from ravnest.coordinator.waiting import Changes
from ravnest.errors import PeerError, RavnestError, RefusedError, RunError, TrainingError, printable
from ravnest.monitor.display import Display
from ravnest.monitor.events import EventLog
from ravnest.monitor.metrics import MetricLog
from ravnest.monitor.run_directory import RunDirectory
from ravnest.monitor.summary import Fault
from ravnest.net.frames import Frame, FrameKind
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Failed, ProviderMessage, Save, Start, Threads

_BETTER_REASON_SECONDS = 0.2
_LOST_NEIGHBOUR_SECONDS = 1.0
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
        self._events = events
        self._recorder = Recorder(progress, metrics)
        self._display = display
        self._ledger = progress.ledger
        self._changes = Changes()
        self._failure: RavnestError | None = None
        self._deployment = secrets.token_hex(4)
        self._ready: set[str] = set()
        self._saved: dict[str, int] = {}
        self._lost: set[str] = set()
        self._deployed = False
        self._resumed = progress.ledger.updates > 0
        self._stage_of: dict[str, int] = {}
        self._scores: set[str] = set()
        """What an evaluation measures."""
        self._inputs_of: list[tuple[str, tuple[str, ...]]] = []
        self._saver: Saver | None = None
        self._evaluation: Evaluation | None = None
        self._last_info: CheckpointInfo | None = None
        self._limit = 1
        self._ahead = 0
        self._generation = 0
        self._closing = False
        self.on_failure: Callable[[], None] = lambda: None
        """Called when training cannot go on, for whoever is busy elsewhere and not waiting here."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begins to listen to the swarm and to show the run."""
        self._swarm.events = self
        for member in self._swarm.members.connected():
            self.joined(member)
        self._spawn(self._show())

    async def deploy(self, prepared: Prepared, providers: int | None, threads: int, cores: int) -> RunPlan:
        """Waits for the providers, plans, and returns when every stage is built and linked.

        Without a number, it waits for as many as have the memory for the model together.
        """
        job, machine = prepared.job, Machine(cores, threads)
        self.phase("waiting for providers")
        gathering = gather(
            self._swarm.members, providers, lambda present: check_fit(prepared, present, machine), self._display.message
        )
        members, why = await self._while_well(gathering)
        self._events.emit("gathered", f"{len(members)} providers: {why}")
        self.phase("planning")
        planning = plan_measured(
            self._swarm, prepared, members, goal_of(job, providers, RUN_CLUSTERS), machine, self.phase
        )
        plan: RunPlan = await self._while_well(planning)
        self._limit, self._ahead = plan.in_flight, plan.ahead
        self._events.emit(
            "planned",
            plan.reason,
            predicted_samples_per_second=plan.predicted_samples_per_second,
            stages=[{"provider": s.node, "role": s.role, "parameters": s.parameters} for s in plan.stages],
            places=plan.places,
            in_flight=plan.in_flight,
            standbys=plan.plan.standbys,
        )
        self._events.emit("in_flight", plan.flight_reason, limit=plan.in_flight)
        self._display.message(f"plan: {plan.reason}")
        taking_part = {stage.node for stage in plan.stages}
        members = [member for member in members if member.node_id in taking_part]
        if self._swarm.state is not None:
            await asyncio.to_thread(self._swarm.state.planned, [s.node for s in plan.stages])
            await asyncio.to_thread(self._swarm.state.reached, self._position())
        self.progress.devices = {m.node_id: m.device for m in members}
        self._stage_of = {s.node: s.stage for s in plan.stages}
        self._scores = {"loss", *job.metrics}
        self._inputs_of = [(s.node, tuple(v.name for v in s.graph.inputs)) for s in plan.stages if s.graph.inputs]
        if job.pipeline.record_updates:
            self._recorder.record_updates(self._run.updates_path)
        self._saver = Saver(
            CheckpointStore(self._run.checkpoints_path, job.checkpoint.keep),
            job.checkpoint,
            [StagePart.of(stage.stage, stage.graph) for stage in plan.stages],
            {
                "aliases": dict(prepared.captured.aliases),
                "non_persistent": sorted(prepared.captured.not_saved),
                "stages": len(plan.stages),
                **trained_with(job),
            },
            self._ledger.updates,
        )
        self.phase("deploying stages")
        await self._deploy_stages(prepared, plan, members, threads)
        self.progress.plan = plan
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
        await self._until(lambda: True)

    async def finish(self) -> CheckpointInfo:
        """Waits for what is in flight and saves the final state."""
        await self._until(lambda: self._ledger.outstanding == 0)
        self.progress.pause_clock()
        self.phase("saving")
        return await self._save_now()

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
        self._closing = True
        self._swarm.events = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._saver is not None:
            self._saver.abort()
        self._recorder.close()

    def phase(self, text: str) -> None:
        self.progress.phase = text
        self.progress.fetching = {}
        self._display.show(self.progress.snapshot())

    def fail(self, error: RavnestError) -> None:
        """Training cannot go on: whoever waits, and whoever comes to wait, gets this error."""
        if self._failure is None and not self._closing:
            self._failure = error
            self._changes.notify()
            self.on_failure()

    # What providers do.

    def joined(self, member: Member) -> None:
        self._lost.discard(member.node_id)
        with self._failing():
            what = f"{member.node_id} joined with {describe(member)}"
            self._events.emit("joined", what, provider=member.node_id, **figures(member))

    def said(self, node_id: str, message: ProviderMessage) -> None:
        kind = message.WhichOneof("body")
        if node_id not in self._stage_of:
            # What a standby knows of the run, it does not know from this coordinator.
            return
        if kind == "ready" and message.ready.deployment == self._deployment:
            self._ready.add(node_id)
            self._fetched(node_id, 1.0)
            self._changes.notify()
        elif kind == "fetching" and message.fetching.deployment == self._deployment and node_id in self._stage_of:
            fetching = message.fetching
            self._fetched(node_id, min(1.0, fetching.received_bytes / max(1, fetching.total_bytes)))
        elif kind == "report" and message.report.deployment == self._deployment:
            with self._failing():
                self._recorder.take(node_id, self._stage_of[node_id], message.report)
        elif kind == "saved" and message.saved.deployment == self._deployment:
            self._saved[node_id] = message.saved.checkpoint
            self._changes.notify()
        elif kind == "failed" and message.failed.deployment == self._deployment:
            self._take_failure(node_id, message.failed)

    def returned(self, node_id: str, frame: Frame) -> None:
        if frame.generation != self._generation:
            # Of a run before this one, which was given up while this was under way.
            return
        if frame.kind is FrameKind.DONE:
            with self._failing():
                if self.progress.first_update_seconds is None:
                    self._events.emit("first_update", "the first microbatch has passed every stage")
                if self._ledger.complete(frame.microbatch) is None:
                    reason = f"{node_id} reported microbatch {frame.microbatch} done, which was not under way"
                    self._events.emit("applied_twice", reason, microbatch=frame.microbatch)
                    raise RefusedError(reason)
            self.progress.completed()
            self._changes.notify()
        elif frame.kind is FrameKind.RESULT and self._evaluation is not None:
            if frame.scalars.keys() != self._scores:
                raise RefusedError(f"{node_id} sent a result of other measures than {sorted(self._scores)}")
            self._evaluation.came(frame.microbatch, {k: float(v) for k, v in frame.scalars.items()})
            self._changes.notify()

    def disconnected(self, node_id: str, reason: str) -> None:
        with self._failing():
            self._events.emit("disconnected", reason, provider=node_id)

    def reconnected(self, node_id: str) -> None:
        with self._failing():
            self._events.emit("reconnected", f"{node_id} is connected again", provider=node_id)

    def vanished(self, node_id: str, reason: str) -> None:
        """A provider's stay in the swarm has ended."""
        # Whoever started its process knows better why, and says so in a moment.
        self._spawn(self._after(_BETTER_REASON_SECONDS, lambda: self.lost(node_id, reason)))

    def lost(self, node_id: str, reason: str) -> None:
        """A provider is gone, and why."""
        if self._closing or node_id in self._lost:
            return
        if node_id not in self._stage_of and self._swarm.members.is_present(node_id):
            # It has come back in the meantime, and there was nothing to lose.
            return
        self._lost.add(node_id)
        with self._failing():
            self._events.emit("lost", reason, provider=node_id)
        stage = self._stage_of.get(node_id)
        if stage is not None:
            self.progress.faults.append(Fault(kind="provider_lost", provider=node_id, cluster=0, at=time.time()))
        if stage is not None or not (self._deployed or self._swarm.open_to_more):
            held = "" if stage is None else f", which held stage {stage},"
            saved = f"; {self._what_now()}" if self._deployed else ""
            self.fail(TrainingError(f"{node_id}{held} is gone: {reason}{saved}"))

    async def uploaded(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        number = name.removeprefix("checkpoint-")
        if self._saver is None or node_id not in self._stage_of or not re.fullmatch("[0-9]{1,19}", number):
            raise RefusedError(f"{node_id} may not upload {name[:80]!r}")
        try:
            info = await self._saver.part(int(number), self._stage_of[node_id], chunks)
        except BadPartError as error:
            refused = RefusedError(f"{node_id} uploaded a bad checkpoint: {error}")
            with self._failing():
                self._events.emit("upload_refused", str(refused), provider=node_id)
            # The checkpoint will never be whole, and whoever waits for it is to know why.
            self._swarm.dismiss(node_id, refused)
            raise refused from None
        except RunError as error:
            self.fail(error)
            raise
        if info is not None:
            self._last_info = info
            with self._failing():
                self._events.emit(
                    "checkpoint", f"{info.folder.name} is complete", updates=info.updates, samples=info.samples
                )
            self._changes.notify()

    # Deploying.

    async def _deploy_stages(self, prepared: Prepared, plan: RunPlan, members: list[Member], threads: int) -> None:
        self._swarm.generation += 1
        self._generation = self._swarm.generation
        by_id = {member.node_id: member for member in members}
        reaches = await self._while_well(self._swarm.reaches(members))
        orders = await Orders.make(prepared, plan, by_id, reaches, self._deployment, self._generation)
        self._swarm.artifacts = orders.artifacts
        self._swarm.allow_relays({link.name: frozenset((link.before, link.after)) for link in orders.links})
        for link in orders.links:
            self._events.emit("linked", f"{link.before} to {link.after}: {link.reason}", link=link.name)
        chooses_itself = {member.node_id for member in members if member.threads}
        for node_id, order in orders.by_node.items():
            if node_id not in chooses_itself:
                await self._swarm.tell(node_id, CoordinatorMessage(threads=Threads(threads=threads)))
            await self._swarm.tell(node_id, CoordinatorMessage(deploy=order))
        await self._until(lambda: self._ready >= set(self._stage_of))
        self._swarm.artifacts = {}
        # Only now: a stage dials its neighbours, which must be there by then.
        for node_id in orders.by_node:
            await self._swarm.tell(node_id, CoordinatorMessage(start=Start(deployment=self._deployment)))
        self._events.emit("deployed", f"{len(plan.stages)} stages are ready")

    def _fetched(self, node_id: str, share: float) -> None:
        """How much of its stage a provider has. Nothing is shown of stages that are there in no time."""
        if self.progress.fetching or share < 1:
            before = self.progress.fetching or {node: float(node in self._ready) for node in self._stage_of}
            self.progress.fetching = before | {node_id: share}

    # Items.

    async def _take_batch(self, item: TrainBatch) -> None:
        await self._until(lambda: self._ledger.outstanding < self._limit + self._ahead and self._evaluation is None)
        self.progress.run_clock()
        self.progress.epoch = item.after.epoch
        self._ledger.feed(Entry(item.microbatch, item.samples, item.after, item.completes_update))
        self._recorder.fed(item.microbatch, item.after)
        sending = self._send(
            item.tensors, item.microbatch, item.samples, checkpoint=self._announced(item), flush=item.flush
        )
        # Shielded: an interrupt between two stages would leave a microbatch that can never be completed.
        await asyncio.shield(asyncio.create_task(sending))

    def _announced(self, item: TrainBatch) -> int:
        """The number of the checkpoint to be taken with this microbatch, or 0."""
        assert self._saver is not None
        why = self._saver.due(item.after.updates) if item.completes_update else None
        if why is None:
            return 0
        number = item.microbatch + 1
        self._saver.begin(Mark(number, item.after, self._ledger.counts()))
        self._events.emit("checkpoint_begun", why, microbatch=item.microbatch)
        return number

    async def _take_evaluation(self, item: EvalBatch) -> None:
        if self._evaluation is None:
            await self._until(lambda: self._ledger.outstanding == 0)
            self.progress.pause_clock()
            self._evaluation = Evaluation()
            self.phase("evaluating")
        evaluation = self._evaluation
        await self._until(lambda: evaluation.outstanding < 2 * self._limit + self._ahead)
        evaluation.sent(item.microbatch, item.samples)
        await self._send(item.tensors, item.microbatch, item.samples, train=False)

    async def _end_evaluation(self) -> None:
        evaluation = self._evaluation
        if evaluation is None:
            self._events.emit("evaluated", "eval_data is empty: there is nothing to evaluate on")
            self._display.message("eval_data is empty: nothing was evaluated")
            return
        await self._until(lambda: evaluation.outstanding == 0)
        self._evaluation = None
        means = evaluation.means()
        self._recorder.evaluated(means)
        self._events.emit("evaluated", f"on {evaluation.samples} samples", **means)
        self.phase("training")

    def _end_epoch(self, item: EpochEnd) -> None:
        self.progress.epoch_batches = item.batches
        if item.samples is not None:
            self.progress.epoch_samples = item.samples
        self._ledger.end_epoch(item.after)
        self._events.emit("epoch", f"epoch {item.after.epoch} has been fed", samples=item.after.samples)

    async def _send(
        self,
        tensors: Mapping[str, Any],
        microbatch: int,
        samples: int,
        *,
        train: bool = True,
        checkpoint: int = 0,
        flush: bool = False,
    ) -> None:
        for node_id, names in self._inputs_of:
            frame = Frame(
                kind=FrameKind.FEED,
                microbatch=microbatch,
                train=train,
                samples=samples,
                checkpoint=checkpoint,
                generation=self._generation,
                flush=flush,
                tensors={name: tensors[name] for name in names},
                scalars={},
            )
            try:
                await self._swarm.feed_frame(node_id, frame)
            except PeerError as error:
                # Why it is gone is told in a moment, and says more.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOST_NEIGHBOUR_SECONDS):
                        await self._until(lambda: False)
                raise TrainingError(f"{node_id} cannot be fed: {error}") from None

    # Saving and reporting.

    async def _save_now(self) -> CheckpointInfo:
        saver = self._saver
        assert saver is not None
        await self._until(lambda: not saver.under_way)
        number = self._ledger.completed + 1
        saver.begin(Mark(number, self._ledger.applied, self._ledger.counts()))
        for node_id in self._stage_of:
            order = Save(deployment=self._deployment, checkpoint=number)
            await self._swarm.tell(node_id, CoordinatorMessage(save=order))
        # A stage reports before it says that it has saved: after this, the summary has its last counts.
        await self._until(lambda: all(self._saved.get(node) == number for node in self._stage_of))
        assert self._last_info is not None
        return self._last_info

    def _take_failure(self, node_id: str, failed: Failed) -> None:
        message, kind = printable(failed.message), printable(failed.kind)
        with self._failing():
            self._events.emit("stage_failed", message, provider=node_id, failure=kind, microbatch=failed.microbatch)
        if kind == "not_finite":
            self.fail(TrainingError(f"{message}; {self._what_now()}"))
            return
        error = TrainingError(f"{node_id} failed: {message}; {self._what_now()}")
        # A stage that lost its neighbour says so before the neighbour's own end is noticed, which is the better reason.
        seconds = _LOST_NEIGHBOUR_SECONDS if failed.kind == "link" else 0.0
        self._spawn(self._after(seconds, lambda: self.fail(error)))

    def _what_now(self) -> str:
        if self._last_info is None and not self._resumed:
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
                    if self._swarm.state is not None and self._stage_of:
                        await asyncio.to_thread(self._swarm.state.reached, self._position())
                except RunError as error:
                    self.fail(error)

    def _position(self) -> Position:
        ledger = self._ledger
        return Position(ledger.fed, ledger.completed, ledger.updates, ledger.samples, time.time())

    # Waiting.

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Waits for the condition; raises the failure that makes it hopeless."""
        await self._changes.until(lambda: self._failure is not None or condition())
        if self._failure is not None:
            raise self._failure

    async def _while_well(self, work: Any) -> Any:
        """The result of `work`, unless the run fails first."""
        task = asyncio.ensure_future(work)
        failed = asyncio.ensure_future(self._until(lambda: False))
        try:
            await asyncio.wait([task, failed], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else failed.result()
        finally:
            task.cancel()
            failed.cancel()
            await asyncio.gather(task, failed, return_exceptions=True)

    async def _after(self, seconds: float, action: Callable[[], None]) -> None:
        await asyncio.sleep(seconds)
        action()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """What the disk refuses while a provider is heard ends the run, not the provider's stream."""
        try:
            yield
        except RunError as error:
            self.fail(error)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
from dataclasses import replace
from typing import Any

from ravnest.amounts import counted
from ravnest.averaging.deadlines import Deadlines
from ravnest.coordinator.checkpoints import CheckpointInfo, CheckpointStore
from ravnest.coordinator.clusters import ClusterRun, Clusters
from ravnest.coordinator.clusters import Mark as RoundMark
from ravnest.coordinator.deploying import Orders
from ravnest.coordinator.evaluation import Evaluation
from ravnest.coordinator.feeder import EpochEnd, EvalBatch, EvalEnd, Item, TrainBatch
from ravnest.coordinator.gathering import gather
from ravnest.coordinator.ledger import Entry
from ravnest.coordinator.measures import describe, figures
from ravnest.coordinator.members import Member
from ravnest.coordinator.planning import Machine, RunPlan, check_fit, goal_of, plan_measured
from ravnest.coordinator.prepare import Prepared
from ravnest.coordinator.progress import Progress
from ravnest.coordinator.recording import Recorder
from ravnest.coordinator.rounds import Rounds
from ravnest.coordinator.saving import Mark, Saver, saver_of
from ravnest.coordinator.stage_parts import BadPartError
from ravnest.coordinator.state import Position
from ravnest.coordinator.swarm import Swarm
from ravnest.coordinator.waiting import Changes
from ravnest.errors import PeerError, RavnestError, RefusedError, RunError, TrainingError, printable
from ravnest.job import Job
from ravnest.monitor.display import Display
from ravnest.monitor.events import EventLog
from ravnest.monitor.metrics import MetricLog
from ravnest.monitor.run_directory import RunDirectory
from ravnest.monitor.summary import Fault
from ravnest.net.frames import Frame, FrameKind
from ravnest.net.v1.control_pb2 import Average, CoordinatorMessage, Failed, ProviderMessage, Save, Start, Threads
from ravnest.settings import Averaging

_BETTER_REASON_SECONDS = 0.2
_LOST_NEIGHBOUR_SECONDS = 1.0
_AVERAGE_TRIES = 3
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
        self._reported: dict[str, float] = {}
        self._saved: dict[str, int] = {}
        self._lost: set[str] = set()
        self._deployed = False
        self._resumed = progress.ledger.updates > 0
        self._stage_of: dict[str, int] = {}
        """Of every provider that holds one in a cluster that trains, its number there."""
        self._scores: set[str] = set()
        """What an evaluation measures."""
        self._clusters = Clusters(())
        self._rounds: Rounds | None = None
        self._averaging = Averaging()
        self._average_every = 0
        self._replaying = 0
        self._checkpoint_due = False
        self._fed_place = progress.ledger.applied
        """Where the run stands once all that was fed has been applied."""
        self._fed_samples = 0
        self._announced_at = 0
        """Samples fed by the last round, and by the last one for all rings."""
        self._averaged_at = 0
        self._make_saver: Callable[[ClusterRun], Saver] | None = None
        self._saver: Saver | None = None
        self._saving: ClusterRun | None = None
        """The cluster whose stages are saved: after a round all have the same parameters."""
        self._evaluation: Evaluation | None = None
        self._last_info: CheckpointInfo | None = None
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

    async def deploy(
        self, prepared: Prepared, providers: int | None, clusters: int | None, threads: int, cores: int
    ) -> RunPlan:
        """Waits for the providers, plans, and returns when every stage is built and linked.

        Without a number of providers, it waits for as many as have the memory for the model together; without one of
        clusters, there are as many as are fastest.
        """
        job, machine = prepared.job, Machine(cores, threads)
        self.phase("waiting for providers")
        gathering = gather(
            self._swarm.members, providers, lambda present: check_fit(prepared, present, machine, clusters), self._display.message
        )
        members, why = await self._while_well(gathering)
        self._events.emit("gathered", f"{len(members)} providers: {why}")
        self.phase("planning")
        planning = plan_measured(
            self._swarm, prepared, members, goal_of(job, providers, clusters), machine, self.phase
        )
        plan: RunPlan = await self._while_well(planning)
        self._tell_plan(plan)
        taking_part = {stage.node for stage in plan.stages}
        members = [member for member in members if member.node_id in taking_part]
        if self._swarm.state is not None:
            await asyncio.to_thread(self._swarm.state.planned, [s.node for s in plan.stages])
            await asyncio.to_thread(self._swarm.state.reached, self._position())
        self.progress.devices = {m.node_id: m.device for m in members}
        self._clusters = Clusters(plan.clusters)
        self._stage_of = {s.node: s.stage for s in plan.stages}
        self._scores = {"loss", *job.metrics}
        self._averaging, self._average_every = job.averaging, plan.average_every
        if plan.rings:
            self._rounds = self._rounds_of(plan, job)
        if job.pipeline.record_updates:
            self._recorder.record_updates(self._run.updates_path)
        store = CheckpointStore(self._run.checkpoints_path, job.checkpoint.keep)
        self._make_saver = lambda cluster: saver_of(store, prepared, cluster.plan, self._ledger.updates)
        self._save_from(self._clusters.all[0])
        self.phase("deploying stages")
        await self._deploy_stages(prepared, plan, members, threads)
        self.progress.plan = plan
        self.progress.clusters, self.progress.rounds = self._clusters, self._rounds
        self._deployed = True
        self.phase("training")
        return plan

    def _tell_plan(self, plan: RunPlan) -> None:
        self._events.emit(
            "planned",
            plan.reason,
            predicted_samples_per_second=plan.predicted_samples_per_second,
            stages=[
                {"cluster": s.cluster, "provider": s.node, "role": s.role, "parameters": s.parameters}
                for s in plan.stages
            ],
            places=[cluster.places for cluster in plan.clusters],
            in_flight=[cluster.in_flight for cluster in plan.clusters],
            standbys=plan.plan.standbys,
        )
        for cluster in plan.clusters:
            self._events.emit("in_flight", cluster.flight_reason, cluster=cluster.id, limit=cluster.in_flight)
        if plan.rings:
            self._events.emit("rings", plan.average_reason, rings=len(plan.rings), samples=plan.average_every)
        self._display.message(f"plan: {plan.reason}")

    def _rounds_of(self, plan: RunPlan, job: Job) -> Rounds:
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
            lambda node_id, message: self._spawn(self._tell_quietly(node_id, message)),
            self._emit_quietly,
            self._changes.notify,
        )

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
        since = time.monotonic()
        await self._average_now("at the end")
        self.phase("saving")
        info = await self._save_now()
        if len(self._clusters.whole) > 1:
            # Those that are not saved have something to report, too: the last of what they did.
            await self._until(lambda: all(self._reported.get(node, 0.0) > since for node in self._stage_of))
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
        self._closing = True
        self._swarm.events = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._saver is not None:
            self._saver.abort()
        if self._rounds is not None:
            self._rounds.close()
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
                cluster = self._clusters.of(node_id)
                self._recorder.take(node_id, cluster.id if cluster else 0, self._stage_of[node_id], message.report)
            self._reported[node_id] = time.monotonic()
            self._changes.notify()
            if self._rounds is not None:
                self._rounds.reported(node_id, message.report)
        elif self._rounds is not None and self._rounds.heard(node_id, message):
            pass
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
                self._completed(node_id, frame.microbatch)
            self.progress.completed()
            self._changes.notify()
        elif frame.kind is FrameKind.RESULT and self._evaluation is not None:
            if frame.scalars.keys() != self._scores:
                raise RefusedError(f"{node_id} sent a result of other measures than {sorted(self._scores)}")
            cluster = self._clusters.of(node_id)
            if cluster is None or cluster.evaluating.pop(frame.microbatch, None) is None:
                # Of a cluster that was lost in the middle of it: others evaluate it again.
                return
            self._evaluation.came(frame.microbatch, {k: float(v) for k, v in frame.scalars.items()})
            self._changes.notify()

    def _completed(self, node_id: str, microbatch: int) -> None:
        cluster = self._clusters.of(node_id)
        if cluster is None:
            return
        if cluster.open.pop(microbatch, None) is None:
            self._ledger.applied_twice += 1
            reason = f"{node_id} reported microbatch {microbatch} done, which was not under way"
            self._events.emit("applied_twice", reason, microbatch=microbatch)
            raise RefusedError(reason)
        entry = self._ledger.complete(microbatch)
        assert entry is not None, "what a cluster has under way is in the ledger"
        cluster.samples += entry.samples

    def disconnected(self, node_id: str, reason: str) -> None:
        with self._failing():
            self._events.emit("disconnected", reason, provider=node_id)
        if self._rounds is not None:
            # It may be back soon; whoever averages does not wait for it.
            self._rounds.gone(node_id, f"{node_id} is disconnected: {reason}")

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
        cluster = self._clusters.of(node_id)
        if stage is not None:
            number = cluster.id if cluster is not None else 0
            self.progress.faults.append(Fault(kind="provider_lost", provider=node_id, cluster=number, at=time.time()))
        if cluster is not None and self._deployed and len(self._clusters.whole) > 1:
            self._lose_cluster(cluster, f"{node_id}, which held stage {stage}, is gone: {reason}")
        elif stage is not None or not (self._deployed or self._swarm.open_to_more):
            held = "" if stage is None else f", which held stage {stage},"
            saved = f"; {self._what_now()}" if self._deployed else ""
            self.fail(TrainingError(f"{node_id}{held} is gone: {reason}{saved}"))

    def _lose_cluster(self, cluster: ClusterRun, reason: str) -> None:
        """The others go on without this one, with what it had not completed."""
        behind = cluster.samples - (self._rounds.counted_samples(cluster.nodes) if self._rounds is not None else 0)
        left, evaluations = self._clusters.lose(cluster, reason)
        self._ledger.replay([item.microbatch for item in left])
        for node in cluster.nodes:
            self._stage_of.pop(node, None)
            if self._rounds is not None:
                self._rounds.gone(node, reason)
        what = (
            f"cluster {cluster.id} has ended: {reason}; {len(self._clusters.whole)} go on, with "
            f"{counted(len(left), 'microbatch', 'microbatches')} of it, and without what it learnt from the last "
            f"{behind} samples, which had not been averaged"
        )
        with self._failing():
            self._events.emit("cluster_lost", what, cluster=cluster.id, replayed=len(left), samples=behind)
        self._display.message(what)
        if self._saving is cluster:
            self._save_from(self._clusters.whole[0])
        if left or evaluations:
            self._spawn(self._replay(left, evaluations))
        self._changes.notify()

    async def _replay(self, left: list[TrainBatch], evaluations: list[EvalBatch]) -> None:
        """Feeds what a lost cluster had not completed to the others."""
        self._replaying += 1
        try:
            for item in evaluations:
                await self._send_evaluation(item)
            for number, item in enumerate(left):
                ends = item.completes_update or number == len(left) - 1
                await self._send_batch(replace(item, flush=item.flush or ends), ends, None)
        except RavnestError as error:
            self.fail(error)
        finally:
            self._replaying -= 1

    async def uploaded(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        number = name.removeprefix("checkpoint-")
        saves = self._saving is not None and node_id in self._saving.nodes
        if self._saver is None or not saves or not re.fullmatch("[0-9]{1,19}", number):
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
        links = (*orders.links, *orders.ring_links)
        self._swarm.allow_relays({link.name: frozenset((link.before, link.after)) for link in links})
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
        several = f" in {len(plan.clusters)} clusters" if len(plan.clusters) > 1 else ""
        self._events.emit("deployed", f"{len(plan.stages)} stages{several} are ready")

    def _fetched(self, node_id: str, share: float) -> None:
        """How much of its stage a provider has. Nothing is shown of stages that are there in no time."""
        if self.progress.fetching or share < 1:
            before = self.progress.fetching or {node: float(node in self._ready) for node in self._stage_of}
            self.progress.fetching = before | {node_id: share}

    # Items.

    async def _take_batch(self, item: TrainBatch) -> None:
        if self._clusters.group is None and self._rounds is not None:
            await self._announce_round(item)
        await self._until(lambda: self._evaluation is None)
        entry = Entry(item.microbatch, item.samples, item.after, item.completes_update)
        await self._send_batch(item, item.completes_update, entry)

    async def _send_batch(self, item: TrainBatch, ends: bool, entry: Entry | None) -> None:
        """Feeds a microbatch to the cluster with most room, once one has some. With `ends` it completes an update
        there; without an `entry` it has been fed before, to a cluster that is lost."""
        clusters = self._clusters
        await self._until(lambda: clusters.for_batch() is not None)
        cluster = clusters.for_batch()
        assert cluster is not None
        self.progress.run_clock()
        if entry is not None:
            self.progress.epoch = item.after.epoch
            self._ledger.feed(entry)
            self._recorder.fed(item.microbatch, item.after)
            self._fed_samples += item.samples
            self._fed_place = item.after
        mark, checkpoint = None, 0
        if clusters.group is None:
            mark, cluster.mark = cluster.mark, None
        if len(clusters.whole) == 1 and not self._replaying:
            checkpoint = self._announced(item)
        clusters.group = None if ends else cluster
        cluster.open[item.microbatch] = item
        cluster.fed_samples += item.samples
        sending = self._send(
            cluster,
            item.tensors,
            item.microbatch,
            item.samples,
            checkpoint=checkpoint,
            # What belongs to an update may be fewer here than elsewhere, after a cluster was lost.
            flush=item.flush or (ends and self._rounds is not None),
            mark=mark,
            updates=item.after.updates,
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
            await self._average_now("before an evaluation")
            self._evaluation = Evaluation()
            self.phase("evaluating")
        self._evaluation.sent(item.microbatch, item.samples)
        await self._send_evaluation(item)

    async def _send_evaluation(self, item: EvalBatch) -> None:
        await self._until(lambda: self._clusters.for_evaluation() is not None)
        cluster = self._clusters.for_evaluation()
        assert cluster is not None
        cluster.evaluating[item.microbatch] = item
        await self._send(cluster, item.tensors, item.microbatch, item.samples, train=False)

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
        self._fed_place = item.after
        self._events.emit("epoch", f"epoch {item.after.epoch} has been fed", samples=item.after.samples)

    async def _send(
        self,
        cluster: ClusterRun,
        tensors: Mapping[str, Any],
        microbatch: int,
        samples: int,
        *,
        train: bool = True,
        checkpoint: int = 0,
        flush: bool = False,
        mark: RoundMark | None = None,
        updates: int = 0,
    ) -> None:
        for node_id, names in cluster.inputs_of:
            frame = Frame(
                kind=FrameKind.FEED,
                microbatch=microbatch,
                train=train,
                samples=samples,
                checkpoint=checkpoint,
                generation=self._generation,
                flush=flush,
                round=mark.round if mark is not None else 0,
                fragment=mark.fragment if mark is not None else 0,
                updates=updates,
                tensors={name: tensors[name] for name in names},
                scalars={},
            )
            try:
                await self._swarm.feed_frame(node_id, frame)
            except PeerError as error:
                # Why it is gone is told in a moment, and says more.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOST_NEIGHBOUR_SECONDS):
                        await self._until(lambda: bool(cluster.lost))
                        # Others are fed with what this one has not completed.
                        return
                raise TrainingError(f"{node_id} cannot be fed: {error}") from None

    # Averaging.

    async def _announce_round(self, item: TrainBatch) -> None:
        """Begins a round with this microbatch, where one is due: what was fed before goes into it, the rest does not."""
        rounds, saver = self._rounds, self._saver
        assert rounds is not None and saver is not None
        if rounds.under_way or saver.under_way or self._checkpoint_due or len(self._clusters.whole) < 2:
            return
        since = self._fed_samples - self._announced_at
        checkpoint = saver.due(self._fed_place.updates) if not self._replaying else None
        if since < self._average_every and checkpoint is None:
            return
        reason = checkpoint or f"{since} samples since the last one"
        if self._averaging.blocking:
            await self._average_now(reason)
            if checkpoint is not None:
                await self._save_now()
            return
        number = rounds.begun + 1
        fragments = rounds.fragments
        fragment = 0 if checkpoint is not None or fragments == 1 else (number - 1) % fragments + 1
        self._begin_round(fragment, reason)
        for cluster in self._clusters.whole:
            cluster.mark = RoundMark(number, fragment)
        if checkpoint is not None:
            self._checkpoint_due = True
            mark = Mark(item.microbatch, self._fed_place, self._ledger.counts())
            self._spawn(self._save_averaged(saver, mark, checkpoint))

    def _begin_round(self, fragment: int, reason: str) -> int:
        assert self._rounds is not None
        self._announced_at = self._fed_samples
        owners = {node: cluster.fed_samples for cluster in self._clusters.whole for node in cluster.nodes}
        return self._rounds.announce(fragment, owners, reason)

    async def _average_now(self, reason: str) -> None:
        """Averages all that was learnt, in all rings, while nothing is in flight: afterwards all clusters are alike."""
        rounds = self._rounds
        if rounds is None:
            return
        phase = self.progress.phase
        for _ in range(_AVERAGE_TRIES):
            await self._until(lambda: self._ledger.outstanding == 0)
            if rounds.under_way:
                await self._order_rounds()
                await self._until(lambda: not rounds.under_way)
            if len(self._clusters.whole) < 2 or self._averaged_at == self._fed_samples:
                return
            self.phase("averaging")
            number = self._begin_round(0, reason)
            for cluster in self._clusters.whole:
                cluster.mark = RoundMark(number, 0)
            await self._order_rounds()
            await self._until(lambda: not rounds.under_way)
            self.phase(phase)
            if rounds.complete:
                self._averaged_at = self._fed_samples
                return
        self._display.message(f"the clusters could not be averaged {reason}: {rounds.last}")

    async def _order_rounds(self) -> None:
        """Tells clusters of the round under way that have not heard of it with a microbatch; none is in flight there."""
        for cluster in self._clusters.whole:
            mark, cluster.mark = cluster.mark, None
            if mark is None:
                continue
            for node_id in cluster.nodes:
                order = Average(deployment=self._deployment, round=mark.round, fragment=mark.fragment)
                await self._tell_quietly(node_id, CoordinatorMessage(average=order))

    async def _save_averaged(self, saver: Saver, mark: Mark, why: str) -> None:
        """Once the round under way counts, saves what all clusters have since: the prefix of the data up to the mark."""
        rounds = self._rounds
        assert rounds is not None
        try:
            await self._changes.until(lambda: not rounds.under_way or self._failure is not None)
            if not rounds.complete or self._saver is not saver or self._failure is not None:
                return
            saver.begin(mark)
            self._events.emit("checkpoint_begun", why, microbatch=mark.checkpoint)
            await self._order_save(mark.checkpoint, anchored=True)
        except RunError as error:
            self.fail(error)
        finally:
            self._checkpoint_due = False
            self._changes.notify()

    async def _tell_quietly(self, node_id: str, message: CoordinatorMessage) -> None:
        """Says something to a provider; that it is gone is heard elsewhere."""
        with contextlib.suppress(PeerError, KeyError):
            await self._swarm.tell(node_id, message)

    def _emit_quietly(self, kind: str, reason: str, **values: Any) -> None:
        with self._failing():
            self._events.emit(kind, reason, **values)

    # Saving and reporting.

    def _save_from(self, cluster: ClusterRun) -> None:
        """From now on checkpoints are made of this cluster's stages."""
        assert self._make_saver is not None
        if self._saver is not None:
            self._saver.abort()
        self._saving, self._saver = cluster, self._make_saver(cluster)

    async def _save_now(self) -> CheckpointInfo:
        """Nothing is in flight: saves where the run stands."""
        saver = self._saver
        assert saver is not None
        await self._until(lambda: not saver.under_way and not self._checkpoint_due)
        number = self._ledger.completed + 1
        saver.begin(Mark(number, self._ledger.applied, self._ledger.counts()))
        await self._order_save(number, anchored=False)
        # A stage reports before it says that it has saved: after this, the summary has its last counts.
        await self._until(lambda: self._saver is not saver or self._all_saved(number))
        if self._saver is not saver:
            # The cluster that was being saved is lost, and another has what it had.
            return await self._save_now()
        assert self._last_info is not None
        return self._last_info

    async def _order_save(self, number: int, anchored: bool) -> None:
        assert self._saving is not None
        for node_id in self._saving.nodes:
            order = Save(deployment=self._deployment, checkpoint=number, anchored=anchored)
            await self._tell_quietly(node_id, CoordinatorMessage(save=order))

    def _all_saved(self, number: int) -> bool:
        return self._saving is not None and all(self._saved.get(node) == number for node in self._saving.nodes)

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

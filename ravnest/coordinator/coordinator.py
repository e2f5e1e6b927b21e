"""The coordinator: one run of one job, from the first provider to the last checkpoint.

It lives on the network's loop; the thread that owns the requester's Python hands it items one by one (`take`) and is
held back there while the swarm has enough. What happens on failure: a stage whose provider vanishes, or that fails, is
taken by another, or the run is formed anew (deploy/recovery.py, deploy/form_run.py); a loss that is not finite, a disk
that is full or a swarm that nobody can join and that cannot hold the model any more is one error that every wait raises
from then on; checkpoints already written stay.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ravnest.coordinator.checkpoints.store import CheckpointInfo, CheckpointStore
from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.deploy.form_run import Forming, RequestedSize, position_of
from ravnest.coordinator.deploy.membership_changes import MembershipChanges
from ravnest.coordinator.deploy.recovery import Recovery
from ravnest.coordinator.deploy.replace_slow import SlowStageReplacement
from ravnest.coordinator.deploy.stage_failures import StageFailures
from ravnest.coordinator.deploy.standbys import Standbys
from ravnest.coordinator.deploy.state_sources import StateSources
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.feed.feeder import Item
from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.health.checkpoint_watch import CheckpointWatch
from ravnest.coordinator.health.lease import Replacement
from ravnest.coordinator.health.slow_links import SlowLinks
from ravnest.coordinator.health.standstill import RunNow
from ravnest.coordinator.health.standstill_watch import StandstillWatch, cluster_now
from ravnest.coordinator.health.watchdog import Watchdog
from ravnest.coordinator.intake import Intake
from ravnest.coordinator.plan.observed_limits import ObservedLimits
from ravnest.coordinator.plan.prepared_job import PreparedJob
from ravnest.coordinator.plan.provider_profiles import Machine
from ravnest.coordinator.replicas.surviving import AnnouncedReplica
from ravnest.coordinator.report.progress import Progress
from ravnest.coordinator.report.recorder import Recorder
from ravnest.coordinator.report.trace_collector import Tracing
from ravnest.coordinator.run.context import Course
from ravnest.coordinator.run.surroundings import Surroundings
from ravnest.coordinator.run.timeouts import DEFAULT_TIMEOUTS, Timeouts
from ravnest.coordinator.swarm.link_measurements import describe, figures
from ravnest.coordinator.swarm.members import Member
from ravnest.coordinator.swarm.provider_record import ProviderRecords
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.coordinator.verification.reported_scores import ReportedScores
from ravnest.errors import DiskFullError, RavnestError, RefusedError, TrainingError, printable
from ravnest.monitor.display import Display
from ravnest.monitor.events import EventLog
from ravnest.monitor.metrics import MetricLog
from ravnest.monitor.run_directory import RunDirectory
from ravnest.monitor.summary import Fault
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.v1.control_pb2 import ProviderMessage
from ravnest.planner.plan import Plan
from ravnest.planner.problem import Provider
from ravnest.units import counted

_MEMORY_TO_SPARE = 1.2
"""So much more than the stages take together, others must have for the model to be cut anew: they cut it elsewhere."""
_DISPLAY_SECONDS = 0.25
_SUMMARY_SECONDS = 2.0

_Result = TypeVar("_Result")


class DataRewindError(Exception):
    """The run goes on from a place that the data had passed: it is to be walked again from there."""

    def __init__(self, place: DataPosition) -> None:
        super().__init__(f"back to {place.updates} updates")
        self.place = place


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
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        self.progress = progress
        self._swarm = swarm
        self._run = run
        self._recorder = Recorder(progress, metrics)
        self._display = display
        self._ledger = progress.ledger
        self._course = Course(swarm, events, timeouts)
        self._least = 1
        self._resumed = progress.ledger.updates > 0
        self._formation: Deployment | None = None
        self._forming: Forming | None = None
        self._recovery: Recovery | None = None
        self._standing_by: Standbys | None = None
        self._changing: MembershipChanges | None = None
        self._watch: Watchdog | None = None
        self._slow_links = SlowLinks(self._course.emit)
        self._slow_stages: SlowStageReplacement | None = None
        self._save_watch: CheckpointWatch | None = None
        self._believed = ObservedLimits()
        self._stage_failures: StageFailures | None = None
        self._items = Intake(
            self._course, lambda: self._now, progress, self._recorder, display, self.phase, self._reported_at
        )
        self._standstill = StandstillWatch(self._run_now, self._course.emit, display.message)
        self._taking: asyncio.Task[None] | None = None
        """What the requester's thread waits for; None while it is busy elsewhere."""
        self._taken_at = 0.0
        """Since when it is busy elsewhere: with the data loader, say."""
        self._formed_at = 0.0
        """When its stages were given out."""
        self._has_all = False
        """Whether the requester's thread wants nothing more of the swarm."""
        self._forming_anew = asyncio.Lock()
        self._place: DataPosition | None = None
        """Where the data is to be walked from again."""

    @property
    def on_failure(self) -> Callable[[], None]:
        """Called when training cannot go on, for whoever is busy elsewhere and not waiting here."""
        return self._course.on_failure

    @on_failure.setter
    def on_failure(self, call: Callable[[], None]) -> None:
        self._course.on_failure = call

    @property
    def deployment(self) -> Deployment | None:
        """The current deployment; None before the first."""
        return self._formation

    async def start(self, least: int = 1) -> None:
        """Begins to listen to the swarm and to show the run. Before it is deployed, so many providers must be there, or
        still be able to come."""
        self._least = least
        self._swarm.members.begin_run()
        self._swarm.events = self
        for member in self._swarm.members.connected():
            self.joined(member)
        self._course.spawn(self._show())

    async def deploy(
        self, prepared: PreparedJob, providers: int | None, clusters: int | None, threads: int, cores: int
    ) -> Plan:
        """Waits for the providers, plans, and returns when every stage is built and linked.

        Without a number of providers, it waits for as many as have the memory for the model together; without one of
        clusters, there are as many as are fastest.
        """
        self._items.scores = {"loss", *prepared.job.metrics}
        if prepared.job.pipeline.record_updates:
            self._recorder.record_updates(self._run.updates_path)
        around = Surroundings(
            self._course,
            self._swarm,
            self._ledger,
            self._recorder,
            self.progress,
            self._display.message,
            threads,
            lacking=lambda cluster: self._recovery.lacking(cluster) if self._recovery is not None else [],
            placed=self._note_replica,
            overdue=self.lost,
        )
        machine = Machine(cores, threads)
        store = CheckpointStore(self._run.checkpoints_path, prepared.job.checkpoint.keep)
        self._forming = Forming(
            around,
            store,
            machine,
            RequestedSize(providers, clusters),
            prepared,
            self.phase,
            self._display,
            self._believed,
            lambda formation: self._recovery.release(formation) if self._recovery is not None else None,
            lambda cluster, stages: self._recovery.lost_before(cluster, stages) if self._recovery is not None else None,
        )
        leaving = self._forming.leaving
        self._standing_by = Standbys(around, machine, lambda: self._formation, leaving, self._came, self._believed)
        self._recovery = Recovery(
            self._course,
            self._swarm,
            self.progress,
            lambda: self._now,
            self._ready_to_take,
            self._standing_by.warm_for,
            lambda formation, why, plan: self._form_anew(formation, why, decided=plan),
            self._forming.replacement,
            self._lose,
            self._standing_by.look,
            StateSources(around, store, prepared).state_for,
        )
        self._stage_failures = StageFailures(
            self._course,
            self._swarm,
            self._ledger,
            lambda: self._now,
            self._recovery,
            self._believed,
            self._forming.set_aside,
            self._what_now,
            self.lost,
            self._forming.take_back,
        )
        self._changing = MembershipChanges(
            self._course,
            lambda: self._formation,
            self._recovery,
            self._form_at_rest,
            self._forming.replacement,
            leaving,
            may_grow=providers is None,
            present=lambda: [member.node_id for member in self._swarm.members.connected()],
            waits=lambda: self._forming is not None and self._forming.waits,
            line_rate=self._swarm.members.line_rate,
        )
        self._watch = Watchdog(
            self._swarm,
            blocks=self._blocks,
            replacement=self._replacement,
            emit=self._course.emit,
            on_lost=lambda node_id, why, seconds: self.lost(node_id, why, time.monotonic() - seconds),
            clusters=self._busy,
        )
        self._slow_stages = SlowStageReplacement(self._ready_to_take, self._believed, self._watch.give_up)
        self._save_watch = CheckpointWatch(
            self._swarm.members,
            lambda: None if self._formation is None else self._formation.checkpointing.awaited,
            self._replacement,
            self._watch.give_up,
            lambda: self._standstill.patience_seconds,
        )
        self._course.spawn(self._watch.run())
        self._formation = await self._forming.first(self._take_formation)
        self._standing_by.look()
        self.phase("training")
        return self._formation.plan

    async def take(self, item: Item) -> None:
        """Takes the next item of the data, once there is room for it; raises what made training impossible, or
        RewoundError where the data is to be walked again."""
        await self._until_rewound(self._items.take(item))

    async def check(self) -> None:
        """Raises what made training impossible, if anything did."""
        await self._course.until(lambda: True)

    async def attest(
        self,
        batches: Sequence[Mapping[str, torch.Tensor]],
        shorten: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] | None,
    ) -> None:
        """Waits for what is in flight, and has the swarm evaluate a little of what is about to be saved, where it has
        not; see `Intake.attest`. RewoundError, as `take`."""
        await self._until_rewound(self._items.attest(batches, shorten))

    def witnessed(self) -> tuple[list[ReportedScores], str]:
        """What the swarm reported of the model that was saved last, and on what. Once `finish` is over."""
        witness, formation = self._items.witness, self._now
        found = witness.current
        if formation.averaging is not None and not formation.averaging.is_averaged:
            # Another cluster's model is another one.
            found = [each for each in found if each.provider in formation.checkpointing.nodes]
        return found, witness.source

    async def finish(self) -> CheckpointInfo:
        """Waits for what is in flight, makes all clusters alike, and saves the final state. RewoundError, as `take`."""
        info = await self._until_rewound(self._items.finish())
        self._has_all = True
        self._standstill.moved()
        return info

    async def stop_early(self, timeout_seconds: float) -> CheckpointInfo | None:
        """Saves if what is in flight can be finished in time, otherwise the last checkpoint of this run stands."""
        if self._formation is not None:
            self.phase("stopping")
            with contextlib.suppress(TimeoutError, RavnestError, DataRewindError):
                async with asyncio.timeout(timeout_seconds):
                    return await self.finish()
        return self._last_info

    async def close(self) -> None:
        """Ends everything this run started; the swarm stays for the next one."""
        self._swarm.events = None
        await self._course.close()
        if self._formation is not None:
            self._formation.close()
        self._recorder.close()

    def write_trace(self) -> None:
        """Brings trace.json up to date; RunError when the disk refuses. On any thread."""
        if self._recorder.tracing is not None:
            self._recorder.tracing.write()

    def phase(self, text: str) -> None:
        self._standstill.moved()
        self.progress.phase = text
        self.progress.fetching = {}
        self._display.show(self.progress.snapshot())

    # What providers do.

    def joined(self, member: Member) -> None:
        record = self._records[member.node_id]
        record.is_lost = False
        record.presence.begin(member.session, time.monotonic())
        reliability = self._swarm.members.reliability(member.node_id)
        what = f"{member.node_id} joined with {describe(member)}"
        if reliability.value < 1:
            what = f"{what}; {reliability.reason}"
        self._course.emit("joined", what, provider=member.node_id, **figures(member))
        if self._stage_failures is not None:
            self._stage_failures.joined(member.node_id)
        if self._standing_by is not None and self._formation is not None:
            cluster = self._formation.clusters.of(member.node_id)
            if cluster is not None:
                # Lost and back before another took its stage: it may have it again.
                cluster.returned.add(member.node_id)
            self._formation.replicas.add_parts(member.node_id, member.parts)
            self._standing_by.look()
        self._course.notify()

    def said(self, node_id: str, message: ProviderMessage) -> None:
        kind, formation = message.WhichOneof("body"), self._formation
        if kind == "failed" and message.failed.kind == "part":
            if self._records[node_id].events.take(time.monotonic()):
                self._course.emit("part_missing", printable(message.failed.message), provider=node_id)
            if self._forming is not None:
                self._forming.uploads.on_part_unavailable(node_id, message.failed.deployment)
            return
        if kind == "leave" and self._changing is not None:
            self._changing.wants_to_leave(node_id, printable(message.leave.reason))
        if kind is None or formation is None:
            return
        if kind == "replicated":
            formation.replicas.on_replicated(node_id, message.replicated, formation.clusters.whole)
            return
        if node_id not in formation.stage_of:
            # What a standby knows of the run, it does not know from this coordinator.
            return
        if getattr(getattr(message, kind), "deployment", None) != formation.id:
            return
        if kind == "ready":
            formation.heard_ready(node_id, message.ready)
            self._fetched(node_id, 1.0)
        elif kind == "fetching":
            fetching = message.fetching
            formation.heard_fetching(node_id)
            self._fetched(node_id, min(1.0, fetching.received_bytes / max(1, fetching.total_bytes)))
        elif kind == "report":
            self._take_report(node_id, message)
        elif kind == "strained":
            cluster = formation.clusters.of(node_id)
            if cluster is not None and self._records[node_id].events.take(time.monotonic()):
                formation.flights.strained(cluster, node_id, message.strained)
        elif kind == "saved":
            formation.checkpointing.saved(node_id, message.saved.checkpoint)
            formation.flights.restart()
        elif kind == "traced":
            assert self._stage_failures is not None
            self._stage_failures.traced(node_id, message.traced)
        elif kind == "failed":
            assert self._stage_failures is not None
            self._stage_failures.take(node_id, message.failed)
        elif formation.averaging is not None:
            formation.averaging.rounds.heard(node_id, message)

    def returned(self, node_id: str, frame: Frame) -> None:
        formation = self._formation
        cluster = None if formation is None else formation.clusters.of(node_id)
        if formation is None or cluster is None or frame.generation != cluster.generation:
            # Of a formation before this one, which was given up while this was under way.
            return
        if frame.kind is FrameKind.DONE:
            if self.progress.clock.first_update_seconds is None:
                self._course.emit("first_update", "the first microbatch has passed every stage")
            if formation.feeding.completed(node_id, frame.microbatch):
                self.progress.clock.on_microbatch()
            formation.checkpointing.applied(cluster, frame.microbatch)
            self._standstill.completed()
            self._course.notify()
        elif frame.kind is FrameKind.RESULT:
            self._items.evaluated(cluster, node_id, frame)
            self._standstill.completed()

    def disconnected(self, node_id: str, reason: str) -> None:
        self._records[node_id].presence.note_interruption()
        self._course.emit("disconnected", reason, provider=node_id)
        if self._formation is not None and self._formation.averaging is not None:
            # It may be back soon; whoever averages does not wait for it.
            self._formation.averaging.rounds.gone(node_id, f"{node_id} is disconnected: {reason}")

    def reconnected(self, node_id: str) -> None:
        self._course.emit("reconnected", f"{node_id} is connected again", provider=node_id)

    def turned_away(self, address: str, connections: int, reason: str) -> None:
        self._course.emit("turned_away", reason, address=address, connections=connections)
        self._display.message(reason)

    def vanished(self, node_id: str, reason: str) -> None:
        """A provider's stay in the swarm has ended."""
        if self._records[node_id].is_lost:
            # That is known, and whatever it holds when it is back is another stay's.
            return
        since = time.monotonic()
        self._course.later(self._course.timeouts.vanished_seconds, lambda: self._gone(node_id, reason, since))

    def _gone(self, node_id: str, reason: str, since: float) -> None:
        back = node_id in self._swarm.members and not self._swarm.members[node_id].control.link.over
        self.lost(node_id, reason, since, is_back=back)

    def lost(self, node_id: str, reason: str, last_well: float | None = None, *, is_back: bool = False) -> None:
        """A provider is gone, and why; it was last well at this time of the clock `time.monotonic`. One that `is_back`
        has joined again since, without what it held."""
        record = self._records[node_id]
        if self._course.closing or record.is_lost:
            return
        formation = self._formation
        stage = None if formation is None else formation.stage_of.get(node_id)
        if stage is None and self._swarm.members.is_present(node_id):
            # It has come back in the meantime, and there was nothing to lose.
            return
        record.is_lost = True
        if self._forming is not None and node_id in self._forming.leaving:
            record.presence.note_departure(time.monotonic())
        else:
            record.presence.note_loss(time.monotonic(), is_back=is_back)
        was_let_go = False
        if self._changing is not None and self._forming is not None:
            was_let_go = self._changing.gone(node_id)
            self._forming.take_back(node_id)
        self._course.emit("lost", reason, provider=node_id)
        if is_back:
            self._records[node_id].is_lost = False
        else:
            # What it held is given to others: what it says from now on is of no use. It may come back, and stands by.
            self._swarm.dismiss(node_id, RefusedError(f"{node_id} was taken for lost ({reason}); join again"))
        held = "" if stage is None else f", which held stage {stage},"
        text = f"{node_id}{held} is gone: {reason}"
        if formation is not None and stage is not None and not was_let_go:
            cluster = formation.clusters.of(node_id)
            number = 0 if cluster is None else cluster.id
            self.progress.faults.append(Fault(kind="provider_lost", provider=node_id, cluster=number, at=time.time()))
            self._end_stage(node_id, text, last_well)
            if is_back:
                formation.replicas.add_parts(node_id, self._swarm.members[node_id].parts)
        elif formation is not None:
            formation.holders.remove(node_id)
            if self._standing_by is not None:
                self._standing_by.look()
        elif self._swarm.most is not None and self._swarm.most - self._swarm.members.lost_count < self._least:
            self._course.fail(TrainingError(text))
        self._course.notify()

    async def uploaded(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        if self._forming is not None and name.startswith("part-"):
            await self._forming.uploads.on_upload(node_id, name, chunks)
            return
        if self._formation is None:
            raise RefusedError(f"{node_id} may not upload {name[:80]!r}")
        await self._formation.checkpointing.uploaded(node_id, name, chunks)

    # Formations.

    @property
    def _records(self) -> ProviderRecords:
        return self._swarm.members.records

    def _reported_at(self, node_id: str) -> float:
        """When a provider last reported; 0 for one that has not."""
        return self._records[node_id].reported_at or 0.0

    @property
    def _now(self) -> Deployment:
        assert self._formation is not None
        return self._formation

    def _take_formation(self, formation: Deployment) -> None:
        """From now on this one is listened to; it is being deployed."""
        self._formation, self._formed_at = formation, time.monotonic()
        if self._recovery is not None:
            self._recovery.forget()
        if self._changing is not None:
            self._changing.formed(formation)
        trace = formation.prepared.job.pipeline.trace
        if trace and self._recorder.tracing is None:
            self._recorder.tracing = Tracing(self._run.trace_path, trace, formation.plan.stages)

    def _blocks(self, node_id: str) -> bool:
        """Whether others wait for this provider: it holds a stage of a cluster in which something is under way."""
        cluster = None if self._formation is None else self._formation.clusters.of(node_id)
        return cluster is not None and bool(cluster.is_forming or cluster.open or cluster.again or cluster.evaluating)

    def _busy(self) -> list[list[str]]:
        if self._formation is None:
            return []
        return [c.nodes for c in self._formation.clusters.whole if not c.is_forming and self._blocks(c.nodes[0])]

    def _replacement(self, node_id: str) -> Replacement:
        """Who could take its place."""
        if self._standing_by is None or self._formation is None:
            return "none"
        if any(name != node_id for name in self._ready_to_take()):
            return "standby"
        if len(self._formation.clusters.whole) > 1:
            return "reform"
        stages = self._formation.planned.clusters[0].stages
        others = [member for member in self._swarm.members.connected() if member.node_id != node_id]
        needed, there = (
            sum(stage.memory_bytes for stage in stages),
            sum(member.machine.memory_bytes for member in others),
        )
        return "reform" if there >= _MEMORY_TO_SPARE * needed else "none"

    def _ready_to_take(self) -> dict[str, Provider]:
        """Those without a stage who are under no suspicion."""
        assert self._standing_by is not None
        found = self._standing_by.providers()
        return {name: provider for name, provider in found.items() if self._watch is None or self._watch.is_well(name)}

    def _came(self, newcomers: Sequence[Provider]) -> None:
        if self._changing is not None:
            self._changing.came(newcomers)

    async def _form_at_rest(self, before: Deployment, reason: str, decided: Plan | None = None) -> None:
        """Brings training to rest, makes all clusters alike, saves that, and forms the run anew from there; nothing is
        fed meanwhile. Nothing comes of it where the disk has no room, or the run is formed anew for another reason."""

        def rests() -> bool:
            # In the middle of an update, what has been done of it is in no weights yet.
            undisturbed = self._items.evaluation is None and not self._items.finishing
            return undisturbed and before.is_settled and before.clusters.group is None

        feeding = self._now.feeding
        # What it is formed from need not go through here then: a little is fed again.
        is_kept = len(before.clusters.all) == 1 and await before.holders.wait_for_fresh(before.clusters.all[0])
        feeding.paused = reason
        try:
            while before is self._now:
                if not rests():
                    await self._course.until(lambda: before is not self._now or rests())
                    continue
                self.progress.clock.pause()
                info = None
                if not is_kept:
                    await self._items.average("to be formed anew")
                    info = await self._now.checkpointing.now()
                if before is self._now and rests():
                    await self._form_anew(before, reason, info, decided)
        except DiskFullError as error:
            self._course.emit("not_formed_anew", str(error))
        finally:
            feeding.paused = ""
            self._course.notify()

    async def _form_anew(
        self, before: Deployment, reason: str, saved: CheckpointInfo | None = None, decided: Plan | None = None
    ) -> None:
        """Forms the run anew with those who are there, from what was `saved` or the newest state that can be had, by
        the plan that was `decided` if it holds; nothing where another formation has taken the place of `before`."""
        async with self._forming_anew:
            if before is self._now:
                await self._form_in_place_of(before, reason, saved, decided)

    async def _form_in_place_of(
        self, before: Deployment, reason: str, saved: CheckpointInfo | None, decided: Plan | None
    ) -> None:
        assert self._forming is not None and self._standing_by is not None
        try:
            formed = await self._forming.anew(before, reason, self._take_formation, saved, decided)
        except TrainingError as error:
            if error is self._course.failure:
                raise
            raise TrainingError(f"{error}; {self._what_now()}") from None
        if formed.rewind_to is not None:
            self._place = formed.rewind_to
            self._items.evaluation = None
            if self._taking is not None:
                self._taking.cancel()
        self.phase("training" if self._items.evaluation is None else "evaluating")
        self._standing_by.look()

    async def _until_rewound(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Does this for the requester's thread; RewoundError when the data is to be walked again instead."""
        self._taking = asyncio.current_task()
        try:
            if self._place is None:
                return await work
        except asyncio.CancelledError:
            if self._place is None:
                raise
        finally:
            self._taking, self._taken_at = None, time.monotonic()
            work.close()
        place, self._place = self._place, None
        raise DataRewindError(place)

    def _run_now(self) -> RunNow | None:
        """The state of the run that explains why nothing is completed; None while the run is not watched for that."""
        formation, now = self._formation, time.monotonic()
        if self._has_all or self._forming is None:
            return None
        waits = []
        if self._forming.waits:
            waits.append("those who are there cannot hold the model: others are waited for")
        if formation is None:
            return RunNow(self.progress.phase, waits=tuple(waits))
        if formation.feeding.paused:
            waits.append(f"nothing new is fed: {formation.feeding.paused}")
        if formation.averaging is not None and formation.averaging.rounds.under_way:
            waits.append("a round of averaging is under way")
        if formation.checkpointing.under_way:
            waits.append("a checkpoint is being written")
        heard = {node: now - (self._records[node].reported_at or self._formed_at) for node in formation.stage_of}
        clusters = tuple(cluster_now(each, self.progress.reports, heard) for each in formation.clusters.whole)
        data_seconds = now - self._taken_at if self._taking is None and self._taken_at else None
        return RunNow(self.progress.phase, clusters, data_seconds, tuple(waits))

    def _note_replica(self, key: str, number: int, place: DataPosition, starts: Sequence[int]) -> None:
        """Before it is announced: a coordinator that is started again looks for it."""
        state = self._swarm.state
        if state is not None:
            with self._course.failing():
                state.announced(AnnouncedReplica(key, number, place, tuple(starts)).to_json())

    def _fetched(self, node_id: str, share: float) -> None:
        """How much of its stage a provider has. Nothing is shown of stages that are there in no time."""
        if self.progress.fetching or share < 1:
            ready = self._now.ready
            before = self.progress.fetching or {node: float(node in ready) for node in self._now.stage_of}
            self.progress.fetching = before | {node_id: share}

    # Faults and reports.

    def _lose(self, cluster: ClusterRun, reason: str) -> None:
        """A cluster that lacks a stage does not train any more; the others go on, with what it had not completed."""
        formation = self._now
        assert formation.averaging is not None
        rounds = formation.averaging.rounds
        unlearnt = cluster.samples - rounds.counted_samples(cluster.nodes)
        replayed = formation.lose(cluster, reason)
        text = (
            f"cluster {cluster.id} has ended: {reason}; {counted(len(formation.clusters.whole), 'cluster')} "
            f"left, fed with {counted(replayed, 'microbatch', 'microbatches')} of it again; what it learned from its "
            f"last {unlearnt} samples had not been averaged and is lost"
        )
        self._course.emit("cluster_lost", text, cluster=cluster.id, replayed=replayed, samples=unlearnt)
        self._display.message(text)

    def _take_report(self, node_id: str, message: ProviderMessage) -> None:
        formation = self._now
        cluster = formation.clusters.of(node_id)
        assert cluster is not None
        stage = formation.stage_of[node_id]
        with self._course.failing():
            self._recorder.take(node_id, cluster.id, stage, message.report)
        self._records[node_id].reported_at = time.monotonic()
        if self._watch is not None:
            self._watch.reported(node_id, message.report)
        self._course.notify()
        if self._items.evaluation is None and not cluster.is_forming:
            formation.flights.reported(cluster, stage, message.report)
        self._slow_links.reported(node_id, message.report)
        if self._slow_stages is not None and self._items.evaluation is None:
            self._slow_stages.reported(formation, cluster, node_id, message.report)
        if formation.averaging is not None:
            formation.averaging.rounds.reported(node_id, message.report)

    def _end_stage(self, node_id: str, reason: str, last_well: float | None = None, *, failed: bool = False) -> None:
        """Nobody holds this stage any more."""
        assert self._recovery is not None
        since = time.monotonic() if last_well is None else last_well
        self._recovery.stage_lost(node_id, reason, since, failed=failed)

    @property
    def _last_info(self) -> CheckpointInfo | None:
        return None if self._formation is None else self._formation.checkpointing.last

    def _what_now(self) -> str:
        saved = self._formation is not None and self._formation.checkpointing.has_saved
        if not saved and not self._resumed:
            return "nothing had been saved yet"
        return "the last good checkpoint is kept, continue from it with --resume"

    async def _show(self) -> None:
        """Keeps the display and the summary fresh while the run goes on."""
        since = 0.0
        while True:
            await asyncio.sleep(_DISPLAY_SECONDS)
            since += _DISPLAY_SECONDS
            self._standstill.look()
            if self._save_watch is not None:
                self._save_watch.look()
            self.progress.standstill = self._standstill.text
            self._display.show(self.progress.snapshot())
            if since >= _SUMMARY_SECONDS:
                since = 0.0
                with self._course.failing():
                    self.progress.write(self.progress.summary("running", self.progress.phase), self._run)
                    if self._recorder.tracing is not None and self._recorder.tracing.due:
                        await asyncio.to_thread(self.write_trace)
                    if self._swarm.state is not None and self._formation is not None:
                        # Here, and not on a thread: it is to be of now when it is written.
                        self._formation.note()
                        await asyncio.to_thread(self._swarm.state.reached, position_of(self._ledger))

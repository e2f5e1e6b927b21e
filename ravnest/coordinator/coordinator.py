"""Coordinator of a run: it receives the swarm's events and the requester's calls, and passes them to the run's parts.

- The requester's thread hands in the data item by item (`take`) and waits while the swarm has no room.
- If a provider is lost or fails, `recovery/` gives its stage to another provider, or the run is redeployed.
- A loss that is not finite, a full disk, or a swarm that can neither hold the model nor be joined ends the run: from
  then on, every wait raises the same error. Checkpoints that were written stay.
- `report/phase.py` is the state machine of the run.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial

import torch

from ravnest.coordinator.checkpoints.reader import CheckpointInfo
from ravnest.coordinator.checkpoints.store import CheckpointStore
from ravnest.coordinator.deploy.current_deployment import CurrentDeployment
from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.deploy.first_deployment import FirstDeployment
from ravnest.coordinator.deploy.present_planner import PresentPlanner, RequestedSize
from ravnest.coordinator.deploy.redeployment import Redeployment
from ravnest.coordinator.deploy.rollout import Rollout
from ravnest.coordinator.feed.feeder import Item
from ravnest.coordinator.intake import Intake
from ravnest.coordinator.plan.prepared_job import PreparedJob
from ravnest.coordinator.plan.provider_profiles import UNSTATED, Machine, StatedLine
from ravnest.coordinator.recovery.lost_providers import lost_before_the_job
from ravnest.coordinator.recovery.run_now import run_now
from ravnest.coordinator.recovery.stage_messages import StageMessages
from ravnest.coordinator.recovery.upkeep import Upkeep
from ravnest.coordinator.replicas.part_uploads import PartUploads
from ravnest.coordinator.report.phase import Phase
from ravnest.coordinator.report.progress import Progress
from ravnest.coordinator.report.recorder import Recorder
from ravnest.coordinator.run.context import RunContext
from ravnest.coordinator.run.data_walk import DataRewindError
from ravnest.coordinator.run.job_run import JobRun
from ravnest.coordinator.run.live_view import LiveView
from ravnest.coordinator.run.timeouts import DEFAULT_TIMEOUTS, Timeouts
from ravnest.coordinator.swarm.link_measurements import describe, figures
from ravnest.coordinator.swarm.members import Member
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.coordinator.verification.reported_scores import ReportedScores
from ravnest.errors import RavnestError, RefusedError
from ravnest.monitor.display import Display
from ravnest.monitor.events import EventLog
from ravnest.monitor.metrics import MetricLog
from ravnest.monitor.run_directory import RunDirectory
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.v1.control_pb2 import ProviderMessage
from ravnest.planner.plan import Plan


class _Training:
    """The parts of a run that exist once its job is prepared."""

    def __init__(self, run: JobRun, asked: RequestedSize) -> None:
        self.run = run
        self.current = CurrentDeployment()
        self.planner = PresentPlanner(run, asked)
        self.uploads = PartUploads(run.context)
        rollout = Rollout(run, self.current, self.uploads)
        self.first = FirstDeployment(run, self.planner, rollout)
        self.upkeep = Upkeep(run, self.current, self.planner, Redeployment(run, self.current, self.planner, rollout))
        self.messages = StageMessages(run, self.current, self.upkeep, self.uploads)
        self.intake = Intake(run, self.current)


class Coordinator:
    """Created on any thread; all methods run on the network's event loop."""

    def __init__(
        self,
        swarm: Swarm,
        run: RunDirectory,
        events: EventLog,
        metrics: MetricLog,
        progress: Progress,
        display: Display,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_failure` is called when training cannot go on, because the requester's thread may not be waiting here."""
        self.progress = progress
        self._directory = run
        self._recorder = Recorder(progress, metrics)
        self._context = RunContext(swarm, events, progress, self._recorder, display, timeouts)
        self._context.on_failure = on_failure
        self._context.give_up = partial(lost_before_the_job, self._context)
        self._training: _Training | None = None
        """None until the job is prepared."""

    @property
    def deployment(self) -> Deployment | None:
        """The current deployment; None before the first."""
        return None if self._training is None else self._training.current.deployment

    @property
    def job_run(self) -> JobRun | None:
        """The run of the job; None until the job is prepared."""
        return None if self._training is None else self._training.run

    async def start(self, min_providers: int = 1) -> None:
        """Listens to the swarm and shows the run. Until the deployment, the run fails if fewer than `min_providers` are
        connected or can still join."""
        self._context.min_providers = min_providers
        self._context.members.begin_run()
        self._context.swarm.events = self
        for member in self._context.members.connected():
            self.joined(member)
        self._context.spawn(LiveView(self._context, self._directory, self._look, self._note).run())

    async def deploy(
        self,
        prepared: PreparedJob,
        providers: int | None,
        clusters: int | None,
        threads: int,
        cores: int,
        line: StatedLine = UNSTATED,
    ) -> Plan:
        """Waits for the providers, plans, and returns when every stage is built and linked.

        Without a number of providers, it waits for as many as can hold the model together; without a number of
        clusters, the planner chooses the fastest. `threads` is for providers that do not choose themselves, `line` the
        coordinator's.
        """
        pipeline = prepared.job.pipeline
        if pipeline.record_updates:
            self._recorder.record_updates(self._directory.updates_path)
        self._recorder.trace(self._directory.trace_path, pipeline.trace)
        store = CheckpointStore(self._directory.checkpoints_path, prepared.job.checkpoint.keep)
        run = JobRun(self._context, prepared, store, Machine(cores, threads, line))
        training = self._training = _Training(run, RequestedSize(providers, clusters))
        self._context.spawn(training.upkeep.watchdog.run())
        deployment = await training.first.make()
        training.upkeep.recovery.begin(deployment)
        self._context.enter(Phase.TRAINING)
        return deployment.plan

    async def take(self, item: Item) -> None:
        """Takes the next item of the data, once there is room for it. Raises the failure of the run, or DataRewindError
        when the data must be walked again."""
        training = self._deployed
        await training.run.walk.step(training.intake.take(item))

    async def check(self) -> None:
        """Raises the failure of the run, if there is one."""
        await self._context.until(lambda: True)

    async def attest(
        self,
        batches: Sequence[Mapping[str, torch.Tensor]],
        shorten: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] | None,
    ) -> None:
        """Makes sure that the swarm has evaluated the model that is about to be saved, see `Intake.attest`.
        DataRewindError, as `take`."""
        training = self._deployed
        await training.run.walk.step(training.intake.attest(batches, shorten))

    def witnessed(self) -> tuple[list[ReportedScores], str]:
        """The scores that the swarm reported of the model that was saved last, and the data that they are of; after
        `finish`."""
        return self._deployed.intake.witnessed()

    async def finish(self) -> CheckpointInfo:
        """Waits for everything in flight, makes all clusters equal, and saves the final state. DataRewindError, as
        `take`."""
        training = self._deployed
        info = await training.run.walk.step(training.intake.finish())
        training.run.walk.is_over = True
        self._context.standstill.moved()
        return info

    async def stop_early(self, timeout_seconds: float) -> CheckpointInfo | None:
        """Saves the state if everything in flight is applied before the timeout. Returns the run's last checkpoint."""
        if self.deployment is None:
            return None
        self._context.enter(Phase.STOPPING)
        with contextlib.suppress(TimeoutError, RavnestError, DataRewindError):
            async with asyncio.timeout(timeout_seconds):
                return await self.finish()
        return self._deployed.run.checkpointer.last

    async def close(self) -> None:
        """Ends everything that this run has started; the swarm can serve another run."""
        self._context.swarm.events = None
        await self._context.close()
        if self.deployment is not None:
            self.deployment.close()
        self._recorder.close()

    def write_trace(self) -> None:
        """Updates trace.json; RunError when the disk refuses. On any thread."""
        self._recorder.write_trace()

    def enter(self, phase: Phase) -> None:
        """Begins a phase of the run."""
        self._context.enter(phase)

    def begin_step(self, text: str) -> None:
        """Shows a step of the current phase."""
        self._context.begin_step(text)

    # Events of the swarm.

    def joined(self, member: Member) -> None:
        members = self._context.members
        record = members.records[member.node_id]
        record.is_lost = False
        record.presence.begin(member.session, time.monotonic())
        reliability = members.reliability(member.node_id)
        what = f"{member.node_id} joined with {describe(member)}"
        if reliability.value < 1:
            what = f"{what}; {reliability.reason}"
        self._context.emit("joined", what, provider=member.node_id, **figures(member))
        if self._training is not None:
            self._training.upkeep.joined(member)
        self._context.notify()

    def said(self, node_id: str, message: ProviderMessage) -> None:
        if self._training is not None:
            self._training.messages.handle(node_id, message)

    def returned(self, node_id: str, frame: Frame) -> None:
        training = self._training
        cluster = None if training is None else training.current.cluster_of(node_id)
        if training is None or cluster is None or frame.generation != cluster.generation:
            # The frame belongs to a deployment, or to links, that were given up.
            return
        if frame.kind is FrameKind.DONE:
            clock = self.progress.clock
            if clock.first_update_seconds is None:
                self._context.emit("first_update", "the first microbatch has passed every stage")
            if training.run.dispatcher.completed(node_id, frame.microbatch):
                clock.on_microbatch()
            training.run.checkpointer.applied(cluster, frame.microbatch)
            self._context.standstill.completed()
            self._context.notify()
        elif frame.kind is FrameKind.RESULT:
            training.intake.evaluated(cluster, node_id, frame)
            self._context.standstill.completed()

    def disconnected(self, node_id: str, reason: str) -> None:
        self._context.members.records[node_id].presence.note_interruption()
        self._context.emit("disconnected", reason, provider=node_id)
        if self.deployment is not None and (rounds := self.deployment.rounds) is not None:
            # It may reconnect soon; the other owners do not wait for it.
            rounds.gone(node_id, f"{node_id} is disconnected: {reason}")

    def reconnected(self, node_id: str) -> None:
        self._context.emit("reconnected", f"{node_id} is connected again", provider=node_id)

    def turned_away(self, address: str, connections: int, reason: str) -> None:
        self._context.emit("turned_away", reason, address=address, connections=connections)
        self._context.say(reason)

    def vanished(self, node_id: str, reason: str) -> None:
        if self._context.members.records[node_id].is_lost:
            # The loss is known already.
            return
        since = time.monotonic()
        self._context.later(self._context.timeouts.vanished_seconds, lambda: self._gone(node_id, reason, since))

    async def uploaded(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        training = self._training
        if training is None:
            raise RefusedError(f"{node_id} may not upload {name[:80]!r}")
        if name.startswith("part-"):
            await training.uploads.on_upload(node_id, name, chunks)
        else:
            await training.run.checkpointer.uploaded(node_id, name, chunks)

    @property
    def _deployed(self) -> _Training:
        assert self._training is not None, "the run has been deployed"
        return self._training

    def lost(self, node_id: str, reason: str) -> None:
        """Gives a provider up: its session ends and others take its stage."""
        self._context.give_up(node_id, reason)

    def _gone(self, node_id: str, reason: str, since: float) -> None:
        members = self._context.members
        is_back = node_id in members and not members[node_id].control.link.over
        if self._training is None:
            lost_before_the_job(self._context, node_id, reason, is_back=is_back)
        else:
            self._training.upkeep.losses.lost(node_id, reason, since, is_back=is_back)

    def _look(self) -> None:
        """Looks for a standstill, and for parts of a checkpoint that do not arrive."""
        training, standstill = self._training, self._context.standstill
        if training is not None:
            standstill.look(lambda: run_now(training.run, training.current, training.planner))
            training.upkeep.checkpoint_watch.look()
        self.progress.standstill = standstill.text

    async def _note(self) -> None:
        """Records the deployment and the position, for a coordinator that is restarted."""
        state = self._context.swarm.state
        if state is not None and self.deployment is not None:
            # Not in a thread, because the record must be of the moment when it is written.
            self.deployment.note()
            await asyncio.to_thread(state.reached, self._context.position())

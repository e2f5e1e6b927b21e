"""Session: one run from the requester's side. It opens the run directory, prepares the job, feeds it and writes the
results.

However a run ends, summary.json says how. A run that is interrupted or fails saves what it can first.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ravnest.coordinator.checkpoints.reader import CheckpointInfo, DamagedCheckpoint, load_checkpoint
from ravnest.coordinator.checkpoints.saver import place_of
from ravnest.coordinator.checkpoints.store import CheckpointStore
from ravnest.coordinator.coordinator import Coordinator
from ravnest.coordinator.feed.data_order import epoch_size
from ravnest.coordinator.feed.feeder import Feeder
from ravnest.coordinator.feed.ledger import DataPosition, Ledger
from ravnest.coordinator.launch.final_model import FinalModel
from ravnest.coordinator.launch.interrupts import Interrupts, RunOver
from ravnest.coordinator.launch.network_loop import NetworkLoop
from ravnest.coordinator.plan.prepared_job import PreparedJob, prepare, static_tensors, with_initial_weights
from ravnest.coordinator.plan.provider_profiles import UNSTATED, StatedLine
from ravnest.coordinator.report.phase import Phase
from ravnest.coordinator.report.progress import Progress
from ravnest.coordinator.report.training_clock import TrainingClock
from ravnest.coordinator.run.data_walk import DataRewindError
from ravnest.coordinator.run.timeouts import DEFAULT_TIMEOUTS, Timeouts
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.coordinator.verification.final_check import NotAsReportedError, effort_for, first_tensors, shortening
from ravnest.cores import usable_cores
from ravnest.errors import RavnestError, RunError, TrainingError
from ravnest.graph.batch import samples_in
from ravnest.graph.cutting.partition import max_stages
from ravnest.job import Job
from ravnest.monitor.display import Display
from ravnest.monitor.events import EventLog
from ravnest.monitor.export import write_model
from ravnest.monitor.metrics import MetricLog
from ravnest.monitor.run_directory import RunDirectory
from ravnest.monitor.summary import Status, Summary

_METRICS_SECONDS = {True: 30.0, False: 1.0}
"""Timeout for writing the last of the curves, by whether the run has finished."""

_STOP_SECONDS = 2.5
"""Timeout for the microbatches in flight of an interrupted run: the whole stop must take less than five seconds."""

_MAX_NAMED = 5
"""Frozen modules that an event names."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended, and where its files are."""

    summary: Summary
    """The contents of summary.json: status, reason, samples, losses, evaluation, stages, ledger."""
    run: Path
    """The run directory."""
    model: Path | None
    """The fused model.safetensors, if one was written."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The job to train, and where its run is kept."""

    job: Job
    name: str
    run: Path | RunDirectory | None
    """The run directory: open, a path, or None for a new one."""
    resume: bool
    started: float
    """When the command was given, on the clock `time.perf_counter`."""
    timeouts: Timeouts = DEFAULT_TIMEOUTS
    line: StatedLine = UNSTATED
    """This machine's line to the internet."""


@contextlib.contextmanager
def run_session(
    swarm: Swarm,
    loop: NetworkLoop,
    request: RunRequest,
    display: Display,
    interrupts: Interrupts,
    providers: int = 1,
) -> Iterator["Session"]:
    """A session with a started coordinator, closed at the end of the block; RunError when the run directory cannot be
    used. Before the deployment, the run fails when fewer than `providers` are present or can still join."""
    session = Session(swarm, loop, request, display, interrupts)
    try:
        loop.call(session.coordinator.start(providers))
        try:
            yield session
        finally:
            loop.call_quietly(session.coordinator.close())
    finally:
        session.close()


class Session:
    """A run that has its directory and its coordinator. All methods run on the requester's thread."""

    def __init__(
        self, swarm: Swarm, loop: NetworkLoop, request: RunRequest, display: Display, interrupts: Interrupts
    ) -> None:
        """Opens the run directory, unless it is open; RunError when it cannot be used."""
        self._job = job = request.job
        self._line = request.line
        self._loop = loop
        self._display = display
        self._interrupts = interrupts
        self._has_finished = False
        self._feeder: Feeder | None = None
        self._run = (
            request.run
            if isinstance(request.run, RunDirectory)
            else RunDirectory.open(request.run, job_name=request.name, resume=request.resume)
        )
        with contextlib.ExitStack() as opened:
            opened.callback(self._run.close)
            if warning := self._run.sharing_warning():
                display.message(warning)
            self._events = EventLog(self._run.events_path)
            opened.callback(self._events.close)
            metrics = MetricLog(self._run.metrics_path, self._run.tensorboard_path, display.message)
            opened.callback(lambda: metrics.close(_METRICS_SECONDS[self._has_finished]))
            self._info = self._checkpoint() if request.resume else None
            self._start = DataPosition() if self._info is None else place_of(self._info)
            ledger = Ledger(self._start)
            self._progress = Progress(request.name, job.epochs, ledger, TrainingClock(ledger, request.started))
            self.coordinator = Coordinator(
                swarm, self._run, self._events, metrics, self._progress, display, request.timeouts, interrupts.wake
            )
            self._model = FinalModel(self._run, job.checkpoint.keep, self._events)
            reason = "resumed from the start: nothing had been saved" if request.resume else "a new run"
            if self._info is not None:
                reason = f"resumed after {self._start.updates} updates"
            self._events.emit("started", reason, updates=self._start.updates)
            self.coordinator.enter(Phase.PREPARING)
            self._progress.write(self._progress.summary("running", self._progress.activity), self._run)
            display.message(f"run directory: {self._run.path}")
            self._opened = opened.pop_all()

    def train(self, providers: int | None, clusters: int | None, threads: int | None) -> TrainResult:
        """Trains the whole run. However it ends, summary.json says how; a RavnestError is raised again after that.

        `providers` is how many must have joined (None: as many as the model needs), `clusters` how many they form
        (None: the fastest number). `threads` is the number of threads of each provider on this machine; None when the
        providers are elsewhere.
        """
        model: Path | None
        try:
            model = self._work(providers, clusters, threads)
            summary = self._end("finished", self._finish_reason(), model)
            self._has_finished = True
        except KeyboardInterrupt:
            summary, model = self._stop()
        except NotAsReportedError as error:
            # Nothing more is saved: the stages would save the state that was found wrong.
            self._end("failed", str(error), self._run.model_path)
            raise
        except RavnestError as error:
            # When the requester's data failed, the swarm is well and its state is worth saving.
            info = self._loop.call(self.coordinator.stop_early(_STOP_SECONDS))
            if info is not None:
                self._display.message(f"saved after {info.updates} updates; continue with --resume")
            self._end("failed", str(error), None)
            raise
        except Exception as error:
            self._end("failed", f"{type(error).__name__}: {error}", None)
            raise
        self._display.finish(summary)
        return TrainResult(summary, self._run.path, model)

    def close(self) -> None:
        self._opened.close()

    def _work(self, providers: int | None, clusters: int | None, threads: int | None) -> Path:
        call = self._loop.call
        try:
            call(self.coordinator.check())
            prepared = self._prepare(threads)
            cores = usable_cores()
            call(self.coordinator.deploy(prepared, providers, clusters, threads or 1, cores, self._line))
            info = self._feed(prepared)
            model = self._model.write(info)
            self._model.check(self.coordinator, prepared, info, model)
            return model
        except RunOver:
            call(self.coordinator.check())
            raise

    def _checkpoint(self) -> CheckpointInfo | None:
        """The newest good checkpoint; None when the earlier session ended before it had saved any."""
        damaged: list[DamagedCheckpoint] = []
        info = CheckpointStore(self._run.checkpoints_path, self._job.checkpoint.keep, damaged.append).latest()
        for item in damaged:
            self._events.emit("checkpoint_damaged", item.reason, checkpoint=item.folder.name)
            instead = f"continuing from {info.folder.name}" if info is not None else "there is no earlier one"
            self._display.message(f"skipped a damaged checkpoint, {instead}: {item.reason}")
        if info is None and not damaged:
            self._display.message("nothing was saved before: starting from the beginning")
        elif info is None:
            raise RunError(f"{self._run.path} has no good checkpoint to resume from; start afresh in another --run")
        return info

    def _prepare(self, threads: int | None) -> PreparedJob:
        restored = None if self._info is None else load_checkpoint(self._info)
        prepared = prepare(
            self._job,
            threads,
            restored,
            self.coordinator.begin_step,
            self._interrupts.users_code,
            self._run.profile_path,
        )
        if threads is None:
            # Providers elsewhere draw random weights themselves; those on this machine get them at once.
            self.coordinator.begin_step("finding how the weights were drawn")
            prepared = with_initial_weights(prepared)
        possible = max_stages(prepared.captured.graph)
        told = f"{len(prepared.captured.graph.nodes)} operators, at most {possible} stages"
        if frozen := prepared.captured.frozen_modules:
            more = f" and {len(frozen) - _MAX_NAMED}" if len(frozen) > _MAX_NAMED else ""
            told += f"; in eval() while the rest trains, as they were given: {', '.join(frozen[:_MAX_NAMED])}{more}"
        self._events.emit("captured", told, stages=possible)
        write_model(self._run.static_path, static_tensors(prepared.captured))
        self._note_sizes(prepared)
        return prepared

    def _note_sizes(self, prepared: PreparedJob) -> None:
        """Tells the display how much there is to train, as far as the data says, so that it can show the time left."""
        batch = samples_in(prepared.captured.sample)
        size = epoch_size(self._job.train_data, batch)
        if size is not None:
            self._progress.epochs.batches, self._progress.epochs.samples = size
        if self._job.max_updates is not None:
            left = max(0, self._job.max_updates - self._start.updates) * self._job.pipeline.accumulate
            self._progress.epochs.max_samples = self._start.samples + left * batch

    def _feed(self, prepared: PreparedJob) -> CheckpointInfo:
        """Feeds all of the data, and again from an earlier position when the run goes back; the last checkpoint."""
        call = self._loop.call
        # A replica that the providers held may be newer than the checkpoint.
        captured, start = prepared.captured, self._progress.ledger.applied
        while True:
            self._feeder = Feeder(
                self._job,
                captured.structure,
                captured.graph.inputs,
                lambda item: call(self.coordinator.take(item)),
                prepared.peeked,
                self._interrupts.users_code,
            )
            try:
                self._feeder.run(start)
                chosen = effort_for(prepared, self._progress.clock.elapsed_seconds)
                call(self.coordinator.attest(first_tensors(prepared), shortening(prepared, chosen)))
                info: CheckpointInfo = call(self.coordinator.finish())
                return info
            except DataRewindError as back:
                if isinstance(self._job.train_data, Iterator):
                    raise TrainingError(
                        "the lost updates cannot be replayed: train_data is an iterator, which can be walked only "
                        "once; give a list, a DataLoader or a function that makes one"
                    ) from None
                self._feeder.abandon()
                start = back.place

    def _finish_reason(self) -> str:
        if self._progress.ledger.completed == self._start.microbatches:
            return "all of it had been done before; evaluated again"
        most = self._job.max_updates
        reached = most is not None and self._progress.ledger.updates >= most
        return f"max_updates={most} is reached" if reached else "all epochs are done"

    def _stop(self) -> tuple[Summary, Path | None]:
        """Stops an interrupted run in good order. A second interrupt ends it at once, and is raised."""
        self._interrupts.stopping = True
        model: Path | None = None
        try:
            if self._feeder is not None:
                self._feeder.abandon()
            info = self._loop.call(self.coordinator.stop_early(_STOP_SECONDS))
            if info is not None:
                model = self._model.write(info)
            last = info or self._info
            reason = "interrupted before there was anything to save"
            if last is not None:
                reason = f"interrupted; saved after {last.updates} updates, continue with --resume"
        except KeyboardInterrupt:
            self._end("stopped", "interrupted twice; checkpoints written before stand", None)
            raise
        except Exception as error:
            reason = f"interrupted; {error}"
        return self._end("stopped", reason, model), model

    def _end(self, status: Status, reason: str, model: Path | None) -> Summary:
        self._progress.clock.pause()
        self._run.release_reserve()
        summary = self._progress.summary(status, reason, None if model is None else str(model))
        with contextlib.suppress(RunError):
            self._events.emit(status, reason)
        try:
            self._progress.write(summary, self._run)
        except RunError:
            # A full disk has ended the run, and the error that is being raised says so.
            if status != "failed":
                raise
        try:
            self.coordinator.write_trace()
        except RunError as error:
            # The model and the summary are written: a missing trace does not make the run fail.
            self._display.message(str(error))
        return summary

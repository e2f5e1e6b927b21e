"""One run from the requester's side: opens the run directory, prepares the job, feeds it, writes what comes of it."""

import contextlib
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ravnest.coordinator.checkpoints.saver import place_of
from ravnest.coordinator.checkpoints.store import (
    CheckpointContents,
    CheckpointInfo,
    CheckpointStore,
    DamagedCheckpoint,
    load_checkpoint,
)
from ravnest.coordinator.coordinator import Coordinator, RewoundError
from ravnest.coordinator.feed.data_order import epoch_size
from ravnest.coordinator.feed.feeder import Feeder
from ravnest.coordinator.feed.ledger import DataPosition, Ledger
from ravnest.coordinator.launch.interrupts import Interrupts, RunOver
from ravnest.coordinator.plan.prepared_job import Prepared, prepare, static_tensors
from ravnest.coordinator.report.progress import Progress
from ravnest.coordinator.report.training_clock import TrainingClock
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.coordinator.verification.final_check import (
    NotAsReportedError,
    check_written,
    effort_for,
    first_tensors,
    refusal,
    shortening,
)
from ravnest.cores import usable_cores
from ravnest.errors import RavnestError, RunError, TrainingError
from ravnest.graph.batch import samples_in
from ravnest.graph.partition import max_stages
from ravnest.job import Job
from ravnest.monitor.display import Display
from ravnest.monitor.events import EventLog
from ravnest.monitor.export import fuse, write_model
from ravnest.monitor.metrics import MetricLog
from ravnest.monitor.run_directory import RunDirectory
from ravnest.monitor.summary import Status, Summary

Call = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine on the network's loop and gives its result."""

_METRICS_SECONDS = {True: 30.0, False: 1.0}
"""How long the last of the curves are waited for, by whether the run has finished."""

_STOP_SECONDS = 2.5
"""How long an interrupted run may take to finish what is in flight: the whole stop must fit in five seconds."""

_NAMED = 5
"""How many frozen modules an event names, at most."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended, and where everything is."""

    summary: Summary
    """What summary.json says: status, reason, samples, losses, evaluation, stages, ledger."""
    run: Path
    """The run directory."""
    model: Path | None
    """The fused model.safetensors, where one was written."""


class Session:
    """A run that has its directory and its coordinator. Everything here happens on the requester's thread."""

    def __init__(
        self,
        swarm: Swarm,
        job: Job,
        name: str,
        path: Path | RunDirectory | None,
        resume: bool,
        display: Display,
        interrupts: Interrupts,
        started: float,
    ) -> None:
        """Opens the run directory, unless it is open; RunError when it cannot be used.

        `started` is when the command was given.
        """
        self._job = job
        self._display = display
        self._interrupts = interrupts
        self._orderly = False
        self._feeder: Feeder | None = None
        self._run = path if isinstance(path, RunDirectory) else RunDirectory.open(path, job_name=name, resume=resume)
        with contextlib.ExitStack() as opened:
            opened.callback(self._run.close)
            if warning := self._run.sharing_warning():
                display.message(warning)
            self._events = EventLog(self._run.events_path)
            opened.callback(self._events.close)
            self._metrics = MetricLog(self._run.metrics_path, self._run.tensorboard_path, display.message)
            opened.callback(lambda: self._metrics.close(_METRICS_SECONDS[self._orderly]))
            self._info = self._checkpoint() if resume else None
            self._start = DataPosition() if self._info is None else place_of(self._info)
            ledger = Ledger(self._start)
            self._progress = Progress(name, job.epochs, ledger, TrainingClock(ledger, started))
            self.coordinator = Coordinator(swarm, self._run, self._events, self._metrics, self._progress, display)
            self.coordinator.on_failure = interrupts.wake
            reason = "resumed from the start: nothing had been saved" if resume else "a new run"
            if self._info is not None:
                reason = f"resumed after {self._start.updates} updates"
            self._events.emit("started", reason, updates=self._start.updates)
            self.coordinator.phase("preparing")
            self._progress.write(self._progress.summary("running", "preparing"), self._run)
            display.message(f"run directory: {self._run.path}")
            self._opened = opened.pop_all()

    def train(self, providers: int | None, clusters: int | None, threads: int | None, call: Call) -> TrainResult:
        """The whole run. However it ends, summary.json says how; a RavnestError is raised again after that.

        `providers` is how many are waited for (None: as many as it takes), `clusters` how many they form (None: as many
        as are fastest). `threads` is what each provider on this machine computes with; None where they are elsewhere.
        """
        model: Path | None
        try:
            model = self._work(providers, clusters, threads, call)
            summary = self._end("finished", self._finished(), model)
            self._orderly = True
        except KeyboardInterrupt:
            summary, model = self._stop(call)
        except NotAsReportedError as error:
            # Nothing more is saved: what the stages would save now is what was found wrong.
            self._end("failed", str(error), self._run.model_path)
            raise
        except RavnestError as error:
            # Where it is the requester's data that failed, the swarm is well and what it has learned is worth keeping.
            info = call(self.coordinator.stop_early(_STOP_SECONDS))
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

    def _work(self, providers: int | None, clusters: int | None, threads: int | None, call: Call) -> Path:
        try:
            call(self.coordinator.check())
            prepared = self._prepare(threads)
            call(self.coordinator.deploy(prepared, providers, clusters, threads or 1, usable_cores()))
            info = self._feed(prepared, call)
            model = self._write_model(info)
            self._check_model(prepared, info, model)
            return model
        except RunOver:
            call(self.coordinator.check())
            raise

    def _checkpoint(self) -> CheckpointInfo | None:
        """The newest good one; None where the run was ended before it had saved any."""
        damaged: list[DamagedCheckpoint] = []
        info = CheckpointStore(self._run.checkpoints_path, self._job.checkpoint.keep, damaged.append).latest()
        for item in damaged:
            self._events.emit("checkpoint_damaged", item.reason, checkpoint=item.folder.name)
            instead = f"going on from {info.folder.name}" if info is not None else "there is none before it"
            self._display.message(f"skipped a damaged checkpoint, {instead}: {item.reason}")
        if info is None and not damaged:
            self._display.message("nothing had been saved before: going on from the start")
        elif info is None:
            raise RunError(f"{self._run.path} has no good checkpoint to resume from; start afresh in another --run")
        return info

    def _prepare(self, threads: int | None) -> Prepared:
        restored: CheckpointContents | None = None if self._info is None else load_checkpoint(self._info)
        prepared = prepare(
            self._job, threads, restored, self.coordinator.phase, self._interrupts.users_code, self._run.profile_path
        )
        possible = max_stages(prepared.captured.graph)
        told = f"{len(prepared.captured.graph.nodes)} operators, at most {possible} stages"
        if frozen := prepared.captured.frozen_modules:
            more = f" and {len(frozen) - _NAMED}" if len(frozen) > _NAMED else ""
            told += f"; in eval() while the rest trains, as they were given: {', '.join(frozen[:_NAMED])}{more}"
        self._events.emit("captured", told, stages=possible)
        write_model(self._run.static_path, static_tensors(prepared.captured))
        self._promise(prepared)
        return prepared

    def _promise(self, prepared: Prepared) -> None:
        """How much there is to do, as far as the data tells: the display shows it and how long it will take."""
        batch = samples_in(prepared.captured.sample)
        size = epoch_size(self._job.train_data, batch)
        if size is not None:
            self._progress.epochs.batches, self._progress.epochs.samples = size
        if self._job.max_updates is not None:
            left = max(0, self._job.max_updates - self._start.updates) * self._job.pipeline.accumulate
            self._progress.epochs.max_samples = self._start.samples + left * batch

    def _feed(self, prepared: Prepared, call: Call) -> CheckpointInfo:
        """Feeds all of the data, and some of it again where the run had to go back; what the last checkpoint is."""
        # Providers may have kept more than the checkpoint had.
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
            except RewoundError as back:
                if isinstance(self._job.train_data, Iterator):
                    raise TrainingError(
                        "what was lost cannot be trained on again: train_data is an iterator, which cannot be walked "
                        "twice; give a list, a DataLoader or a function that makes one"
                    ) from None
                self._feeder.abandon()
                start = back.place

    def _finished(self) -> str:
        if self._progress.ledger.completed == self._start.microbatches:
            return "all of it had been done before; evaluated again"
        most = self._job.max_updates
        reached = most is not None and self._progress.ledger.updates >= most
        return f"max_updates={most} is reached" if reached else "all epochs are done"

    def _stop(self, call: Call) -> tuple[Summary, Path | None]:
        """The orderly end of a run that was interrupted. A second interrupt ends it at once, and is raised."""
        self._interrupts.stopping = True
        model: Path | None = None
        try:
            if self._feeder is not None:
                self._feeder.abandon()
            info = call(self.coordinator.stop_early(_STOP_SECONDS))
            if info is not None:
                model = self._write_model(info)
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

    def _write_model(self, info: CheckpointInfo) -> Path:
        """The fused model under the user's own names."""
        contents = load_checkpoint(info)
        aliases, not_saved = info.state["aliases"], info.state["non_persistent"]
        static = load_file(self._run.static_path)
        fused = fuse(contents, aliases, static, not_saved)
        store = CheckpointStore(self._run.checkpoints_path, self._job.checkpoint.keep)
        store.trust(info.updates)
        store.make_room(sum(tensor.nbytes for tensor in fused.values()))
        write_model(self._run.model_path, fused, {"updates": str(info.updates), "samples": str(info.samples)})
        return self._run.model_path

    def _check_model(self, prepared: Prepared, info: CheckpointInfo, model: Path) -> None:
        """Evaluates the model from its file; NotAsReportedError where that is not what the swarm reported."""
        self.coordinator.phase("checking the model that was written")
        witnessed, source = self.coordinator.witnessed()
        chosen = effort_for(prepared, self._progress.clock.elapsed_seconds)
        devices = self._progress.devices
        found = self._progress.check = check_written(prepared, info, model, witnessed, source, chosen, devices)
        figures = {"on": found.on, "samples": found.samples, "reported": found.reported, "measured": found.measured}
        if found.status != "failed":
            self._events.emit("checked", found.reason, **figures)
            return
        self._events.emit("check_failed", found.reason, **figures)
        store = CheckpointStore(self._run.checkpoints_path, self._job.checkpoint.keep)
        apart = store.set_apart(info)
        before = store.latest()
        resumes_from = "the start" if before is None else f"{before.folder.name}, after {before.updates} updates"
        raise NotAsReportedError(refusal(found, model, apart, resumes_from))

    def _end(self, status: Status, reason: str, model: Path | None) -> Summary:
        self._progress.clock.pause()
        self._run.release_reserve()
        summary = self._progress.summary(status, reason, None if model is None else str(model))
        with contextlib.suppress(RunError):
            self._events.emit(status, reason)
        try:
            self._progress.write(summary, self._run)
        except RunError:
            # A full disk is what ended the run: the error that is being raised says so.
            if status != "failed":
                raise
        try:
            self.coordinator.write_trace()
        except RunError as error:
            # The model and the summary are there: a picture less is no reason to fail.
            self._display.message(str(error))
        return summary

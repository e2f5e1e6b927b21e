"""One run from the requester's side: opens the run directory, prepares the job, feeds it, writes what comes of it."""

import contextlib
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ravnest.coordinator.checkpoints import CheckpointContents, CheckpointInfo, CheckpointStore, load_checkpoint
from ravnest.coordinator.coordinator import Coordinator
from ravnest.coordinator.feeder import Feeder
from ravnest.coordinator.ledger import Ledger
from ravnest.coordinator.prepare import Prepared, prepare, static_tensors
from ravnest.coordinator.progress import Progress
from ravnest.coordinator.swarm import Swarm
from ravnest.errors import RavnestError, RunError
from ravnest.graph.partition import most_stages
from ravnest.job import Job
from ravnest.jobfile import user_errors
from ravnest.monitor.display import Display
from ravnest.monitor.events import EventLog
from ravnest.monitor.export import fuse, write_model
from ravnest.monitor.metrics import MetricLog
from ravnest.monitor.run_directory import RunDirectory
from ravnest.monitor.summary import Status, Summary

Call = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine on the network's loop and gives its result."""

_STOP_SECONDS = 2.5
"""How long an interrupted run may take to finish what is in flight: the whole stop must fit in five seconds."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended, and where everything is."""

    summary: Summary
    run: Path
    model: Path | None
    """The fused model.safetensors, where one was written."""


class Session:
    """A run that has its directory and its coordinator. Everything here happens on the requester's thread."""

    def __init__(
        self, swarm: Swarm, job: Job, name: str, path: Path | None, resume: bool, display: Display, started: float
    ) -> None:
        """Opens the run directory; RunError when it cannot be used. `started` is when the command was given."""
        self._job = job
        self._display = display
        self._run = RunDirectory.open(path, job_name=name, resume=resume)
        try:
            self._events = EventLog(self._run.events_path)
            self._metrics = MetricLog(self._run.metrics_path, self._run.tensorboard_path, display.message)
            self._info = self._checkpoint() if resume else None
            done = 0 if self._info is None else int(self._info.manifest["ledger"]["completed"])
            ledger = Ledger(completed=done, samples=0 if self._info is None else self._info.samples)
            self._progress = Progress(name, job.epochs, ledger, job.pipeline.accumulate, started=started)
            self._progress.samples_at_start = ledger.samples
            self.coordinator = Coordinator(swarm, self._run, self._events, self._metrics, self._progress, display)
            self._events.emit("started", "resumed from a checkpoint" if resume else "a new run", updates=self._updates)
        except BaseException:
            self._run.close()
            raise
        self._display.message(f"run directory: {self._run.path}")

    def train(self, providers: int, threads: int, call: Call) -> TrainResult:
        """The whole run. However it ends, summary.json says how; a RavnestError is raised again after that."""
        model: Path | None = None
        try:
            prepared = self._prepare(providers, threads)
            call(self.coordinator.deploy(prepared, providers, threads, os.cpu_count() or 1))
            self._feed(prepared, call)
            info = call(self.coordinator.finish())
            model = self._write_model(info)
            summary = self._end("finished", "all epochs are done", model)
        except KeyboardInterrupt:
            info = call(self.coordinator.stop_early(_STOP_SECONDS))
            model = self._write_model(info) if info is not None else None
            kept = "saved" if info is not None else "nothing was saved yet"
            summary = self._end("stopped", f"interrupted; {kept}", model)
        except RavnestError as error:
            self._end("failed", str(error), None)
            raise
        except Exception as error:
            self._end("failed", f"{type(error).__name__}: {error}", None)
            raise
        self._display.finish(summary)
        return TrainResult(summary, self._run.path, model)

    def close(self) -> None:
        self._metrics.close()
        self._events.close()
        self._run.close()

    @property
    def _updates(self) -> int:
        return 0 if self._info is None else self._info.updates

    def _checkpoint(self) -> CheckpointInfo:
        store = CheckpointStore(
            self._run.checkpoints_path,
            self._job.checkpoint.keep,
            lambda damaged: self._events.emit("checkpoint_damaged", damaged.reason, checkpoint=damaged.folder.name),
        )
        info = store.latest()
        if info is None:
            raise RunError(f"{self._run.path} has no good checkpoint to resume from; start afresh in another --run")
        return info

    def _prepare(self, providers: int, threads: int) -> Prepared:
        restored: CheckpointContents | None = None if self._info is None else load_checkpoint(self._info)
        prepared = prepare(self._job, threads, restored, self.coordinator.phase)
        possible = most_stages(prepared.captured.graph)
        self._events.emit(
            "captured", f"{len(prepared.captured.graph.nodes)} operators, at most {possible} stages", stages=possible
        )
        write_model(self._run.static_path, static_tensors(prepared.captured))
        return prepared

    def _feed(self, prepared: Prepared, call: Call) -> None:
        captured = prepared.captured
        feeder = Feeder(
            self._job,
            captured.structure,
            captured.graph.inputs,
            lambda item: call(self.coordinator.take(item)),
            prepared.peeked,
        )
        info = self._info
        completed = self._progress.ledger.completed
        with user_errors("the job's data"):
            if info is None:
                feeder.run()
            elif info.epoch < self._job.epochs:
                feeder.run(first_epoch=info.epoch, skip=info.position, microbatch=completed)
            else:
                feeder.evaluate()

    def _write_model(self, info: CheckpointInfo) -> Path:
        """The fused model under the user's own names."""
        contents = load_checkpoint(info)
        aliases, not_saved = info.state["aliases"], info.state["non_persistent"]
        static = load_file(self._run.static_path)
        fused = fuse(contents, aliases, static, not_saved)
        write_model(self._run.model_path, fused, {"updates": str(info.updates), "samples": str(info.samples)})
        return self._run.model_path

    def _end(self, status: Status, reason: str, model: Path | None) -> Summary:
        self._progress.pause_clock()
        summary = self._progress.summary(status, reason, None if model is None else str(model))
        with contextlib.suppress(RunError):
            self._events.emit(status, reason)
        try:
            summary.write(self._run)
        except RunError:
            # A full disk is what ended the run: the error that is being raised says so.
            if status != "failed":
                raise
        return summary

"""Final model of a run: written from the last checkpoint, and checked against what the swarm evaluated."""

from pathlib import Path

from safetensors.torch import load_file

from ravnest.coordinator.checkpoints.reader import CheckpointInfo, load_checkpoint
from ravnest.coordinator.checkpoints.store import CheckpointStore
from ravnest.coordinator.coordinator import Coordinator
from ravnest.coordinator.plan.prepared_job import PreparedJob
from ravnest.coordinator.report.phase import Phase
from ravnest.coordinator.verification.final_check import NotAsReportedError, check_written, effort_for, refusal
from ravnest.monitor.events import EventLog
from ravnest.monitor.export import fuse, write_model
from ravnest.monitor.run_directory import RunDirectory


class FinalModel:
    """The model file of one run."""

    def __init__(self, run: RunDirectory, keep: int, events: EventLog) -> None:
        """`keep` is the number of checkpoints that the run keeps."""
        self._run = run
        self._keep = keep
        self._events = events

    def write(self, info: CheckpointInfo) -> Path:
        """Writes the model of a checkpoint under the user's own parameter names."""
        contents = load_checkpoint(info)
        static = load_file(self._run.static_path)
        fused = fuse(contents, info.state["aliases"], static, info.state["non_persistent"])
        store = self._store()
        store.trust(info.updates)
        store.make_room(sum(tensor.nbytes for tensor in fused.values()))
        write_model(self._run.model_path, fused, {"updates": str(info.updates), "samples": str(info.samples)})
        return self._run.model_path

    def check(self, coordinator: Coordinator, prepared: PreparedJob, info: CheckpointInfo, model: Path) -> None:
        """Evaluates the model from its file. NotAsReportedError when the result is not what the swarm reported; the
        checkpoint is then set apart, so that no run resumes from it."""
        coordinator.enter(Phase.CHECKING)
        witnessed, source = coordinator.witnessed()
        progress = coordinator.progress
        effort = effort_for(prepared, progress.clock.elapsed_seconds)
        found = progress.check = check_written(prepared, info, model, witnessed, source, effort, progress.devices)
        figures = {"on": found.on, "samples": found.samples, "reported": found.reported, "measured": found.measured}
        if found.status != "failed":
            self._events.emit("checked", found.reason, **figures)
            return
        self._events.emit("check_failed", found.reason, **figures)
        store = self._store()
        apart = store.set_apart(info)
        before = store.latest()
        resumes_from = "the start" if before is None else f"{before.folder.name}, after {before.updates} updates"
        raise NotAsReportedError(refusal(found, model, apart, resumes_from))

    def _store(self) -> CheckpointStore:
        return CheckpointStore(self._run.checkpoints_path, self._keep)

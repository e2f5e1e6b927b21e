"""Run directory: all files of a run, locked by one coordinator at a time."""

import errno
import fcntl
import os
import re
import stat
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from ravnest.errors import RunError
from ravnest.monitor.files import TEMPORARY_SUFFIX, read_error, remove_temporaries, write_error

RUNS_FOLDER = Path("runs")

RESERVE_BYTES: Final = 64 << 10
"""Disk space reserved for the final summary and events of a run on a full disk."""


class RunPaths:
    """Paths of the files in the run directory `path`; a contract with other programs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def updates_path(self) -> Path:
        return self.path / "updates.jsonl"

    @property
    def trace_path(self) -> Path:
        return self.path / "trace.json"

    @property
    def report_path(self) -> Path:
        """Default output of `ravnest report`."""
        return self.path / "report.html"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model_path(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def profile_path(self) -> Path:
        """Cost profile of the model, measured once on the coordinator's machine."""
        return self.path / "profile.json"

    @property
    def static_path(self) -> Path:
        """Tensors of the model that no stage holds and training does not change."""
        return self.path / "static.safetensors"

    @property
    def tensorboard_path(self) -> Path:
        return self.path / "tensorboard"

    @property
    def identity_path(self) -> Path:
        """Private key and certificate of the swarm's authority; they give full control of the swarm."""
        return self.path / "identity"

    @property
    def store_path(self) -> Path:
        """Database of a served run: invites, the nodes that joined with them, and the last known state of each node."""
        return self.path / "store.sqlite"

    @property
    def lock_path(self) -> Path:
        return self.path / "lock"

    def holds_a_run(self) -> bool:
        return any(path.exists() for path in (self.summary_path, self.events_path, self.checkpoints_path))

    def was_served_without_training(self) -> bool:
        """Whether the run was served but nothing was trained: it holds only the identity and the joined nodes."""
        trained = self.metrics_path.exists() and self.metrics_path.stat().st_size > 0
        return self.identity_path.is_dir() and not trained and not self.holds_a_checkpoint()

    def holds_a_checkpoint(self) -> bool:
        return any(self.checkpoints_path.glob("[0-9]*/checkpoint.json"))


class RunDirectory(RunPaths):
    """Run directory locked by this process until `close` or the end of the process."""

    def __init__(self, path: Path, lock_descriptor: int) -> None:
        super().__init__(path)
        self._lock_descriptor = lock_descriptor
        self._reserve = path / f".reserve{TEMPORARY_SUFFIX}"

    @classmethod
    def open(cls, path: Path | None, *, job_name: str, resume: bool) -> "RunDirectory":
        """Creates and locks the folder of a new run, or locks an existing one with `resume`.

        Without a path, a new run gets `runs/<job_name>-<date>-<time>`, and `resume` takes the newest such run that has
        a checkpoint. With a path, `resume` also accepts a run that was killed before its first checkpoint, which then
        starts from the beginning. Raises RunError and changes nothing if the folder already holds a run (or other
        files), has no run to resume, is in use by another process, or cannot be written.
        """
        if path is None:
            path = _newest_run(job_name) if resume else _new_run(job_name)
        else:
            path = Path(path)
            _check_usable(RunPaths(path), resume=resume)
        run = cls(path, _locked(RunPaths(path)))
        try:
            # Checked after locking: while another process holds the run, "in use" is the more helpful error.
            _check_run_state(run, resume=resume)
            try:
                remove_temporaries(path)
                run.checkpoints_path.mkdir(exist_ok=True)
                # Random bytes: a file system that compresses would store zeros without using any space.
                run._reserve.write_bytes(os.urandom(RESERVE_BYTES))
            except OSError as error:
                raise write_error(run.checkpoints_path, error) from error
        except BaseException:
            run.close()
            raise
        return run

    def sharing_warning(self) -> str:
        """Warning if other users of this machine can read the folder; empty otherwise.

        Ravnest creates the folder of a run for its owner only. A folder that existed before keeps its mode, because it
        may be shared on purpose. The keys, the invites and the store are readable by their owner only in any case.
        """
        mode = stat.S_IMODE(self.path.stat().st_mode)
        if not mode & 0o077:
            return ""
        return (
            f"warning: other users of this machine can read {self.path} (mode {mode:04o}), which holds the model; "
            f"run `chmod 700 {self.path}` unless you share it on purpose"
        )

    def release_reserve(self) -> None:
        """Frees the reserved disk space, so that the final summary and events fit on a full disk."""
        with suppress(OSError):
            self._reserve.unlink(missing_ok=True)

    def close(self) -> None:
        """Unlocks the run; may be called repeatedly."""
        if self._lock_descriptor in _held_descriptors:
            self.release_reserve()
            _held_descriptors.discard(self._lock_descriptor)
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def check_run(path: Path | None, *, job_name: str, resume: bool) -> None:
    """Raises RunError where `RunDirectory.open` would; changes nothing, so it can be called early."""
    if path is None:
        if resume:
            _newest_run(job_name)
        return
    run = RunPaths(path)
    if path.is_dir():
        process = lock_holder(run)
        if process is not None:
            raise _in_use(run, process)
        _check_run_state(run, resume=resume)
    if resume or path.is_dir():
        _check_usable(run, resume=resume)
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise write_error(path, NotADirectoryError(errno.ENOTDIR, f"{place} is not a folder"))
    if not os.access(place, os.W_OK | os.X_OK):
        read_only = os.statvfs(place).f_flag & os.ST_RDONLY
        number = errno.EROFS if read_only else errno.EACCES
        raise write_error(path, OSError(number, os.strerror(number)))


def existing_run(path: Path) -> RunPaths:
    """The existing run at `path`, for reading; raises RunError if there is none."""
    run = RunPaths(Path(path))
    if not run.path.exists():
        raise RunError(f"there is no run at {path}; give the folder that `ravnest train` printed when it started")
    if not run.path.is_dir() or not run.holds_a_run():
        raise RunError(f"{path} is not a run directory; give the folder that `ravnest train` printed when it started")
    return run


def lock_holder(run: RunPaths) -> int | None:
    """Id of the process that holds the lock of the run, 0 if it is unknown, or None if the run is not locked."""
    try:
        descriptor = os.open(run.lock_path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise read_error(run.lock_path, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _pid_in(descriptor)
    finally:
        os.close(descriptor)
    return None


def _new_run(job_name: str) -> Path:
    base = f"{_file_name(job_name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    attempt = 1
    while True:
        path = RUNS_FOLDER / (base if attempt == 1 else f"{base}-{attempt}")
        try:
            _make_private(path)
            return path
        except FileExistsError as error:
            if not path.is_dir():
                raise write_error(path, error) from error
            attempt += 1
        except OSError as error:
            raise write_error(path, error) from error


def _make_private(path: Path) -> None:
    """Creates the folder of a run, readable by its owner only: it holds the model and the swarm's keys."""
    path.mkdir(mode=0o700, parents=True)
    # A restrictive umask may have removed permissions that the owner needs.
    path.chmod(0o700)


def _newest_run(job_name: str) -> Path:
    # The date and time in the name sort as text; a "-2" after them marks a later run of the same second.
    pattern = re.compile(re.escape(_file_name(job_name)) + r"-(\d{8}-\d{6})(?:-(\d+))?")
    found = []
    for path in RUNS_FOLDER.glob("*"):
        match = pattern.fullmatch(path.name)
        if match and RunPaths(path).holds_a_checkpoint():
            found.append((match[1], int(match[2] or 1), path))
    if not found:
        raise RunError(f"no run of {job_name} in {RUNS_FOLDER}/ has a checkpoint to resume from; name one with --run")
    return max(found)[2]


def _file_name(job_name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", job_name).strip("-.") or "job"


def _check_usable(run: RunPaths, *, resume: bool) -> None:
    try:
        if run.path.is_dir():
            names = set(os.listdir(run.path))
        elif resume:
            raise RunError(f"there is no run at {run.path} to resume; check --run, or start it without --resume")
        else:
            _make_private(run.path)
            names = set()
    except OSError as error:
        raise write_error(run.path, error) from error
    store = run.store_path.name
    before_the_first_run = {run.lock_path.name, run.identity_path.name, store, f"{store}-wal", f"{store}-shm"}
    if names - before_the_first_run and not run.holds_a_run():
        raise RunError(f"{run.path} holds other files but no run; choose an empty or new folder for --run")


def _in_use(run: RunPaths, process: int) -> RunError:
    return RunError(f"run {run.path} is in use by process {process}; stop it or choose another --run")


def _check_run_state(run: RunPaths, *, resume: bool) -> None:
    # A served run without training may be started again: the joined nodes stay admitted after a wrong job.
    if run.holds_a_run() and not resume and not run.was_served_without_training():
        raise RunError(f"{run.path} already holds a run; continue it with --resume or choose another --run")
    if resume and not run.holds_a_run():
        raise RunError(f"there is no run at {run.path} to resume; check --run, or start it without --resume")


# Forked processes (data loader workers) must not hold the lock after this process is killed.
_held_descriptors: set[int] = set()


def _release_in_child() -> None:
    for descriptor in _held_descriptors:
        os.close(descriptor)
    _held_descriptors.clear()


os.register_at_fork(after_in_child=_release_in_child)


def _locked(run: RunPaths) -> int:
    try:
        descriptor = os.open(run.lock_path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise write_error(run.lock_path, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        pid = _pid_in(descriptor)
        os.close(descriptor)
        raise _in_use(run, pid) from None
    except OSError as error:
        os.close(descriptor)
        raise write_error(run.lock_path, error) from error
    _held_descriptors.add(descriptor)
    return descriptor


def _pid_in(descriptor: int) -> int:
    text = os.pread(descriptor, 32, 0).strip()
    return int(text) if text.isdigit() else 0

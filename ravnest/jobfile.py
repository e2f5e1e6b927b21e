"""Loader of job files: the Job named by `path/to/file.py`, `file.py:name` or `package.module:name`.

The file is the user's own program and runs like any Python program. An exception inside it is reported with the user's
traceback, without frames of Ravnest.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from ravnest.errors import JobError, RavnestError
from ravnest.graph.initial_weights.recorder import DrawRecorder
from ravnest.job import Job
from ravnest.reference import parse_reference

_PACKAGE_FOLDER = Path(__file__).resolve().parent
_IN_WORKER = re.compile(r"Caught .* in DataLoader worker process \d+\.\nOriginal (Traceback .*)", re.DOTALL)


class JobFileFailed(JobError):  # noqa: N818 (an event, as opposed to a mistake in the Job itself)
    """The job file raised an exception; `user_traceback` has only the frames of the user's files."""

    def __init__(self, message: str, user_traceback: str) -> None:
        super().__init__(message)
        self.user_traceback = user_traceback


def load_job(reference: str) -> Job:
    """The Job that `reference` names.

    - Not found, not a Python file, no such name, not a Job: JobError.
    - An exception while the file runs: JobFileFailed, with the user's traceback.
    - A mistake in a Job that the file constructs: JobError with the file and line of the user's call.

    The file's folder stays at the end of sys.path, so that functions of the file can import modules next to it later.
    How the model's weights are drawn is noted, see `draws_of`.
    """
    found = parse_reference(reference)
    path = found.path
    with DrawRecorder() as recorder:
        module = _guarded(found.place, lambda: _import_module(found.place) if path is None else _run_file(path))
    job = _job_in(module, found.place, found.name)
    recorder.keep_for(job.model)
    return job


@contextlib.contextmanager
def users_code(place: str) -> Iterator[None]:
    """Context in which the user's code runs: its exceptions become JobFileFailed; a RavnestError passes unchanged."""
    try:
        yield
    except RavnestError:
        raise
    except Exception as error:
        raise _failed(place, error) from None


def _run_file(path: Path) -> ModuleType:
    folder = str(path.parent)
    spec = importlib.util.spec_from_file_location(_module_name(path), path)
    assert spec is not None and spec.loader is not None, "a path that ends in .py always has a loader"
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(spec.name)
    # Registered like an import, because data loader workers look up the classes of the file by this name.
    sys.modules[spec.name] = module
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        if before is not None:
            sys.modules[spec.name] = before
        raise
    finally:
        sys.path.remove(folder)
        # At the end, so that a module next to the file does not shadow a library module of the same name.
        if folder not in sys.path:
            sys.path.append(folder)
    return module


def _module_name(path: Path) -> str:
    loaded = sys.modules.get(path.stem)
    ours = loaded is not None and getattr(loaded, "__file__", None) == str(path)
    free = loaded is None and path.stem not in sys.stdlib_module_names and not _is_importable(path)
    return path.stem if ours or (free and path.stem.isidentifier()) else f"ravnest_job_{path.stem}"


def _is_importable(path: Path) -> bool:
    try:
        found = importlib.machinery.PathFinder.find_spec(path.stem)
    except (ImportError, ValueError):
        return True
    return found is not None and found.origin != str(path)


def _import_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module itself or a parent package is missing, as opposed to a module that it imports.
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise JobError(
                f"there is no module {error.name} in this folder or among the installed packages: check {name}"
            ) from None
        raise


def _guarded(place: str, run: Callable[[], ModuleType]) -> ModuleType:
    try:
        return run()
    except JobError as error:
        frames = _user_frames(traceback.extract_tb(error.__traceback__), strictly=True)
        where = f" ({_shortest(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
        raise JobError(f"{error}{where}") from None
    except (Exception, SystemExit) as error:
        raise _failed(place, error) from None


def _failed(place: str, error: BaseException) -> JobFileFailed:
    in_worker = _IN_WORKER.match(str(error))
    if in_worker is not None:
        text = in_worker[1].strip()
        return JobFileFailed(f"{place} failed with {text.splitlines()[-1]}", f"{_without_libraries(text)}\n")
    told = traceback.TracebackException.from_exception(error)
    _keep_user_frames(told, set())
    return JobFileFailed(_sentence(place, error), "".join(told.format()))


def _sentence(place: str, error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        at = f"{_shortest(error.filename)}:{error.lineno}" if error.filename else place
        return f"{at} is not valid Python, {error.msg}: correct it"
    if isinstance(error, SystemExit):
        return f"{place} exited before its job was read: move the exit under if __name__ == '__main__'"
    said = str(error).strip().splitlines()
    return f"{place} failed with {type(error).__name__}{': ' + said[0] if said else ''}"


def _without_libraries(text: str) -> str:
    """A formatted traceback, as data loader workers send it, without the frames of installed packages."""
    kept, keeping = [], True
    for line in text.splitlines():
        if frame := re.match(r'  File "([^"]+)", line \d+', line):
            keeping = not _is_installed(frame[1])
        elif not line.startswith("    "):
            keeping = True
        if keeping:
            kept.append(line)
    return "\n".join(kept)


def _keep_user_frames(told: traceback.TracebackException, seen: set[int]) -> None:
    if id(told) in seen:
        return
    seen.add(id(told))
    told.stack = traceback.StackSummary.from_list(_user_frames(told.stack))
    for other in (told.__cause__, told.__context__, *(getattr(told, "exceptions", None) or ())):
        if other is not None:
            _keep_user_frames(other, seen)


def _user_frames(frames: traceback.StackSummary, *, strictly: bool = False) -> list[traceback.FrameSummary]:
    """The frames of the user's own files; if there are none and not `strictly`, those of installed packages."""
    foreign = [frame for frame in frames if not _is_ours(frame.filename)]
    users = [frame for frame in foreign if not _is_installed(frame.filename)]
    return users if users or strictly else foreign


def _is_ours(filename: str) -> bool:
    # The import system and the constructor that dataclasses generates for Job; notebook cells also begin with "<".
    if filename.startswith("<frozen ") or filename == "<string>":
        return True
    path = Path(filename)
    return path.is_relative_to(_PACKAGE_FOLDER) or path.is_relative_to(Path(importlib.__file__).parent)


def _is_installed(filename: str) -> bool:
    parts = Path(filename).parts
    if "site-packages" in parts or "dist-packages" in parts:
        return True
    return Path(filename).is_relative_to(sysconfig.get_path("stdlib"))


def _shortest(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def _job_in(module: ModuleType, place: str, name: str) -> Job:
    jobs = sorted(key for key, value in vars(module).items() if isinstance(value, Job))
    if name not in vars(module):
        if jobs:
            raise JobError(f"{place} has no {name}, but it has {', '.join(jobs)}: give {place}:{jobs[0]}")
        raise JobError(f"{place} has no {name}: define one in it, {name} = ravnest.Job(...)")
    found = getattr(module, name)
    if not isinstance(found, Job):
        hint = f"it has {', '.join(jobs)}" if jobs else f"{name} = ravnest.Job(...) is expected"
        raise JobError(f"{name} in {place} is a {type(found).__name__}, not a ravnest.Job: {hint}")
    return found

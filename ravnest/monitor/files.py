"""Files that are either wholly there or not there at all, and what to tell the user when the disk refuses."""

import errno
import os
import resource
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ravnest.errors import DiskFullError, RunError

TEMPORARY_SUFFIX: Final = ".tmp"


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replaces the file at `path` by `data` in one step.

    A reader, or whoever looks after a crash, finds the old content or the new one. When the disk refuses,
    RunError names the path and the reason, and the old content is untouched.
    """
    content = data.encode() if isinstance(data, str) else data
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary file beside `path` to fill; at the end of the block it is synced and takes that name.

    When the block raises, the temporary file is gone and `path` is as it was; an OSError becomes a RunError.
    """
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        temporary.touch(exist_ok=False)
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove_temporaries(folder: Path) -> None:
    """Removes what writers that were killed left half written in `folder`."""
    for path in folder.glob(f".*{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Returns when the file's content, or the folder's list of names, has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_error(path: Path, error: OSError) -> RunError:
    """The sentence a user reads when `path` cannot be written; a DiskFullError where it is for want of space."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(
            f"cannot write {path}: the disk is full; free some space or choose a --run on another disk "
            "(what was saved before is untouched)."
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return RunError(f"cannot write {path}: {_reason(error)}; choose a --run in a folder you may write to.")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return RunError(
            f"cannot write {path}: this process has all the files open that it may ({limit}); raise the limit with "
            "`ulimit -n 65536` and continue with --resume."
        )
    return RunError(f"cannot write {path}: {_reason(error)}; choose another --run.")


def read_error(path: Path, error: OSError) -> RunError:
    """The sentence a user reads when `path` cannot be read."""
    return RunError(f"cannot read {path}: {_reason(error)}; check the path and its permissions.")


def _reason(error: OSError) -> str:
    reason = error.strerror or str(error)
    return reason[:1].lower() + reason[1:]

"""Atomic file writes, and the error messages for a disk that fails."""

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
    """Replaces the file at `path` by `data` atomically.

    A reader finds the old content or the new one, also after a crash. If the disk fails, RunError names the path and
    the reason, and the old content is unchanged.
    """
    content = data.encode() if isinstance(data, str) else data
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Provides a temporary file next to `path`, which is synced and renamed to `path` at the end of the block.

    If the block raises, the temporary file is removed and `path` is unchanged; an OSError becomes a RunError.
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
    """Removes the temporary files in `folder` that killed processes left."""
    for path in folder.glob(f".*{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flushes a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_error(path: Path, error: OSError) -> RunError:
    """The error for a `path` that cannot be written; a DiskFullError if the disk is full."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(
            f"cannot write {path}: the disk is full; free some space or choose a --run on another disk "
            "(everything saved before is intact)"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return RunError(f"cannot write {path}: {_reason(error)}; choose a --run in a folder you may write to")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return RunError(
            f"cannot write {path}: this process has reached its limit of open files ({limit}); raise it with "
            "`ulimit -n 65536` and continue with --resume"
        )
    return RunError(f"cannot write {path}: {_reason(error)}; choose another --run")


def read_error(path: Path, error: OSError) -> RunError:
    """The error for a `path` that cannot be read."""
    return RunError(f"cannot read {path}: {_reason(error)}; check the path and its permissions")


def _reason(error: OSError) -> str:
    reason = error.strerror or str(error)
    return reason[:1].lower() + reason[1:]

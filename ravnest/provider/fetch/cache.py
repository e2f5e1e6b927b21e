"""Cache of artifacts on the disk, by the hash of their content, shared by all providers of this user on this machine.

`SHA256` is a complete artifact and `SHA256.partial` one that is being downloaded. The writer holds a lock on the file,
which ends with its process. The reader hashes the bytes, so a damaged file is noticed.

Every method raises OSError when the disk is full or the folder belongs to another user, and the caller goes on without
the cache.
"""

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from ravnest.provider.machine.disk_limit import default_limit_bytes

_PIECE_BYTES: Final = 1 << 20
_PARTIAL: Final = ".partial"
_OURS: Final = re.compile(r"[0-9a-f]{64}(\.partial)?")


class ArtifactCache:
    """The cache in one folder. Any thread may call its methods; `wait` needs an event loop."""

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        """`limit_bytes` limits the size of the folder; None: DEFAULT_LIMIT_BYTES, or less on a disk that is nearly
        full."""
        self._folder = folder
        self._limit_bytes = limit_bytes

    @classmethod
    def of_user(cls, limit_bytes: int | None) -> Self | None:
        """The cache in the user's own folder; None if the user disabled it, or has no home folder."""
        given = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if limit_bytes == 0:
            return None
        if not given.is_absolute():
            try:
                given = Path.home() / ".cache"
            except RuntimeError:
                return None
        return cls(given / "ravnest" / "artifacts", limit_bytes)

    def open(self, sha256: str, size_bytes: int) -> "KeptArtifact | None":
        """The file of an artifact, perhaps still empty, locked for this caller to append.

        Makes room for all of it. None when it is larger than the cache may be. BlockingIOError while another provider
        is downloading it: call `wait` and retry.
        """
        assert _OURS.fullmatch(sha256)
        # Private, so that other users do not see which models this user trains.
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        whole = self._folder / sha256
        partial = whole.with_name(sha256 + _PARTIAL)
        while True:
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(whole, os.O_RDWR)
                # The modification time is the time of the last use.
                os.utime(descriptor)
                return KeptArtifact(whole, whole, descriptor)
            if not self._make_room(size_bytes, besides=partial):
                return None
            descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException:
                os.close(descriptor)
                raise
            kept = KeptArtifact(partial, whole, descriptor)
            if kept.is_in_place():
                return kept
            # Between opening and locking it, another process has completed or deleted the file.
            kept.close()

    async def wait(self, sha256: str) -> None:
        """Wait until no other provider is downloading this artifact."""
        try:
            descriptor = os.open(self._folder / (sha256 + _PARTIAL), os.O_RDWR)
        except FileNotFoundError:
            return
        loop = asyncio.get_running_loop()
        free = asyncio.Event()

        def take_turn() -> None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            finally:
                os.close(descriptor)
                with contextlib.suppress(RuntimeError):  # The loop is over.
                    loop.call_soon_threadsafe(free.set)

        # A thread of its own instead of the loop's executor, because waiting for a lock has no timeout and must not
        # delay an exit.
        threading.Thread(target=take_turn, name="ravnest-cache", daemon=True).start()
        await free.wait()

    def trim(self) -> None:
        """Delete the artifacts that were not used for longest, until the others are within the limit."""
        self._make_room(0, besides=None)

    def _make_room(self, size_bytes: int, besides: Path | None) -> bool:
        """Whether an artifact of this size fits, after others were deleted for it; `besides` is its own file."""
        with self._tidying():
            files = sorted(self._files(besides), key=lambda file: file.used_at)
            held = sum(file.size_bytes for file in files)
            decision, _ = files_to_delete(files, size_bytes, self._limit(held))
            if decision is None:
                return False
            for file in decision:
                _delete(file.path)
        return True

    def _limit(self, held_bytes: int) -> int:
        if self._limit_bytes is not None:
            return self._limit_bytes
        return default_limit_bytes(shutil.disk_usage(self._folder).free, held_bytes)

    def _files(self, besides: Path | None) -> "Iterator[CachedFile]":
        for entry in os.scandir(self._folder):
            if _OURS.fullmatch(entry.name) and (besides is None or entry.name != besides.name):
                with contextlib.suppress(FileNotFoundError):
                    state = entry.stat()
                    yield CachedFile(Path(entry.path), state.st_size, state.st_mtime)

    @contextlib.contextmanager
    def _tidying(self) -> Iterator[None]:
        # The lock is only held while the folder is listed, so waiting for it is short.
        descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file in the cache, and the time of its last use."""

    path: Path
    size_bytes: int
    used_at: float


def files_to_delete(files: list[CachedFile], size_bytes: int, limit_bytes: int) -> tuple[list[CachedFile] | None, str]:
    """The files to delete so that an artifact of this size fits, least recently used first; None when that is
    impossible. With the reason."""
    if size_bytes > limit_bytes:
        return None, f"{size_bytes} bytes are more than the {limit_bytes} that may be kept"
    over = sum(file.size_bytes for file in files) + size_bytes - limit_bytes
    going: list[CachedFile] = []
    for file in sorted(files, key=lambda file: file.used_at):
        if over <= 0:
            break
        going.append(file)
        over -= file.size_bytes
    return going, f"{len(going)} of {len(files)} files go for {size_bytes} bytes"


class KeptArtifact:
    """The file of one artifact, complete or partial. Close it after use."""

    def __init__(self, path: Path, whole: Path, descriptor: int) -> None:
        self.size_bytes = os.fstat(descriptor).st_size
        """Number of bytes that are there."""
        self._path = path
        self._whole = whole
        self._descriptor = descriptor

    def read(self, offset: int) -> bytes:
        """Some bytes from `offset` on; none at the end."""
        return os.pread(self._descriptor, _PIECE_BYTES, offset)

    def append(self, data: bytes) -> None:
        """Add the bytes that follow."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, self.size_bytes)
            self.size_bytes += written
            view = view[written:]

    def finish(self) -> None:
        """The file is complete and checked: others may use it from now on."""
        if self._path != self._whole:
            os.replace(self._path, self._whole)
            self._path = self._whole

    def discard(self) -> None:
        """Delete the file, unless its name leads to another one by now."""
        if self.is_in_place():
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the file for others; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def is_in_place(self) -> bool:
        """Whether the file's name still leads to this file."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False


def _delete(path: Path) -> None:
    """Delete a file, unless a provider is writing to it. A file that is being read is freed when its reader
    closes it."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError):
        descriptor = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(descriptor)

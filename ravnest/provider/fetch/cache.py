"""Artifacts on a provider's disk, by the hash of their content, shared by all providers of this user on this machine.

`SHA256` is a whole artifact, `SHA256.partial` one that is on its way; whoever writes to it holds a lock on it, which
ends with its process. What is read is hashed by the reader, so nothing here is believed because it is here.

What happens on failure: every method lets OSError through (the disk is full, the folder is somebody else's), and the
caller goes on without the cache.
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

DEFAULT_LIMIT_BYTES: Final = 20 << 30
"""How much is kept unless the user says otherwise; and never more than half of what would be free without it."""

_PIECE_BYTES: Final = 1 << 20
_PARTIAL: Final = ".partial"
_OURS: Final = re.compile(r"[0-9a-f]{64}(\.partial)?")


class ArtifactCache:
    """One folder. Methods may be called from any thread; `wait` belongs to an event loop."""

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        """`limit_bytes` bounds what the folder holds; None: DEFAULT_LIMIT_BYTES, less on a disk that is nearly full."""
        self._folder = folder
        self._limit_bytes = limit_bytes

    @classmethod
    def of_user(cls, limit_bytes: int | None) -> Self | None:
        """The cache in the user's own folder; None where the user wants none, or has no home."""
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
        """What is kept of an artifact, perhaps nothing yet, for this caller alone to add to.

        Makes room for all of it. None when it is larger than the cache may be. BlockingIOError while another provider
        is fetching it: `wait` and ask again.
        """
        assert _OURS.fullmatch(sha256)
        # Others need not know what this user trains.
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        whole = self._folder / sha256
        partial = whole.with_name(sha256 + _PARTIAL)
        while True:
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(whole, os.O_RDWR)
                # Its time says when it was used last.
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
            # Between the opening and the lock somebody has finished it or thrown it out.
            kept.close()

    async def wait(self, sha256: str) -> None:
        """Until nobody else is fetching this artifact."""
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

        # Of its own, and no daemon of the loop's: a lock cannot be waited for with an end, nor should an exit wait.
        threading.Thread(target=take_turn, name="ravnest-cache", daemon=True).start()
        await free.wait()

    def trim(self) -> None:
        """Throws out what was used longest ago until the rest is within the limit."""
        self._make_room(0, besides=None)

    def _make_room(self, size_bytes: int, besides: Path | None) -> bool:
        """Whether an artifact of this size fits, once others have been thrown out for it; `besides` is its own file."""
        with self._tidying():
            files = sorted(self._files(besides), key=lambda file: file.used_at)
            held = sum(file.size_bytes for file in files)
            decision, _ = what_to_throw_out(files, size_bytes, self._limit(held))
            if decision is None:
                return False
            for file in decision:
                _throw_out(file.path)
        return True

    def _limit(self, held_bytes: int) -> int:
        if self._limit_bytes is not None:
            return self._limit_bytes
        return min(DEFAULT_LIMIT_BYTES, (shutil.disk_usage(self._folder).free + held_bytes) // 2)

    def _files(self, besides: Path | None) -> "Iterator[CachedFile]":
        for entry in os.scandir(self._folder):
            if _OURS.fullmatch(entry.name) and (besides is None or entry.name != besides.name):
                with contextlib.suppress(FileNotFoundError):
                    state = entry.stat()
                    yield CachedFile(Path(entry.path), state.st_size, state.st_mtime)

    @contextlib.contextmanager
    def _tidying(self) -> Iterator[None]:
        # Only ever held for a look at the folder: whoever waits for it does so for a moment.
        descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class CachedFile:
    """What the cache holds, and when it was used last."""

    path: Path
    size_bytes: int
    used_at: float


def what_to_throw_out(
    files: list[CachedFile], size_bytes: int, limit_bytes: int
) -> tuple[list[CachedFile] | None, str]:
    """What has to go so that an artifact of this size fits, the longest unused first; None when nothing would help."""
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
    """The file of one artifact, whole or in part. To be closed."""

    def __init__(self, path: Path, whole: Path, descriptor: int) -> None:
        self.size_bytes = os.fstat(descriptor).st_size
        """How much of it is there."""
        self._path = path
        self._whole = whole
        self._descriptor = descriptor

    @property
    def name(self) -> str:
        return self._path.name

    def read(self, offset: int) -> bytes:
        """Some bytes from `offset` on; none at the end."""
        return os.pread(self._descriptor, _PIECE_BYTES, offset)

    def append(self, data: bytes) -> None:
        """Adds the bytes that follow."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, self.size_bytes)
            self.size_bytes += written
            view = view[written:]

    def finish(self) -> None:
        """It is whole and has been checked: from now on others may use it."""
        if self._path != self._whole:
            os.replace(self._path, self._whole)
            self._path = self._whole

    def discard(self) -> None:
        """Removes the file, unless another has taken its place."""
        if self.is_in_place():
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Lets others have it; may be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def is_in_place(self) -> bool:
        """Whether this file is still the one that its name leads to."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False


def _throw_out(path: Path) -> None:
    """Removes a file, unless a provider is writing to it. One that is being read goes when its reader is done."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError):
        descriptor = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(descriptor)

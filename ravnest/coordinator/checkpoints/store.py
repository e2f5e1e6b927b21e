"""Checkpoint store: writes each checkpoint under a temporary name, syncs it, and renames it once it is complete."""

import asyncio
import errno
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ravnest.coordinator.checkpoints.disk_space import DiskRoom
from ravnest.coordinator.checkpoints.part_check import BadPartError
from ravnest.coordinator.checkpoints.reader import (
    FORMAT,
    MANIFEST_NAME,
    CheckpointContents,
    CheckpointInfo,
    DamagedCheckpoint,
    checkpoint_folders,
    load_checkpoint,
    newest_good,
    read_manifest,
)
from ravnest.errors import DiskFullError, PeerError, RunError
from ravnest.monitor.files import sync, write_error

_PENDING: Final = ".pending-"
_THROWN: Final = "-thrown"
_TRIES: Final = 3
"""Attempts to remove a folder: a thread that opened it before the rename may still add a file."""
_REPLACED: Final = ".replaced-"


class CheckpointStore:
    """The checkpoints of one run, of which the newest `keep` stay.

    - Opening the store removes checkpoints that a crash left incomplete. A save that fails never touches a committed
      checkpoint.
    - When the disk is nearly full, older checkpoints are removed early to make room, but never the newest good one.
    - A damaged checkpoint is skipped, and `on_damaged` is called with its folder and the reason.
    - One process at a time may open the store of a run, which the run directory's lock ensures; readers use
      `newest_good` and `find_checkpoint`.
    """

    def __init__(self, folder: Path, keep: int, on_damaged: Callable[[DamagedCheckpoint], None] | None = None) -> None:
        assert keep >= 1, "a store that keeps nothing could not be resumed from"
        self._folder = folder
        self._keep = keep
        self._on_damaged = on_damaged
        self._damaged: set[Path] = set()
        self._newest: CheckpointInfo | None = None
        """The newest checkpoint that is known to be good."""
        self._begun, self._highest = 0, -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _clean_up(folder)
        except OSError as error:
            raise write_error(folder, error) from error

    def begin(self, checkpoint_id: int, needed_bytes: int = 0) -> "PendingCheckpoint":
        """A new checkpoint to be filled; it counts only after `commit`.

        DiskFullError when there is no room for a checkpoint of `needed_bytes`, and none could be made.
        """
        # A run that went back repeats numbers, and a thread may still be writing the checkpoint with this one.
        self._begun += 1
        again = f"-{self._begun}" if checkpoint_id <= self._highest else ""
        self._highest = max(self._highest, checkpoint_id)
        folder = self._folder / f"{_PENDING}{checkpoint_id}{again}"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            self.make_room(needed_bytes)
            room = self.room()
            if room.missing_bytes(needed_bytes):
                raise DiskFullError(
                    f"there is no room for a checkpoint in {self._folder}: {room.lacking(needed_bytes)}"
                )
            folder.mkdir()
        except OSError as error:
            raise write_error(folder, error) from error
        return PendingCheckpoint(self, folder, checkpoint_id)

    def trust(self, updates: int) -> None:
        """The checkpoint after this number of updates, if there is one, has been verified by resuming from it."""
        folder = self._folder / f"{updates:010d}"
        if self._newest is None and folder.is_dir():
            with suppress(RunError):
                self._newest = read_manifest(folder)

    def set_apart(self, info: CheckpointInfo) -> Path:
        """Renames a checkpoint so that no run resumes from it; its new folder."""
        apart = info.folder.with_name(f"{info.folder.name}-not-as-reported")
        try:
            shutil.rmtree(apart, ignore_errors=True)
            os.rename(info.folder, apart)
        except OSError as error:
            raise write_error(info.folder, error) from error
        self._newest = None
        return apart

    def room(self) -> DiskRoom:
        """The free space of its disk; RunError when the system does not tell."""
        try:
            return DiskRoom.of(self._folder)
        except OSError as error:
            raise write_error(self._folder, error) from error

    def make_room(self, needed_bytes: int) -> list[str]:
        """Removes the oldest checkpoints until there is room for `needed_bytes`; returns their names.

        The newest good one always stays.
        """
        removed: list[str] = []
        if not self.room().missing_bytes(needed_bytes):
            return removed
        newest = self._newest or self.latest()
        if newest is None:
            return removed
        older = [path for path in checkpoint_folders(self._folder) if path.name < newest.folder.name]
        while older and self.room().missing_bytes(needed_bytes):
            shutil.rmtree(older[-1], ignore_errors=True)
            removed.append(older.pop().name)
        return removed

    @property
    def newest(self) -> CheckpointInfo | None:
        """The newest checkpoint that is known to be good."""
        return self._newest

    @property
    def newest_bytes(self) -> int:
        """The size of the newest checkpoint that is known to be good; 0 without one."""
        return 0 if self._newest is None else sum(part["size"] for part in self._newest.manifest["parts"])

    def latest(self) -> CheckpointInfo | None:
        """The newest checkpoint that verifies byte for byte; None without one."""
        info, damaged = newest_good(self._folder)
        self._newest = info
        for item in damaged:
            self._damaged.add(item.folder)
            if self._on_damaged is not None:
                self._on_damaged(item)
        return info

    def load(self, info: CheckpointInfo) -> CheckpointContents:
        """The contents of a checkpoint that `latest` returned."""
        return load_checkpoint(info)

    def _publish(self, pending: Path, updates: int) -> Path:
        final = self._folder / f"{updates:010d}"
        replaced = self._folder / f"{_REPLACED}{final.name}"
        if final.exists():
            # Between the two renames the old one has the name that _clean_up gives back.
            os.rename(final, replaced)
        os.rename(pending, final)
        sync(self._folder)
        shutil.rmtree(replaced, ignore_errors=True)
        self._damaged.discard(final)
        self._retain(final)
        return final

    def _retain(self, newest: Path) -> None:
        # Folders with more updates than the newest are damaged checkpoints of a run that went back: they do not count.
        older = [path for path in checkpoint_folders(self._folder) if path.name < newest.name]
        good = [path for path in older if path not in self._damaged]
        for path in {*good[self._keep - 1 :], *(set(older) - set(good))}:
            shutil.rmtree(path, ignore_errors=True)


class PendingCheckpoint:
    """A checkpoint that is being written. End it with `commit` or `abort`."""

    def __init__(self, store: CheckpointStore, folder: Path, checkpoint_id: int) -> None:
        self._store = store
        self._folder = folder
        self._checkpoint_id = checkpoint_id
        self._parts: dict[int, dict[str, Any]] = {}
        self._writers: dict[int, _PartFile] = {}
        self._aborted = False

    async def write_part(
        self, stage: int, chunks: AsyncIterator[bytes], check: Callable[[Path], None] = lambda _: None, sha256: str = ""
    ) -> None:
        """Streams one stage's safetensors file to the disk and hashes it; several calls may run at once.

        RunError when the disk refuses, BadPartError when the file has another hash than `sha256` if that is given;
        other exceptions of `chunks` and `check` pass through. The part then does not count, and neither does one that
        another connection sends again. After `abort`, the rest is read and discarded.
        """
        self._parts.pop(stage, None)
        file = await asyncio.to_thread(_PartFile, self._folder / f"part-{stage}.safetensors")
        self._writers[stage] = file
        try:
            async for chunk in chunks:
                if self._aborted:
                    continue
                # Otherwise many abandoned connections that keep sending would fill the disk.
                self._check_newest(stage, file)
                await asyncio.to_thread(file.write, chunk)
            if self._aborted:
                return
            part = await asyncio.to_thread(file.finish)
            if self._aborted:
                return
            if sha256 not in ("", part["sha256"]):
                raise BadPartError(f"the part of stage {stage} has another sha256 than its owner reported")
            try:
                await asyncio.to_thread(check, file.path)
            finally:
                # Otherwise the check may have read the other connection's file.
                self._check_newest(stage, file)
            self._parts[stage] = part
        finally:
            file.close()

    def _check_newest(self, stage: int, file: "_PartFile") -> None:
        if self._writers[stage] is not file:
            raise PeerError(f"the part of stage {stage} is being sent again over another connection")

    def commit(
        self,
        *,
        updates: int,
        samples: int,
        epoch: int,
        position: int,
        ledger: Mapping[str, Any],
        state: Mapping[str, Any],
        created_at: float | None = None,
    ) -> CheckpointInfo:
        """Makes the checkpoint count: writes the manifest, syncs, renames, and removes the oldest checkpoint. Its state
        was recorded at the time `created_at` (seconds since 1970; None: now).

        It blocks on the disk, so an event loop calls it in a thread. RunError when the disk refuses: the folder is then
        removed, and the earlier checkpoints are unchanged.
        """
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "checkpoint": self._checkpoint_id,
            "updates": updates,
            "samples": samples,
            "epoch": epoch,
            "position": position,
            "parts": [self._parts[stage] for stage in sorted(self._parts)],
            "ledger": dict(ledger),
            "state": dict(state),
            "created_at": time.time() if created_at is None else created_at,
        }
        text = json.dumps(manifest, indent=1, allow_nan=False)
        path = self._folder / MANIFEST_NAME
        try:
            path.write_text(text)
            sync(path)
            sync(self._folder)
            final = self._store._publish(self._folder, updates)
        except OSError as error:
            self.abort()
            raise write_error(path, error) from error
        # Parsed from the written text, so that a resumed run sees the same values as this one.
        info = self._store._newest = CheckpointInfo(final, json.loads(text))
        return info

    def abort(self) -> None:
        """Discards the checkpoint; after `commit` it does nothing."""
        self._aborted = True
        for file in list(self._writers.values()):
            # An open file would keep its space on the disk until its upload ends.
            file.close()
        thrown = self._folder.with_name(f"{self._folder.name}{_THROWN}")
        try:
            # Renamed first, so that a thread that is about to write a part finds no folder.
            os.rename(self._folder, thrown)
        except OSError:
            thrown = self._folder
        for _ in range(_TRIES):
            shutil.rmtree(thrown, ignore_errors=True)
            if not thrown.exists():
                return


class _PartFile:
    """One part that is being written; RunError when the disk refuses."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest = hashlib.sha256()
        self._size = 0
        # A cancelled upload closes the file, possibly while a thread writes to it.
        self._lock = threading.Lock()
        try:
            # A dead connection may still write to the old file, which then no longer has a name.
            path.unlink(missing_ok=True)
            self._file = open(path, "xb", buffering=0)  # noqa: SIM115  (closed by its owner)
        except OSError as error:
            raise write_error(path, error) from error

    def write(self, chunk: bytes) -> None:
        with self._lock:
            if self._file.closed:
                return
            view = memoryview(chunk)
            try:
                if DiskRoom.of(self._file.fileno()).missing_bytes(len(chunk)):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                while view:
                    view = view[self._file.write(view) :]
            except OSError as error:
                raise write_error(self.path, error) from error
            self._digest.update(chunk)
            self._size += len(chunk)

    def finish(self) -> dict[str, Any]:
        """Syncs the file and returns its entry in the manifest, which does not count if it was closed before."""
        with self._lock:
            try:
                if self._file.closed:
                    return {}
                os.fsync(self._file.fileno())
            except OSError as error:
                raise write_error(self.path, error) from error
        return {"file": self.path.name, "size": self._size, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        with self._lock:
            self._file.close()


def _clean_up(folder: Path) -> None:
    for path in folder.glob(f"{_REPLACED}*"):
        original = folder / path.name.removeprefix(_REPLACED)
        if original.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.rename(path, original)
    for path in folder.glob(f"{_PENDING}*"):
        with suppress(FileNotFoundError):
            shutil.rmtree(path)

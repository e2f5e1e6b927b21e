"""Saving checkpoints: each is written aside, synced, and given its name only when it is whole."""

import asyncio
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

from ravnest.coordinator.checkpoint_reading import (
    FORMAT,
    MANIFEST_NAME,
    CheckpointContents,
    CheckpointInfo,
    DamagedCheckpoint,
    checkpoint_folders,
    find_checkpoint,
    load_checkpoint,
    newest_good,
)
from ravnest.errors import PeerError
from ravnest.monitor.files import sync, write_error

__all__ = [
    "CheckpointContents",
    "CheckpointInfo",
    "CheckpointStore",
    "DamagedCheckpoint",
    "PendingCheckpoint",
    "find_checkpoint",
    "load_checkpoint",
    "newest_good",
]

_PENDING: Final = ".pending-"
_REPLACED: Final = ".replaced-"


class CheckpointStore:
    """The checkpoints of one run, of which the newest `keep` stay.

    - What a crash left half written is removed when the store is opened; what was committed is never
      touched by a save that fails.
    - A damaged checkpoint is passed over, and its folder and reason are given to `on_damaged`.
    - One process at a time may open the store of a run (the run directory's lock sees to it); readers use
      `newest_good` and `find_checkpoint`.
    """

    def __init__(self, folder: Path, keep: int, on_damaged: Callable[[DamagedCheckpoint], None] | None = None) -> None:
        assert keep >= 1, "a store that keeps nothing could not be resumed from"
        self._folder = folder
        self._keep = keep
        self._on_damaged = on_damaged
        self._damaged: set[Path] = set()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _clean_up(folder)
        except OSError as error:
            raise write_error(folder, error) from error

    def begin(self, checkpoint_id: int) -> "PendingCheckpoint":
        """A new checkpoint to be filled; it counts only after `commit`."""
        folder = self._folder / f"{_PENDING}{checkpoint_id}"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        except OSError as error:
            raise write_error(folder, error) from error
        return PendingCheckpoint(self, folder, checkpoint_id)

    def latest(self) -> CheckpointInfo | None:
        """The newest checkpoint whose every byte is as it was written; None when there is none."""
        info, damaged = newest_good(self._folder)
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
        # Folders above the newest are damaged ones of a run that went back behind them: they hold no place.
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

    async def write_part(
        self, stage: int, chunks: AsyncIterator[bytes], check: Callable[[Path], None] = lambda _: None
    ) -> None:
        """Streams one stage's safetensors file to the disk, hashing on the way; several may run at once.

        RunError when the disk refuses; whatever else `chunks` or `check` raises passes through. The part then does not
        count, and neither does one that is being sent again, over another connection.
        """
        self._parts.pop(stage, None)
        file = await asyncio.to_thread(_PartFile, self._folder / f"part-{stage}.safetensors")
        self._writers[stage] = file
        try:
            async for chunk in chunks:
                # Else each of many that are begun, and go on for long, would fill the disk with what is nobody's.
                self._check_newest(stage, file)
                await asyncio.to_thread(file.write, chunk)
            part = await asyncio.to_thread(file.finish)
            try:
                await asyncio.to_thread(check, file.path)
            finally:
                # If it is not, the check may have read the other's file.
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
    ) -> CheckpointInfo:
        """Makes the checkpoint count: writes the manifest, syncs, renames, and lets go of the oldest.

        Waits for the disk, so an event loop calls it in a thread. RunError when the disk refuses: the
        folder is then removed and the checkpoints before it are as they were.
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
            "created_at": time.time(),
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
        # Read back from its text, so that a resumed run sees the same plain values as this one.
        return CheckpointInfo(final, json.loads(text))

    def abort(self) -> None:
        """Throws away what was written; after `commit` it does nothing."""
        shutil.rmtree(self._folder, ignore_errors=True)


class _PartFile:
    """One part on its way to the disk; what the disk refuses is a RunError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest = hashlib.sha256()
        self._size = 0
        # A cancelled upload closes the file while a thread may still write: never under it.
        self._lock = threading.Lock()
        try:
            # Another that writes to it still, over a connection that is dead, keeps a file that is nobody's.
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
                while view:
                    view = view[self._file.write(view) :]
            except OSError as error:
                raise write_error(self.path, error) from error
            self._digest.update(chunk)
            self._size += len(chunk)

    def finish(self) -> dict[str, Any]:
        """Syncs the file and describes it as the manifest does."""
        with self._lock:
            try:
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

"""Uploads of a stage's state to a checkpoint of the coordinator.

These are the checkpoints that cannot be collected from replicas: of a single provider, of a round, and the last one.
The stage writes its state to a file (state_file.py), which is uploaded while the stage goes on training. Without room
on the disk a copy in main memory takes its place. Only without room there does the stage wait until its own tensors are
uploaded, and says so. On failure:

- the upload fails, or the coordinator refuses it: the stage fails;
- the coordinator was restarted and no longer wants the checkpoint: the upload is dropped and the stage goes on.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from ravnest.errors import RefusedError, error_text
from ravnest.graph.weights import stream_tensors
from ravnest.provider.replicas.outgoing import OutgoingTransfers
from ravnest.provider.stage.failure import FirstFailure, StageFailure
from ravnest.provider.stage.records import StageRecords
from ravnest.provider.stage.state_file import StateFile
from ravnest.units import byte_size

Tensors = Mapping[str, torch.Tensor]
Chunks = Callable[[], AsyncIterator[bytes]]
Upload = Callable[[str, Callable[[], AsyncIterator[bytes]]], Coroutine[Any, Any, None]]
"""Uploads the chunks of an iterator under a name. The function that makes the iterator is called again on a retry."""

RESTART_SECONDS: Final = 5.0
"""Time within which a provider learns that its coordinator was restarted."""


class CheckpointUploads:
    """The checkpoint uploads of one generation of a stage. `save` runs on the engine's thread, the rest on the loop."""

    def __init__(
        self,
        upload: Upload,
        records: StageRecords,
        failures: FirstFailure,
        transfers: OutgoingTransfers,
        *,
        has_room: Callable[[int], bool] = lambda size_bytes: False,
        outer_state: Callable[[], Tensors] = dict,
        restart_seconds: float = RESTART_SECONDS,
        folder: Path | None = None,
    ) -> None:
        """`has_room` tells whether main memory has room for a copy of this size; `outer_state` gives what the outer
        optimizer remembers, for a checkpoint whose tensors lack it. Both are called on the engine's thread. `folder` is
        for files with the state; None: without files."""
        self._upload = upload
        self._records = records
        self._failures = failures
        self._transfers = transfers
        self._has_room = has_room
        self._outer_state = outer_state
        self._restart_seconds = restart_seconds
        self._folder = folder
        self.say: Callable[[str], None] = lambda text: None
        """Prints a line for the user. Called on the engine's thread."""
        self._loop = asyncio.get_running_loop()
        self._uploading: Future[None] | None = None
        self._is_over = False
        self._is_unwanted = threading.Event()

    def save(self, checkpoint: int, tensors: Tensors, metadata: Mapping[str, str]) -> None:
        """Upload the stage's state. Returns when the caller may change the tensors again."""
        if self._is_unwanted.is_set():
            return
        name = upload_name(checkpoint)
        if not any(key.startswith("outer:") for key in tensors):
            tensors = {**tensors, **self._outer_state()}
        size_bytes = _size_bytes(tensors)
        file = None if self._folder is None else StateFile.write(self._folder, tensors, metadata)
        if file is not None:
            self._upload_later(checkpoint, name, size_bytes, file.chunks, file.close)
        elif self._has_room(size_bytes):
            copies = copied(tensors)
            self._upload_later(checkpoint, name, size_bytes, partial(_chunks, copies, dict(metadata)))
        else:
            self._upload_own(checkpoint, name, tensors, metadata)

    def close(self) -> None:
        """Cancel the upload under way and any later one, so that the worker does not wait for it."""
        self._is_over = True
        self._cancel()

    def on_coordinator_gone(self) -> None:
        """Drop the upload under way and any later one: the coordinator that wanted them is gone."""
        self._is_unwanted.set()
        self._cancel()

    def _cancel(self) -> None:
        if self._uploading is not None:
            self._uploading.cancel()

    def _upload_later(
        self, checkpoint: int, name: str, size_bytes: int, chunks: Chunks, close: Callable[[], None] = lambda: None
    ) -> None:
        # The coordinator has given up the previous checkpoint if it does not have it by now.
        self._cancel()
        work = self._upload_in_background(checkpoint, name, size_bytes, chunks, close)
        self._uploading = asyncio.run_coroutine_threadsafe(work, self._loop)
        if self._is_over or self._is_unwanted.is_set():
            self._cancel()

    async def _upload_in_background(
        self, checkpoint: int, name: str, size_bytes: int, chunks: Chunks, close: Callable[[], None]
    ) -> None:
        try:
            with self._transfers.sending("checkpoint", name, size_bytes) as sending:
                await self._upload(name, lambda: sending.counted(chunks()))
        except Exception as error:
            is_refused = isinstance(error, RefusedError)
            if is_refused and await asyncio.to_thread(self._is_unwanted.wait, self._restart_seconds):
                # The coordinator was restarted, and the new process has never asked for this checkpoint.
                return
            text = error_text(error)
            self._failures.report(StageFailure("error", text))
            return
        finally:
            close()
        self._records.saved(checkpoint)

    def _upload_own(self, checkpoint: int, name: str, tensors: Tensors, metadata: Mapping[str, str]) -> None:
        size_bytes = _size_bytes(tensors)
        self.say(
            f"the stage waits while its state is uploaded ({byte_size(size_bytes)}): neither the disk nor the memory "
            "has room for a copy; free some space"
        )
        with self._transfers.sending("checkpoint", name, size_bytes) as sending:
            upload = self._upload(name, lambda: sending.counted(_chunks(tensors, metadata)))
            self._uploading = asyncio.run_coroutine_threadsafe(upload, self._loop)
            if self._is_over:
                self._cancel()
            try:
                self._uploading.result()
            except (CancelledError, RefusedError):
                # Perhaps the coordinator was restarted, and the new process has never asked for this checkpoint.
                if self._is_over or not self._is_unwanted.wait(self._restart_seconds):
                    raise
                return
        self._records.saved(checkpoint)


def upload_name(checkpoint: int) -> str:
    """Name under which a stage uploads its part of a checkpoint."""
    return f"checkpoint-{checkpoint}"


def copied(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Copies of these tensors in main memory."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _size_bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


async def _chunks(tensors: Tensors, metadata: Mapping[str, str]) -> AsyncIterator[bytes]:
    for chunk in stream_tensors(tensors, metadata):
        yield chunk

"""State file: a stage's state on the disk until it is uploaded, so that no copy of it takes main memory.

The file has no name, so nothing of it stays when the process ends. The system keeps its bytes in its cache of the disk,
and gives that memory to whatever needs it.
"""

import asyncio
import io
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final, Self

import torch

from ravnest.graph.weights import stream_tensors

_PIECE_BYTES: Final = 1 << 20
_SPARE_SHARE: Final = 0.1
"""Share of the disk's free space that stays free."""


class StateFile:
    """One state, until `close` or until nothing refers to it."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file

    @classmethod
    def write(cls, folder: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Self | None:
        """Writes the state, which may change afterwards. None if the folder's disk has no room for it, or fails."""
        size_bytes = sum(tensor.nbytes for tensor in tensors.values())
        try:
            if shutil.disk_usage(folder).free * (1 - _SPARE_SHARE) < size_bytes:
                return None
            found = cls(tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115 (closed with the state)
            for data in stream_tensors(tensors, metadata):
                found._add(data)
        except OSError:
            return None
        return found

    async def chunks(self) -> AsyncIterator[bytes]:
        """The state as `stream_tensors` yields it, from its beginning."""
        offset = 0
        while data := await asyncio.to_thread(os.pread, self._file.fileno(), _PIECE_BYTES, offset):
            offset += len(data)
            yield data

    def close(self) -> None:
        """Gives the disk's space back; idempotent."""
        self._file.close()

    def _add(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

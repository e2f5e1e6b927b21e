"""Counters of the uploads that a provider has under way, as the coordinator receives them.

`health/uploads.py` judges from them whether an upload makes progress. `Uploads` belongs to the network's loop.
"""

import contextlib
import math
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class UploadProgress:
    """State of an upload at one moment."""

    done_bytes: int
    seconds: float
    """Time since the upload began."""
    still_seconds: float
    """Time since bytes last came."""
    is_writing: bool = False
    """Whether the coordinator itself is busy with the bytes that have arrived: its disk may be slow."""


@dataclass
class Upload:
    """One upload that is under way; times are of the clock `time.monotonic`."""

    name: str
    began_at: float
    moved_at: float
    """When bytes last came, or the coordinator had last finished with some."""
    done_bytes: int = 0
    is_writing: bool = False

    async def counted(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Passes the chunks through, and counts them."""
        async for data in chunks:
            self.done_bytes += len(data)
            self.moved_at, self.is_writing = time.monotonic(), True
            yield data
            self.moved_at, self.is_writing = time.monotonic(), False
        self.is_writing = True

    def progress(self, now: float, since: float = 0.0) -> UploadProgress:
        """The state of the upload; no time before `since` counts."""
        still_seconds = max(0.0, now - max(self.moved_at, since))
        return UploadProgress(self.done_bytes, now - max(self.began_at, since), still_seconds, self.is_writing)


@dataclass
class Uploads:
    """The uploads of one provider in one session."""

    under_way: list[Upload] = field(default_factory=list)
    last_at: float = -math.inf
    """When bytes of an upload that has ended last came."""

    @contextlib.contextmanager
    def track(self, name: str) -> Iterator[Upload]:
        """An upload that is under way until the block ends."""
        now = time.monotonic()
        upload = Upload(name, now, now)
        self.under_way.append(upload)
        try:
            yield upload
        finally:
            self.under_way.remove(upload)
            self.last_at = max(self.last_at, upload.moved_at)

    def named(self, name: str) -> Upload | None:
        """The upload of this name that is under way."""
        return next((upload for upload in self.under_way if upload.name == name), None)

    @property
    def heard_at(self) -> float:
        """When bytes of any upload last came; -inf before the first."""
        return max([self.last_at, *(upload.moved_at for upload in self.under_way if upload.done_bytes)])

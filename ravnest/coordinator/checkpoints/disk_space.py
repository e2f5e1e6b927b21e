"""Disk space for checkpoints. A reserve stays free for the files that a run must be able to write until its end."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from ravnest.units import byte_size

MAX_RESERVED_BYTES: Final = 16 << 20
RESERVED_SHARE: Final = 0.05


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """The free space of a disk."""

    total_bytes: int
    free_bytes: int

    @classmethod
    def of(cls, place: Path | int) -> Self:
        """The disk of this folder or open file; OSError when there is none."""
        found = os.statvfs(place)
        return cls(found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail)

    @property
    def for_checkpoints(self) -> int:
        """Bytes that a checkpoint may take. Metrics, events and the summary have the rest to themselves: a missing
        checkpoint does not end a run, but a log that cannot be written does."""
        return max(0, self.free_bytes - min(MAX_RESERVED_BYTES, int(RESERVED_SHARE * self.total_bytes)))

    def missing_bytes(self, needed_bytes: int) -> int:
        """Bytes that are missing for a checkpoint of this size; 0 when it fits."""
        return max(0, needed_bytes - self.for_checkpoints)

    def lacking(self, needed_bytes: int) -> str:
        """In words, like "it needs 1.2 GiB, and 300 MiB are free for it: 900 MiB are missing"."""
        needs = f"it needs {byte_size(needed_bytes)}, and {byte_size(self.for_checkpoints)} are free for it"
        missing = self.missing_bytes(needed_bytes)
        return f"{needs}: {byte_size(missing)} are missing" if missing >= 1 << 19 else needs

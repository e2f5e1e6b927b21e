"""How much room a checkpoint may take: some is left for what a run must be able to write until its end."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from ravnest.units import byte_size

MAX_RESERVED_BYTES: Final = 16 << 20
RESERVED_SHARE: Final = 0.05


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """What is left on a disk."""

    total_bytes: int
    free_bytes: int

    @classmethod
    def of(cls, place: Path | int) -> Self:
        """Of the disk of this folder or open file; OSError where there is none."""
        found = os.statvfs(place)
        return cls(found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail)

    @property
    def for_checkpoints(self) -> int:
        """Metrics, events and the summary have the last of it to themselves: a checkpoint less is no reason to end a
        run, a log that cannot be written is."""
        return max(0, self.free_bytes - min(MAX_RESERVED_BYTES, int(RESERVED_SHARE * self.total_bytes)))

    def missing_bytes(self, needed_bytes: int) -> int:
        """How much more a checkpoint of this size needs; 0 where there is room for it."""
        return max(0, needed_bytes - self.for_checkpoints)

    def lacking(self, needed_bytes: int) -> str:
        """Like "it needs 1.2 GiB, and 300 MiB are free for it: 900 MiB are missing"."""
        needs = f"it needs {byte_size(needed_bytes)}, and {byte_size(self.for_checkpoints)} are free for it"
        missing = self.missing_bytes(needed_bytes)
        return f"{needs}: {byte_size(missing)} are missing" if missing >= 1 << 19 else needs

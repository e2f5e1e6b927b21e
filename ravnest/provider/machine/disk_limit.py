"""Disk space that a provider uses for files that outlive a run, unless its user sets a limit."""

from typing import Final

DEFAULT_LIMIT_BYTES: Final = 20 << 30
"""Default limit of the cache, and of the parts of replicas."""


def default_limit_bytes(free_bytes: int, held_bytes: int) -> int:
    """The default limit on a disk with this much free space, of files that hold this much already.

    They never take more than half of the space that would be free without them.
    """
    return min(DEFAULT_LIMIT_BYTES, (free_bytes + held_bytes) // 2)

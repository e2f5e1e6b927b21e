"""Replica pace: how often a cluster makes a replica.

Often enough that few microbatches are retained for a replay, and rarely enough that sending and copying take a small,
fixed share of the lines' and the stages' time.
"""

from typing import Final

from ravnest.planner.recovery.state_periods import MIN_REPLICA_SECONDS
from ravnest.state_budget import FLOOR_SHARE
from ravnest.units import byte_size, counted, duration

MIN_TIMEOUT_SECONDS: Final = 60.0
_TIMEOUT_PER_LAST: Final = 10
_TIMEOUT_PER_PREDICTED: Final = 2
COPY_SHARE: Final = 0.02
"""Largest share of a stage's time that copying its state may take."""
MAX_RETAINED_BYTES: Final = 256 << 20
MAX_RETAINED_MICROBATCHES: Final = 8192


def replica_timeout_seconds(part_bytes: int, line_bytes_per_second: float, last_seconds: float) -> float:
    """Timeout of a replica, from the size of its largest part, the rate of its slowest line (0: unknown) and the
    duration of the last replica.

    On a busy line a part gets the least share, and half of that when other state is sent over the same line.
    """
    sending = part_bytes / (FLOOR_SHARE * line_bytes_per_second) if line_bytes_per_second > 0 else 0.0
    return max(MIN_TIMEOUT_SECONDS, _TIMEOUT_PER_LAST * last_seconds, _TIMEOUT_PER_PREDICTED * sending)


def replica_due(
    *,
    seconds_since_last: float | None,
    period_seconds: float,
    retained_microbatches: int,
    retained_bytes: int,
    updates_since: int,
    copy_seconds: float = 0.0,
) -> tuple[bool, str]:
    """Whether to announce a replica now, and why or why not.

    `seconds_since_last` counts from the announcement of the last replica (None: there was none). `period_seconds` is
    what the lines allow (planner/recovery/state_periods.py), and `copy_seconds` how long the slowest stage copied its
    state. Without an update since the last replica, none is due.
    """
    if updates_since <= 0:
        return False, "there was no update since the last replica"
    if seconds_since_last is None:
        return True, "there is no replica yet"
    age = f"the last replica is {duration(seconds_since_last)} old"
    if seconds_since_last < MIN_REPLICA_SECONDS:
        return False, f"{age}; the minimum interval is {MIN_REPLICA_SECONDS:g} s"
    if retained_bytes >= MAX_RETAINED_BYTES:
        return True, f"{byte_size(retained_bytes)} of data are retained for a replay"
    if retained_microbatches >= MAX_RETAINED_MICROBATCHES:
        retained = counted(retained_microbatches, "microbatch is", "microbatches are")
        return True, f"{retained} retained for a replay"
    intervals = {
        f"its lines allow one every {duration(period_seconds)}": period_seconds,
        f"copying took {copy_seconds:.2g} s and may take {COPY_SHARE:.0%} of a stage's time": copy_seconds / COPY_SHARE,
    }
    why = max(intervals, key=lambda words: intervals[words])
    if seconds_since_last < intervals[why]:
        return False, f"{age}: {why}"
    return True, f"{age}, with {counted(updates_since, 'update')} since"

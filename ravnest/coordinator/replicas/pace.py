"""Replica pace: how often a cluster makes a replica.

Often enough that few microbatches are retained for a replay, and rarely enough that sending and copying take a small,
fixed share of the lines' and the stages' time.
"""

from typing import Final

from ravnest.units import byte_size, counted

MIN_SECONDS: Final = 2.0
"""Minimum time between the announcements of two replicas."""
LINE_SHARE: Final = 0.20
"""Largest share of a line's time that sending replicas may take."""
SENDING_SHARE: Final = 0.25
"""Share of a line that a part gets while it is sent (`provider.replicas.transfer.SHARE`)."""
MIN_TIMEOUT_SECONDS: Final = 60.0
_TIMEOUT_PER_LAST: Final = 10
_TIMEOUT_PER_PREDICTED: Final = 4
COPY_SHARE: Final = 0.02
"""Largest share of a stage's time that copying its state may take."""
MAX_RETAINED_BYTES: Final = 256 << 20
MAX_RETAINED_MICROBATCHES: Final = 512


def replica_timeout_seconds(part_bytes: int, line_bytes_per_second: float, last_seconds: float) -> float:
    """Timeout of a replica, from the size of its largest part, the rate of its slowest line (0: unknown) and the
    duration of the last replica.

    A part gets a quarter of the line, and less when other state is sent over the same line.
    """
    sending = part_bytes / (SENDING_SHARE * line_bytes_per_second) if line_bytes_per_second > 0 else 0.0
    return max(MIN_TIMEOUT_SECONDS, _TIMEOUT_PER_LAST * last_seconds, _TIMEOUT_PER_PREDICTED * sending)


def replica_due(
    *,
    seconds_since_last: float | None,
    last_seconds: float,
    last_bytes: int,
    line_bytes_per_second: float,
    retained_microbatches: int,
    retained_bytes: int,
    updates_since: int,
    copy_seconds: float = 0.0,
) -> tuple[bool, str]:
    """Whether to announce a replica now, and why or why not.

    `seconds_since_last` counts from the announcement of the last replica (None: there was none). `last_seconds` and
    `last_bytes` are of the last complete one: the time from its announcement until then, and the size of its largest
    part. `line_bytes_per_second` is the rate of the slowest line that carries a part (0: unknown, then all of
    `last_seconds` counts as sending). `copy_seconds` is how long the slowest stage copied its state. Without an update
    since the last replica, none is due.
    """
    if updates_since <= 0:
        return False, "there was no update since the last replica"
    if seconds_since_last is None:
        return True, "there is no replica yet"
    if seconds_since_last < MIN_SECONDS:
        return False, f"the last replica is {seconds_since_last:.1f} s old; the minimum interval is {MIN_SECONDS:g} s"
    if retained_bytes >= MAX_RETAINED_BYTES:
        return True, f"{byte_size(retained_bytes)} of data are retained for a replay"
    if retained_microbatches >= MAX_RETAINED_MICROBATCHES:
        retained = counted(retained_microbatches, "microbatch is", "microbatches are")
        return True, f"{retained} retained for a replay"
    sending = last_bytes / line_bytes_per_second if line_bytes_per_second > 0 else last_seconds
    intervals = {
        f"sending took {sending:.2g} s and may take {LINE_SHARE:.0%} of a line's time": sending / LINE_SHARE,
        f"copying took {copy_seconds:.2g} s and may take {COPY_SHARE:.0%} of a stage's time": copy_seconds / COPY_SHARE,
    }
    why = max(intervals, key=lambda words: intervals[words])
    if seconds_since_last < intervals[why]:
        return (
            False,
            f"the last replica is {seconds_since_last:.1f} s old: {why}, so one is due after {intervals[why]:.1f} s",
        )
    return True, f"the last replica is {seconds_since_last:.1f} s old, with {counted(updates_since, 'update')} since"

"""When a cluster is to make its next replica: as often as its lines and stages hardly notice, and before too much data
has to be kept for feeding again."""

from typing import Final

from ravnest.units import byte_size, counted

MIN_SECONDS: Final = 2.0
LINE_SHARE: Final = 0.20
"""Of a line's time that sending replicas may take."""
SENDING_SHARE: Final = 0.25
"""Of a line's time that a part takes while it is sent (`provider.part_transfer.SHARE`)."""
MIN_PATIENCE_SECONDS: Final = 60.0
_TIMES_LAST: Final = 10
_TIMES_PREDICTED: Final = 4
COPY_SHARE: Final = 0.02
"""Of a stage's time that taking copies may take."""
MAX_RETAINED_BYTES: Final = 256 << 20
MAX_RETAINED_MICROBATCHES: Final = 512


def patience_seconds(part_bytes: int, line_bytes_per_second: float, last_seconds: float) -> float:
    """Timeout of a replica: from the size of its largest part, the rate of its slowest line (0: not known) and how long
    the last replica took.

    A part gets a quarter of the line, less where other state is sent over it."""
    sending = part_bytes / (SENDING_SHARE * line_bytes_per_second) if line_bytes_per_second > 0 else 0.0
    return max(MIN_PATIENCE_SECONDS, _TIMES_LAST * last_seconds, _TIMES_PREDICTED * sending)


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
    """Whether a replica is to be announced now, and why or why not. The one before is complete or given up.

    `seconds_since_last` counts from when that one was announced; None where there was none. `last_seconds` went by
    until it was complete, `last_bytes` are those of its largest part, `line_bytes_per_second` is the slowest line that
    carries one (0: not known, then all of `last_seconds` counts as sending), and `copy_seconds` is what the slowest
    stage took for its copy. Without an update since, there is nothing new to keep.
    """
    if updates_since <= 0:
        return False, "nothing was learned since the last replica"
    if seconds_since_last is None:
        return True, "there is no replica yet"
    if seconds_since_last < MIN_SECONDS:
        return False, f"the last replica is {seconds_since_last:.1f} s old, and there is one every {MIN_SECONDS:g} s"
    if retained_bytes >= MAX_RETAINED_BYTES:
        return True, f"{byte_size(retained_bytes)} of data are kept for feeding again"
    if retained_microbatches >= MAX_RETAINED_MICROBATCHES:
        kept = counted(retained_microbatches, "microbatch is", "microbatches are")
        return True, f"{kept} kept for feeding again"
    sending = last_bytes / line_bytes_per_second if line_bytes_per_second > 0 else last_seconds
    apart = {
        f"sending took {sending:.2g} s and may take {LINE_SHARE:.0%} of a line's time": sending / LINE_SHARE,
        f"copying took {copy_seconds:.2g} s and may take {COPY_SHARE:.0%} of a stage's time": copy_seconds / COPY_SHARE,
    }
    why = max(apart, key=lambda words: apart[words])
    if seconds_since_last < apart[why]:
        return (
            False,
            f"the last replica is {seconds_since_last:.1f} s old: {why}, so one is due after {apart[why]:.1f} s",
        )
    return True, f"the last replica is {seconds_since_last:.1f} s old, with {counted(updates_since, 'update')} since"

"""Judgement of a provider that uploads its state: whether the upload makes progress, or is only claimed.

State goes behind activations and gradients, within a budget (net/pacing), so an upload takes many times as long as its
line would need for it. However busy the line is, each transfer gets a small share of it. So an upload makes progress as
long as bytes arrive at half of that share. A stage that does no tasks because it uploads has the line for itself: the
upload has to be faster, and only that of the checkpoint that its cluster uploads is an excuse. A stage that only claims
to upload, or lets bytes trickle, is judged as if it did nothing. A claim cannot last: a stage may upload no more bytes
than its state can need (checkpoints/part_check.py). Pure functions.
"""

from typing import Final

from ravnest.coordinator.swarm.uploads import UploadProgress, Uploads
from ravnest.net.pacing.state_rate import DEFAULT_SETTINGS, piece_bytes
from ravnest.net.v1.control_pb2 import Report, Transfer
from ravnest.units import counted

MIN_SHARE: Final = DEFAULT_SETTINGS.transfer_share / 2
"""Lowest mean rate of an upload, as a share of the line's measured rate. A provider gives every transfer at least twice
this share; the line may have been faster when it was measured."""
URGENT_SHARE: Final = 1 / 8
"""The same for an upload that a stage or a cluster waits for: nothing else is on the line."""
UNKNOWN_RATE: Final = 1e6
"""Bytes per second assumed for a line without a measurement."""
BEGIN_SECONDS: Final = 10.0
"""Time that an upload may take beyond that of its bytes: it begins slowly, and other uploads share the line."""
_PAUSE_CHUNKS: Final = 4
"""An upload makes no progress after a pause in which this many chunks could have arrived."""
_MAX_BYTES: Final = 1 << 50
_NAME_CHARACTERS: Final = 80


def is_progressing(
    upload: UploadProgress, line_bytes_per_second: float, min_share: float = MIN_SHARE
) -> tuple[bool, str]:
    """Whether an upload over this line (0: not measured) makes progress, and why or why not. `min_share`: the lowest
    mean rate, as a share of the line's."""
    if upload.is_writing:
        return True, "the coordinator is writing it"
    rate = line_bytes_per_second if line_bytes_per_second > 0 else UNKNOWN_RATE
    pause = longest_pause_seconds(rate)
    if upload.still_seconds > pause:
        return False, f"nothing has arrived for {upload.still_seconds:.0f} s"
    max_seconds = pause + upload.done_bytes / (min_share * rate)
    if upload.seconds > max_seconds:
        return False, f"its line takes less than {upload.seconds:.0f} s for that, even with {min_share:.1%} of its rate"
    return True, f"the last bytes arrived {upload.still_seconds:.0f} s ago"


def longest_pause_seconds(line_bytes_per_second: float) -> float:
    """Time after which an upload over this line makes no progress if nothing of it arrives."""
    paced = _PAUSE_CHUNKS * piece_bytes(line_bytes_per_second) / (MIN_SHARE * line_bytes_per_second)
    urgent = _PAUSE_CHUNKS * DEFAULT_SETTINGS.max_piece_bytes / (URGENT_SHARE * line_bytes_per_second)
    return max(BEGIN_SECONDS, paced, urgent)


def urgent_rate(line_bytes_per_second: float, receiver_bytes_per_second: float) -> float:
    """The rate that an upload which a stage waits for can have: that of its line, or its share of the coordinator's
    line. 0: not known."""
    rates = [rate for rate in (line_bytes_per_second, receiver_bytes_per_second) if rate > 0]
    return min(rates, default=0.0)


def last_progress_at(uploads: Uploads, name: str, line_bytes_per_second: float, now: float) -> float | None:
    """When the upload of this name, which a stage waits for, last made progress; None if it makes none."""
    found = [
        upload
        for upload in uploads.under_way
        if upload.name == name and is_progressing(upload.progress(now), line_bytes_per_second, URGENT_SHARE)[0]
    ]
    return max((now if upload.is_writing else upload.moved_at for upload in found), default=None)


def describe_claim(claim: Transfer, uploads: Uploads, line_bytes_per_second: float, now: float) -> str:
    """The upload that a provider reports, and how much of it the coordinator has received; part of a reason."""
    claimed = f"has been sending its state for {_seconds(claim.seconds):.0f} s ({claim.name[:_NAME_CHARACTERS]})"
    upload = uploads.named(claim.name)
    if upload is None:
        return f"{claimed}, and nothing has arrived"
    _, why = is_progressing(upload.progress(now), line_bytes_per_second, URGENT_SHARE)
    return f"{claimed}, {megabytes(upload.done_bytes)} of {megabytes(claim.total_bytes)} have arrived, {why}"


def fills_its_line(report: Report) -> bool:
    """Whether a stage reports that it sends state as fast as its line allows: only parts that a cluster waits for."""
    return any(transfer.kind == "part" for transfer in report.transfers)


def megabytes(size_bytes: int) -> str:
    """Like "63 MB"."""
    return f"{min(size_bytes, _MAX_BYTES) / 1e6:.0f} MB" if size_bytes >= 1e6 else counted(size_bytes, "byte")


def _seconds(seconds: float) -> float:
    """Bounds a duration that a provider reported; NaN fails the comparison."""
    return seconds if 0 <= seconds < 1e9 else 0.0

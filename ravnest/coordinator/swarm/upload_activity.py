"""State that a provider uploads: what the coordinator sees of it, and whether that is work or a mere claim.

A stage that uploads its state does nothing else meanwhile, on a thin line for minutes. The coordinator counts the bytes
that come, and knows how fast the provider's line is: as long as they come at a fraction of that rate the stage is at
work. One that only says so, or lets bytes trickle, is judged as if it did nothing. All of it is bounded: a stage may
upload no more than its state can need (checkpoints/part_check.py).

`is_at_work` is a pure function; `Uploads` belongs to the network's loop.
"""

import contextlib
import math
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Final

from ravnest.net.connection import CHUNK_BYTES
from ravnest.net.v1.control_pb2 import Report, Transfer
from ravnest.units import counted

MIN_SHARE: Final = 1 / 8
"""Of the measured rate of its line: what a provider uploads comes no slower on average. Activations, gradients and
replicas share the line, and it may have been measured on a better day."""
UNKNOWN_RATE: Final = 1e6
"""Bytes a second of a line that was not measured, at least."""
BEGIN_SECONDS: Final = 10.0
"""How long an upload may take beyond what its bytes explain: it begins slowly, and other uploads share the line."""
_PIECES: Final = 4
"""Pieces that could have come during what counts as a pause."""
_MAX_BYTES: Final = 1 << 50
_NAME_CHARACTERS: Final = 80


@dataclass(frozen=True, slots=True)
class Sent:
    """One upload, as far as it has come."""

    done_bytes: int
    seconds: float
    """Since it began."""
    still_seconds: float
    """Since some of it last came."""
    is_here: bool = False
    """Whether it is the coordinator that is busy with it: its disk, say."""


def is_at_work(sent: Sent, line_bytes_per_second: float) -> tuple[bool, str]:
    """Whether a provider with this line (0: not measured) really sends, and why or why not."""
    if sent.is_here:
        return True, "the coordinator is writing it"
    rate = line_bytes_per_second if line_bytes_per_second > 0 else UNKNOWN_RATE
    pause = max(BEGIN_SECONDS, _PIECES * CHUNK_BYTES / (MIN_SHARE * rate))
    if sent.still_seconds > pause:
        return False, f"nothing of it has come for {sent.still_seconds:.0f} s"
    explained = max(BEGIN_SECONDS, pause) + sent.done_bytes / (MIN_SHARE * rate)
    if sent.seconds > explained:
        return False, f"{sent.seconds:.0f} s are longer than its line takes for that, even at an eighth of its rate"
    return True, f"some of it came {sent.still_seconds:.0f} s ago"


@dataclass
class Upload:
    """One that is under way."""

    name: str
    began_at: float
    moved_at: float
    """When some of it last came, or was dealt with here."""
    done_bytes: int = 0
    is_here: bool = False

    async def counted(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The same chunks; while none is asked for, the coordinator has its hands full."""
        async for data in chunks:
            self.done_bytes += len(data)
            self.moved_at, self.is_here = time.monotonic(), True
            yield data
            self.moved_at, self.is_here = time.monotonic(), False
        self.is_here = True

    def sent(self, now: float, since: float = 0.0) -> Sent:
        """How it stands; no time counts before `since`."""
        still_seconds = max(0.0, now - max(self.moved_at, since))
        return Sent(self.done_bytes, now - max(self.began_at, since), still_seconds, self.is_here)


@dataclass
class Uploads:
    """Of one provider, in one stay."""

    under_way: list[Upload] = field(default_factory=list)
    last_at: float = -math.inf
    """When something of an upload last came, on the clock `time.monotonic`: the provider is there."""

    @contextlib.contextmanager
    def taking(self, name: str) -> Iterator[Upload]:
        """Counts an upload as long as the block lasts."""
        now = time.monotonic()
        upload = Upload(name, now, now)
        self.under_way.append(upload)
        try:
            yield upload
        finally:
            self.under_way.remove(upload)
            self.last_at = max(self.last_at, upload.moved_at)

    @property
    def heard_at(self) -> float:
        """When something of an upload last came; before the first, long ago."""
        return max([self.last_at, *(upload.moved_at for upload in self.under_way if upload.done_bytes)])

    def working_until(self, line_bytes_per_second: float, now: float) -> float | None:
        """When the provider was last seen to be sending, where it still is; None where no upload is real work."""
        found = [up for up in self.under_way if is_at_work(up.sent(now), line_bytes_per_second)[0]]
        return max((now if upload.is_here else upload.moved_at for upload in found), default=None)

    def judged(self, claim: Transfer, line_bytes_per_second: float, now: float) -> str:
        """What a provider says that it uploads, and what the coordinator sees of that; for a reason."""
        upload = next((up for up in self.under_way if up.name == claim.name), None)
        said = f"has been sending its state for {_seconds(claim.seconds):.0f} s ({claim.name[:_NAME_CHARACTERS]})"
        if upload is None:
            return f"{said}, and nothing of it has come"
        _, why = is_at_work(upload.sent(now), line_bytes_per_second)
        return f"{said}, {megabytes(upload.done_bytes)} of {megabytes(claim.total_bytes)} have come, {why}"


def sends_its_state(report: Report) -> bool:
    """Whether a stage says that it sends state with all its line has: replicas take a small share of that."""
    return any(transfer.kind != "replica" for transfer in report.transfers)


def megabytes(size_bytes: int) -> str:
    """Like "63 MB"."""
    return f"{min(size_bytes, _MAX_BYTES) / 1e6:.0f} MB" if size_bytes >= 1e6 else counted(size_bytes, "byte")


def _seconds(seconds: float) -> float:
    """What a provider said, which may be no number."""
    return seconds if 0 <= seconds < 1e9 else 0.0

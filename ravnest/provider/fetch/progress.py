"""Progress of a download, which the coordinator and the user can follow."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final, Protocol, TextIO

from ravnest.background import cancel_and_wait
from ravnest.errors import PeerError
from ravnest.net.v1.control_pb2 import Deploy, Fetching, ProviderMessage

TELL_SECONDS: Final = 0.5
"""Minimum time between two messages to the coordinator."""

_LINE_SECONDS: Final = 10.0
"""Time between two lines, if the output is not a terminal."""


class Listener(Protocol):
    """Receives the progress: the control link to the coordinator."""

    async def send(self, message: ProviderMessage) -> None: ...


class FetchProgress:
    """Counts the bytes of one deployment, by where they come from."""

    def __init__(self, total_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_bytes = total_bytes
        self.fetched_bytes = 0
        self.kept_bytes = 0
        """From the cache on the disk."""
        self.drawn_bytes = 0
        """Random and constant weights that were made here."""
        self.found_bytes = 0
        """From other files on this machine."""
        self._clock = clock
        self._started = clock()

    @property
    def received_bytes(self) -> int:
        return sum(self.counts)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """All counts, to return to them when bytes turn out to be damaged."""
        return self.fetched_bytes, self.kept_bytes, self.drawn_bytes, self.found_bytes

    @counts.setter
    def counts(self, counts: tuple[int, int, int, int]) -> None:
        self.fetched_bytes, self.kept_bytes, self.drawn_bytes, self.found_bytes = counts

    @property
    def seconds(self) -> float:
        return self._clock() - self._started

    @property
    def bytes_per_second(self) -> float:
        """Over the network, since the beginning."""
        return self.fetched_bytes / self.seconds if self.seconds > 0 else 0.0

    def line(self) -> str:
        """Like "fetching the stage: 43 % of 812.4 MB, 11.2 MB/s, 0:41 left"."""
        share = f"{percent(self.received_bytes, self.total_bytes)} of {megabytes(self.total_bytes)}"
        rate = self.bytes_per_second
        if not rate:
            return f"fetching the stage: {share}"
        left = round((self.total_bytes - self.received_bytes) / rate)
        return f"fetching the stage: {share}, {megabytes(rate)}/s, {left // 60}:{left % 60:02d} left"

    def last_line(self) -> str:
        """The line for a completed download."""
        if not self.fetched_bytes and not self.drawn_bytes and not self.found_bytes:
            return f"the stage was here already, {megabytes(self.kept_bytes)}"
        others = (
            (self.drawn_bytes, "were drawn here"),
            (self.found_bytes, "were in files here"),
            (self.kept_bytes, "were here already"),
        )
        parts = [f"fetched {megabytes(self.fetched_bytes)} at {megabytes(self.bytes_per_second)}/s"]
        return "; ".join([*parts, *(f"{megabytes(count)} {where}" for count, where in others if count)])


class FetchLine:
    """Shows the progress: on a terminal in one line that is redrawn, otherwise now and then in a new line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn = stream.isatty()
        self._last = 0.0
        self._shown = False

    def show(self, progress: FetchProgress) -> None:
        if self._drawn:
            self._shown = True
            self._write(f"\r{progress.line()}\x1b[K")
        elif progress.seconds - self._last >= _LINE_SECONDS:
            self._last = progress.seconds
            self._shown = True
            self._write(f"{progress.line()}\n")

    def end(self, progress: FetchProgress) -> None:
        """The download is complete. Prints nothing if it took no time."""
        if self._shown or progress.received_bytes > progress.fetched_bytes:
            self._write(f"{self._clear}{progress.last_line()}\n")
        self._shown = False

    def interrupt(self) -> None:
        """Clear the line, because something else is about to be printed."""
        if self._shown:
            self._write(self._clear)

    @property
    def _clear(self) -> str:
        return "\r\x1b[K" if self._drawn and self._shown else ""

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


@asynccontextmanager
async def fetching(order: Deploy, control: Listener, line: FetchLine | None) -> AsyncIterator[FetchProgress]:
    """The progress of an order's artifacts. Within the block, the coordinator and the user are told about it."""
    progress = FetchProgress(order.graph.size_bytes + order.weights.size_bytes)
    telling = asyncio.create_task(_tell(progress, order.deployment, control, line))
    try:
        yield progress
        if line is not None:
            line.end(progress)
    finally:
        await cancel_and_wait(telling)


async def _tell(progress: FetchProgress, deployment: str, control: Listener, line: FetchLine | None) -> None:
    told = 0
    while True:
        await asyncio.sleep(TELL_SECONDS)
        if progress.received_bytes != told:
            told = progress.received_bytes
            message = Fetching(deployment=deployment, received_bytes=told, total_bytes=progress.total_bytes)
            with suppress(PeerError):  # The receiver of the link notices that it is broken.
                await control.send(ProviderMessage(fetching=message))
        if line is not None:
            line.show(progress)


def megabytes(value: float) -> str:
    """1234567 as "1.2 MB"."""
    return f"{value / 1e6:,.1f} MB"


def percent(part: int, whole: int) -> str:
    """Rounded down, so that only a complete download is 100 %."""
    return f"{100 * part // whole if whole else 100} %"

"""Lines and losses in virtual time: the timing of frames, without clocks, sockets or threads.

Callers pass the time in: the switch that of the machine's clock, a test any time.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from tests.wan.packets import Frame

Step = Callable[[float, Frame], None]
"""A step for a frame at a time, in seconds."""

_QUEUE_SECONDS: Final = 0.1
_QUEUE_LEAST_BYTES: Final = 64 * 1024
_CHUNK_SECONDS: Final = 0.001
_CHUNK_LEAST_BYTES: Final = 3000
"""Two segments: TCP sends two at once while it has more to send, and separating them would double the work."""


def transmission_seconds(size_bytes: int, rate_mbps: float) -> float:
    """How long a line of this rate is busy with this number of bytes."""
    return size_bytes * 8e-6 / rate_mbps


def default_queue_bytes(rate_mbps: float) -> int:
    """Default size of the queue of a line: 100 ms of its rate, at least 64 KiB."""
    return max(_QUEUE_LEAST_BYTES, int(rate_mbps * 1e6 / 8 * _QUEUE_SECONDS))


def chunk_bytes(*rates_mbps: float | None) -> float:
    """Maximum burst that may cross lines of these rates in one piece: 1 ms of the slowest, or two segments."""
    slowest = min((rate for rate in rates_mbps if rate is not None), default=math.inf)
    return max(slowest * 1e6 / 8 * _CHUNK_SECONDS, _CHUNK_LEAST_BYTES)


def survivors(frame: Frame, loss: float, chance: random.Random) -> Iterator[Frame]:
    """The rest of a frame after each of its segments was lost with probability `loss`."""
    first = 0
    for segment in range(frame.segments):
        if chance.random() < loss:
            if segment > first:
                yield frame.part(first, segment)
            first = segment + 1
    if first < frame.segments:
        yield frame.part(first, frame.segments)


class Agenda:
    """Queue of steps by time; steps of the same time run in the order in which they were added.

    Most steps are not visible from outside: a frame that leaves an uplink still has its path's delay ahead. Such a step
    is added with `unseen_seconds`, by which it may run late, together with another step; its own time does not change.
    That saves the switch many wake-ups.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[float, int, Step, Frame]] = []
        self._latest: list[tuple[float, float]] = []  # the latest time at which each step must run, and its own time
        self._order = itertools.count()
        self._ran_until = -math.inf

    def at(self, moment: float, step: Step, frame: Frame, unseen_seconds: float = 0.0) -> None:
        if moment <= self._ran_until:
            moment = math.nextafter(self._ran_until, math.inf)
        heapq.heappush(self._steps, (moment, next(self._order), step, frame))
        heapq.heappush(self._latest, (moment + unseen_seconds, moment))

    def due(self) -> float | None:
        """The latest time at which `run` must be called, or None if no step is waiting."""
        latest = self._latest
        while latest and latest[0][1] <= self._ran_until:
            heapq.heappop(latest)
        return latest[0][0] if latest else None

    def run(self, now: float) -> None:
        """Runs all steps that are due, each with its own time: a late call delays nothing that follows."""
        steps = self._steps
        while steps and steps[0][0] <= now:
            moment, _, step, frame = heapq.heappop(steps)
            self._ran_until = moment
            step(moment, frame)
        self._ran_until = max(self._ran_until, now)


class Line:
    """Sends frames one after another at a rate, with a drop-tail queue in front; without a rate it only forwards them.

    A change of rate takes effect from the next frame on. Frames that do not fit into the queue are dropped and counted.
    """

    def __init__(
        self, agenda: Agenda, forward: Step, unseen_seconds: Callable[[Frame], float] = lambda frame: 0.0
    ) -> None:
        """`forward` gets every frame once it is through; its effects are not visible for another `unseen_seconds`."""
        self._agenda = agenda
        self._forward = forward
        self._unseen_seconds = unseen_seconds
        self._queue: deque[Frame] = deque()
        self._rate_mbps: float | None = None
        self._room_bytes = 0
        self.queued_bytes = 0
        self.dropped_packets = 0

    def set(self, rate_mbps: float | None, queue_bytes: int | None) -> None:
        self._rate_mbps = rate_mbps
        if rate_mbps is not None:
            self._room_bytes = queue_bytes if queue_bytes is not None else default_queue_bytes(rate_mbps)

    def busy_seconds(self, frame: Frame) -> float:
        """How long the line will be busy with a frame, without the wait before that."""
        return 0.0 if self._rate_mbps is None else transmission_seconds(frame.size_bytes, self._rate_mbps)

    def offer(self, now: float, frame: Frame) -> None:
        if not self._queue:
            if self._rate_mbps is None:
                self._forward(now, frame)
            else:
                # An idle line accepts a frame at once, even with a queue that is too small for it.
                self._queue.append(frame)
                self.queued_bytes = frame.size_bytes
                self._send(now)
            return
        fits = frame.fitting(self._room_bytes - self.queued_bytes)
        if fits is not frame:
            self.dropped_packets += frame.segments - (fits.segments if fits else 0)
        if fits is not None:
            self._queue.append(fits)
            self.queued_bytes += fits.size_bytes

    def _send(self, now: float) -> None:
        frame = self._queue[0]
        self._agenda.at(now + self.busy_seconds(frame), self._sent, frame, self._unseen_seconds(frame))

    def _sent(self, now: float, frame: Frame) -> None:
        self._queue.popleft()
        self.queued_bytes -= frame.size_bytes
        if self._queue:
            self._send(now)
        self._forward(now, frame)

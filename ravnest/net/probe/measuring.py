"""Measuring a connection: round trips and throughput both ways, bounded in seconds and in bytes.

Whoever dials does the timing. Each request is answered with one reply, in order, so the replies tell when how much had
arrived at its end, on one clock. As much is on the way as half a second of the rate so far: enough to fill the
connection, and little to wait for when the time is over. The answering side decides nothing and bounds what each
caller may make it send and take.
"""

import asyncio
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ravnest.errors import PeerError
from ravnest.net.streams.frame_stream import Control
from ravnest.net.v1.control_pb2 import MeasureReply, MeasureRequest

ROUND_TRIPS: Final = 5
MAX_SECONDS: Final = 1.5
MAX_BYTES: Final = 4 << 20
"""Each way; whichever of the two is reached first ends it."""
SETTLING_TRIPS: Final = 15
"""A connection doubles what it has on its way once in a round trip: on a long line MAX_SECONDS are over before it is
up to speed, and so many round trips are taken in their place, MAX_LONG_SECONDS at most."""
MAX_LONG_SECONDS: Final = 4.0

MESSAGE_BYTES: Final = 128 << 10
"""The most that one message may carry or ask for."""

CALLS_PER_MINUTE: Final = 6
"""How often one caller is answered: with MAX_BYTES a call, what it can make this side send and take."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """A connection as one of its ends measured it; `up` is away from that end."""

    round_trip_seconds: float
    up_bytes_per_second: float
    down_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """So many bytes had arrived so many seconds after the first was sent."""

    seconds: float
    total_bytes: int


async def measure_link(
    control: Control[MeasureRequest, MeasureReply],
    max_seconds: float | None = None,
    max_bytes: int = MAX_BYTES,
) -> LinkSpeed:
    """Measures the connection behind the stream, and ends the stream.

    Takes `max_seconds` each way (None: what its round trip needs), some round trips, and the time until others who
    measure there are through. PeerError when the connection breaks, the other side refuses, or it is too slow to be
    measured.
    """
    try:
        async with asyncio.timeout(_GIVE_UP_SECONDS):
            trips = [await _round_trip(control, number) for number in range(ROUND_TRIPS)]
            round_trip = statistics.median(trips)
            await control.send(MeasureRequest(turn=True))
            await _answer(control, "turn")
            bounds = _Bounds(max_seconds or needed_seconds(round_trip), max_bytes, round_trip)
            up = await _throughput(control, lambda size: MeasureRequest(data=_NOISE[:size]), "taken_bytes", bounds)
            down = await _throughput(control, lambda size: MeasureRequest(want_bytes=size), "data", bounds)
            await control.close()
    except TimeoutError:
        raise PeerError(
            f"the connection to {control.peer} is too slow to be measured within {_GIVE_UP_SECONDS:g} seconds; check "
            "what else uses it"
        ) from None
    finally:
        control.abort()
    return LinkSpeed(round_trip, up, down)


def needed_seconds(round_trip_seconds: float) -> float:
    """How long to measure each way, for a connection to get up to speed."""
    return max(MAX_SECONDS, min(SETTLING_TRIPS * round_trip_seconds, MAX_LONG_SECONDS))


def settled_rate(arrivals: Sequence[Arrival]) -> float:
    """Bytes per second over the later half of the bytes: a connection needs some round trips to get up to speed."""
    first, last = arrivals[0], arrivals[-1]
    half = next(a for a in arrivals if 2 * a.total_bytes >= last.total_bytes)
    if last.seconds > half.seconds:
        return (last.total_bytes - half.total_bytes) / (last.seconds - half.seconds)
    # All of it came at once.
    return (last.total_bytes - first.total_bytes) / max(last.seconds - first.seconds, 1e-6)


class MeasureService:
    """The answering side. One caller's bytes at a time, so that measurements do not measure one another."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turn = asyncio.Lock()
        self._calls: dict[str, deque[float]] = {}

    async def serve(self, caller: str, control: Control[MeasureReply, MeasureRequest]) -> None:
        """Answers until the caller ends the stream; PeerError, which it gets too, when it wants too much."""
        allowed, reason = self._may_measure(caller)
        if not allowed:
            raise PeerError(reason)
        had_turn = False
        try:
            async with asyncio.timeout(_SERVE_SECONDS):
                left = _Left()
                while (request := await control.receive()) is not None:
                    if request.WhichOneof("body") == "turn" and not had_turn:
                        had_turn = await self._wait_for_turn()
                    await control.send(left.answer(request))
        except TimeoutError:
            raise PeerError(f"the measuring took longer than {_SERVE_SECONDS:g} seconds; try again later") from None
        finally:
            if had_turn:
                self._turn.release()

    async def _wait_for_turn(self) -> bool:
        """Whether the turn came; after a while one is measured beside others rather than never."""
        try:
            async with asyncio.timeout(_TURN_SECONDS):
                return await self._turn.acquire()
        except TimeoutError:
            return False

    def _may_measure(self, caller: str) -> tuple[bool, str]:
        now = self._clock()
        for name, times in list(self._calls.items()):
            while times and times[0] <= now - 60:
                times.popleft()
            if not times:
                del self._calls[name]
        times = self._calls.setdefault(caller, deque())
        if len(times) >= CALLS_PER_MINUTE:
            return False, f"{caller} has measured {len(times)} times within a minute; try again in a minute"
        times.append(now)
        return True, f"{caller} has measured {len(times) - 1} times within a minute"


class _Left:
    """What one call may still ask for."""

    def __init__(self) -> None:
        self._answers = 2 * MAX_BYTES // _MIN_MESSAGE_BYTES + 64
        self._bytes = {"want_bytes": MAX_BYTES, "data": MAX_BYTES}

    def answer(self, request: MeasureRequest) -> MeasureReply:
        kind = request.WhichOneof("body")
        size = request.want_bytes if kind == "want_bytes" else len(request.data)
        self._answers -= 1
        if kind in self._bytes:
            self._bytes[kind] -= size
        if kind is None or size > MESSAGE_BYTES or self._answers < 0 or min(self._bytes.values()) < 0:
            raise PeerError(f"measuring ends after {MAX_BYTES} bytes each way, in messages of up to {MESSAGE_BYTES}")
        if kind == "ping":
            return MeasureReply(pong=request.ping)
        if kind == "turn":
            return MeasureReply(turn=True)
        if kind == "want_bytes":
            return MeasureReply(data=_NOISE[:size])
        return MeasureReply(taken_bytes=size)


@dataclass(frozen=True, slots=True)
class _Bounds:
    seconds: float
    bytes: int
    round_trip_seconds: float

    def window_bytes(self, elapsed_seconds: float, arrived_bytes: int) -> int:
        """How much may be on the way: as much as has arrived, so that it doubles each round trip, up to a time."""
        worth_seconds = max(_WINDOW_SECONDS, 2 * self.round_trip_seconds)
        worth = arrived_bytes * min(1.0, worth_seconds / max(elapsed_seconds, 1e-6))
        return max(_FIRST_WINDOW_BYTES, int(worth))


_FIRST_WINDOW_BYTES: Final = 32 << 10
_MIN_MESSAGE_BYTES: Final = 4 << 10
_WINDOW_SECONDS: Final = 0.5
_TURN_SECONDS: Final = 10.0
_SERVE_SECONDS: Final = 25.0
_GIVE_UP_SECONDS: Final = 30.0
# Noise, because something on the way may compress.
_NOISE: Final = os.urandom(MESSAGE_BYTES)


async def _round_trip(control: Control[MeasureRequest, MeasureReply], number: int) -> float:
    began = time.perf_counter()
    await control.send(MeasureRequest(ping=number))
    await _answer(control, "pong")
    return time.perf_counter() - began


async def _throughput(
    control: Control[MeasureRequest, MeasureReply],
    request: Callable[[int], MeasureRequest],
    answer: str,
    bounds: _Bounds,
) -> float:
    """Bytes per second, for bytes that each `request` sends or asks for."""
    began = time.perf_counter()
    arrivals = [Arrival(0.0, 0)]
    asked = 0
    while True:
        elapsed, arrived = time.perf_counter() - began, arrivals[-1].total_bytes
        window = bounds.window_bytes(elapsed, arrived)
        while elapsed < bounds.seconds and asked < bounds.bytes and asked - arrived < window:
            size = min(MESSAGE_BYTES, max(_MIN_MESSAGE_BYTES, window // 8), bounds.bytes - asked)
            await control.send(request(size))
            asked += size
        if asked == arrived:
            return settled_rate(arrivals)
        reply = await _answer(control, answer)
        size = reply.taken_bytes if answer == "taken_bytes" else len(reply.data)
        if not 0 < size <= asked - arrived:
            raise PeerError(f"{control.peer} answered to {size} bytes that nobody asked about")
        arrivals.append(Arrival(time.perf_counter() - began, arrived + size))


async def _answer(control: Control[MeasureRequest, MeasureReply], kind: str) -> MeasureReply:
    reply = await control.receive()
    if reply is None or reply.WhichOneof("body") != kind:
        raise PeerError(f"{control.peer} answered out of turn while the connection was measured")
    return reply

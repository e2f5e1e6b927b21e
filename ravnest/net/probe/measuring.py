"""Measurement of a connection: round trip and throughput both ways, with limits on time and bytes.

The dialling side takes the times. Each request is answered with one reply, in order, so the replies show on one clock
how much had arrived at the other end and when. Half a second's worth of bytes is kept in flight: enough to fill the
connection, and little to wait for at the end. The answering side limits how much each caller may make it send and
receive.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ravnest.errors import PeerError
from ravnest.net.probe.call_rate import CallRate
from ravnest.net.streams.frame_stream import Control
from ravnest.net.v1.control_pb2 import MeasureReply, MeasureRequest

ROUND_TRIPS: Final = 5
MAX_SECONDS: Final = 1.5
MAX_BYTES: Final = 4 << 20
"""Each way. The measurement ends at MAX_SECONDS or MAX_BYTES, whichever comes first."""
SETTLING_TRIPS: Final = 15
"""TCP doubles its window once per round trip, so on a long line MAX_SECONDS pass before the line is at full speed.
There the measurement takes this number of round trips instead, MAX_LONG_SECONDS at most."""
MAX_LONG_SECONDS: Final = 4.0

PEER_SECONDS: Final = 40.0
"""Timeout of a provider that measures its connection to another one: to dial, wait for its turn and measure."""
REPORT_SECONDS: Final = PEER_SECONDS + 5.0
"""Timeout of the coordinator for the result of such a measurement."""

MESSAGE_BYTES: Final = 128 << 10
"""Maximum bytes that one message may carry or ask for."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """A connection as one of its ends measured it; `up` is away from that end."""

    round_trip_seconds: float
    up_bytes_per_second: float
    down_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """Total bytes that had arrived this many seconds after the first byte was sent."""

    seconds: float
    total_bytes: int


async def measure_link(control: Control[MeasureRequest, MeasureReply]) -> LinkSpeed:
    """Measure the connection under the stream, and end the stream.

    Takes as long each way as the round trip requires, some round trips, and the wait for other callers that are being
    measured. PeerError when the connection breaks, the other side refuses, or the connection is
    too slow.
    """
    try:
        async with asyncio.timeout(_GIVE_UP_SECONDS):
            trips = [await _round_trip(control, number) for number in range(ROUND_TRIPS)]
            round_trip = statistics.median(trips)
            await control.send(MeasureRequest(turn=True))
            await _answer(control, "turn")
            bounds = _Bounds(needed_seconds(round_trip), round_trip)
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
    """Time of a measurement each way, so that the connection reaches its full speed."""
    return max(MAX_SECONDS, min(SETTLING_TRIPS * round_trip_seconds, MAX_LONG_SECONDS))


def settled_rate(arrivals: Sequence[Arrival]) -> float:
    """Bytes per second over the later half of the bytes, after TCP's slow start."""
    first, last = arrivals[0], arrivals[-1]
    half = next(a for a in arrivals if 2 * a.total_bytes >= last.total_bytes)
    if last.seconds > half.seconds:
        return (last.total_bytes - half.total_bytes) / (last.seconds - half.seconds)
    # All bytes arrived at once.
    return (last.total_bytes - first.total_bytes) / max(last.seconds - first.seconds, 1e-6)


class MeasureService:
    """The answering side. It serves one caller's bytes at a time, so that measurements do not disturb each other."""

    def __init__(self) -> None:
        self._rate = CallRate(time.monotonic)
        self._turn = asyncio.Lock()

    async def serve(self, caller: str, control: Control[MeasureReply, MeasureRequest]) -> None:
        """Answer until the caller ends the stream. PeerError, which the caller gets too, when it asks for too much."""
        allowed, reason = self._rate.take(caller)
        if not allowed:
            raise PeerError(reason)
        had_turn = False
        try:
            async with asyncio.timeout(_SERVE_SECONDS):
                budget = _CallBudget()
                while (request := await control.receive()) is not None:
                    if request.WhichOneof("body") == "turn" and not had_turn:
                        had_turn = await self._wait_for_turn()
                    await control.send(budget.answer(request))
        except TimeoutError:
            raise PeerError(f"the measuring took longer than {_SERVE_SECONDS:g} seconds; try again later") from None
        finally:
            if had_turn:
                self._turn.release()

    async def _wait_for_turn(self) -> bool:
        """Whether the turn came. After a timeout the caller is measured together with others, rather than never."""
        try:
            async with asyncio.timeout(_TURN_SECONDS):
                return await self._turn.acquire()
        except TimeoutError:
            return False


class _CallBudget:
    """The budget that is left for one call."""

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
    round_trip_seconds: float

    def window_bytes(self, elapsed_seconds: float, arrived_bytes: int) -> int:
        """Bytes that may be in flight: as many as have arrived, so that they double per round trip, up to a limit in
        time."""
        worth_seconds = max(_WINDOW_SECONDS, 2 * self.round_trip_seconds)
        worth = arrived_bytes * min(1.0, worth_seconds / max(elapsed_seconds, 1e-6))
        return max(_FIRST_WINDOW_BYTES, int(worth))


_FIRST_WINDOW_BYTES: Final = 32 << 10
_MIN_MESSAGE_BYTES: Final = 4 << 10
_WINDOW_SECONDS: Final = 0.5
_TURN_SECONDS: Final = 10.0
_SERVE_SECONDS: Final = 25.0
_GIVE_UP_SECONDS: Final = 30.0
# Random, because a part of the route may compress.
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
        while elapsed < bounds.seconds and asked < MAX_BYTES and asked - arrived < window:
            size = min(MESSAGE_BYTES, max(_MIN_MESSAGE_BYTES, window // 8), MAX_BYTES - asked)
            await control.send(request(size))
            asked += size
        if asked == arrived:
            return settled_rate(arrivals)
        reply = await _answer(control, answer)
        size = reply.taken_bytes if answer == "taken_bytes" else len(reply.data)
        if not 0 < size <= asked - arrived:
            raise PeerError(f"{control.peer} answered for {size} bytes that were not asked for")
        arrivals.append(Arrival(time.perf_counter() - began, arrived + size))


async def _answer(control: Control[MeasureRequest, MeasureReply], kind: str) -> MeasureReply:
    reply = await control.receive()
    if reply is None or reply.WhichOneof("body") != kind:
        raise PeerError(f"{control.peer} answered out of turn while the connection was measured")
    return reply

"""How a part of a replica travels over a link, in frames of kind PART that all say of which replica.

The sender says the size and waits to hear that it is wanted. It sends the bytes in order, and last their hash. The
other side says that it keeps the part, or at any moment why not; it passes over what still comes of one it refused.
A replica is nothing urgent: it is sent in bursts with pauses between them, so that activations and gradients find the
line free. To see how fast that is, a burst ends with a question for how much has come.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

import torch

from ravnest.background import in_thread
from ravnest.errors import PeerError, RavnestError, RefusedError
from ravnest.microbatch import Marks
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.provider.replicas.files import ReplicaPart

CHUNK_BYTES: Final = 256 << 10
"""The most that a frame has of a part."""

SHARE: Final = 0.25
"""Of the time of a line, as much as a replica may take."""

ANSWER_SECONDS: Final = 60.0
"""How long the other side may take to answer, or to send the next of its frames."""

MAX_BYTES: Final = 1 << 40
"""Of a part, where nobody knows better."""

_MAX_BURST_BYTES: Final = 4 << 20
_ASK_BYTES: Final = 1 << 20
_MAX_ASKED: Final = 8
"""Where a part may have all of the line, the sender asks how much has come after each _ASK_BYTES, and goes on until
_MAX_ASKED questions are unanswered: an answer takes as long as the line takes for that, however large the part is."""
_SHORT_SECONDS: Final = 0.02
_LONG_SECONDS: Final = 0.08
"""A burst is about so long: an activation that comes in its middle does not wait for much longer."""
_REASON_CHARACTERS: Final = 1000

SIZE, OFFSET, ASKED = "size_bytes", "offset", "asked"
RECEIVED, KEPT = "received_bytes", "kept"
DATA, SHA256, REFUSED = "data", "sha256", "refused"
"""The names of scalars and tensors, those of the sender first."""

T = TypeVar("T")


class PartSink(Protocol):
    """Who takes the bytes of a part; on a thread that may wait. A RavnestError says why it does not."""

    def feed(self, data: memoryview) -> None:
        """Takes the bytes that follow."""

    def finish(self, sha256: str) -> object:
        """All are there; PeerError where their hash is not this one."""

    def discard(self) -> None:
        """Nothing comes of it; also after `finish`, to no effect."""


SinkT = TypeVar("SinkT", bound=PartSink)


class PartRefusedError(PeerError):
    """One part was not taken; the link is as good as before."""


async def send_part(
    link: ResumableLink,
    part: ReplicaPart,
    share: float | None = None,
    reached: Callable[[int], None] = lambda received_bytes: None,
) -> None:
    """Sends a part, in at most this share of the line's time where one is given, and returns when it is kept. `reached`
    is told how much the other side has of it.

    PartRefusedError when the other side does not keep it, or the part is damaged here, which the other side is told;
    any other PeerError when the link has failed, or nothing was heard for ANSWER_SECONDS.
    """
    replica, began = part.replica, time.perf_counter()
    await link.send(_frame(replica, {SIZE: part.size_bytes}))
    await _answer(link, replica, RECEIVED)
    round_trip = time.perf_counter() - began
    chunks, offset = part.chunks(CHUNK_BYTES), 0
    burst = _ASK_BYTES if share is None else CHUNK_BYTES
    began, burst_end, unanswered = time.perf_counter(), burst, 0
    while True:
        try:
            data = await in_thread(lambda: next(chunks, None))
        except PeerError as error:
            await refuse(link, replica, str(error))
            raise PartRefusedError(str(error)) from None
        if data is None:
            break
        offset += len(data)
        asked = offset >= burst_end
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        await link.send(_frame(replica, {OFFSET: offset - len(data), ASKED: asked}, {DATA: tensor}))
        if asked and share is None:
            burst_end, unanswered = offset + burst, unanswered + 1
            if unanswered == _MAX_ASKED:
                reached(await _answer(link, replica, RECEIVED))
                unanswered -= 1
        elif asked and share is not None:
            reached(await _answer(link, replica, RECEIVED))
            seconds = time.perf_counter() - began
            round_trip = min(round_trip, seconds)
            await asyncio.sleep(pause_seconds(seconds, round_trip, share))
            burst = next_burst(burst, seconds - round_trip)
            began, burst_end = time.perf_counter(), offset + burst
    digest = torch.frombuffer(bytearray.fromhex(part.sha256), dtype=torch.uint8)
    await link.send(_frame(replica, {}, {SHA256: digest}))
    while unanswered:
        reached(await _answer(link, replica, RECEIVED))
        unanswered -= 1
    await _answer(link, replica, KEPT)


async def refuse(link: ResumableLink, replica: int, reason: str) -> None:
    """Says that a part will not come, or is not kept, and why."""
    text = bytearray(reason[:_REASON_CHARACTERS].encode())
    await link.send(_frame(replica, {}, {REFUSED: torch.frombuffer(text or bytearray(b"-"), dtype=torch.uint8)}))


def pause_seconds(seconds: float, round_trip_seconds: float, share: float) -> float:
    """How long to leave the line alone after a burst that was confirmed after so long.

    The line was busy for that time less a round trip, in which it lay idle already.
    """
    busy = max(0.0, seconds - round_trip_seconds)
    return max(0.0, busy / share - seconds)


def next_burst(burst_bytes: int, busy_seconds: float) -> int:
    """How much to send at a time, when so much took so long: more on fast lines, where answers are waited for most."""
    if busy_seconds < _SHORT_SECONDS:
        return min(2 * burst_bytes, _MAX_BURST_BYTES)
    return max(burst_bytes // 2, CHUNK_BYTES) if busy_seconds > _LONG_SECONDS else burst_bytes


class PartArrivals(Generic[SinkT]):
    """Takes the parts that come over a link, one after the other."""

    def __init__(self, link: ResumableLink, begin: Callable[[int, int], SinkT]) -> None:
        """`begin(replica, size_bytes)` gives who takes it, on a thread; a RavnestError says why nobody does."""
        self._link = link
        self._begin = begin
        self._refused = -1
        self._early: Frame | None = None

    async def next(self, patience_seconds: float | None = None) -> tuple[int, SinkT]:
        """The next part that is whole, and who took it. Waits without end for it to begin where no patience is given.

        PartRefusedError when a part came that is not taken, or the sender has given it up: there may be another. Any
        other PeerError when the link is over; a sender that breaks the rules has its link failed.
        """
        try:
            frame = await self._first(patience_seconds)
            replica, size = frame.marks.replica, _integer(frame, SIZE)
            if REFUSED in frame.tensors:
                raise PartRefusedError(f"{self._link.peer} does not send the part: {_text(frame)}")
            if replica < 1 or size < 1:
                raise _BrokenRuleError("did not begin with the size of a part")
            return replica, await self._take(replica, size)
        except _BrokenRuleError as error:
            refused = RefusedError(f"{self._link.peer} broke the protocol: it {error}")
            self._link.fail(refused)
            raise refused from None

    async def _first(self, patience_seconds: float | None) -> Frame:
        while True:
            frame, self._early = self._early or await self._frame(patience_seconds), None
            # Of one that was refused, the rest was on its way.
            if frame.marks.replica != self._refused or SIZE in frame.scalars:
                return frame

    async def _take(self, replica: int, size: int) -> SinkT:
        try:
            sink = await in_thread(partial(self._begin, replica, size))
        except RavnestError as error:
            raise await self._not_taken(replica, str(error)) from None
        try:
            await self._tell(replica, {RECEIVED: 0})
            await self._take_data(replica, size, sink)
            await self._tell(replica, {KEPT: True})
            return sink
        except _NotKeptError as error:
            # Before the sender hears of it: the next part, or whoever looks, finds the room that this one took.
            await in_thread(sink.discard)
            raise await self._not_taken(replica, str(error)) from None
        finally:
            # On a thread: it may have to wait for the disk.
            await in_thread(sink.discard)

    async def _take_data(self, replica: int, size: int, sink: PartSink) -> None:
        received = 0
        while True:
            frame = await self._frame(ANSWER_SECONDS)
            if frame.marks.replica != replica or SIZE in frame.scalars:
                self._early = frame
                raise PartRefusedError(f"{self._link.peer} gave replica {replica} up for another")
            if REFUSED in frame.tensors:
                raise PartRefusedError(f"{self._link.peer} broke replica {replica} off: {_text(frame)}")
            if SHA256 in frame.tensors:
                if received != size:
                    raise _BrokenRuleError(f"ended a part of {size} bytes after {received}")
                await _by_sink(partial(sink.finish, _bytes(frame, SHA256, 32).hex()))
                return
            data = _bytes(frame, DATA, None)
            if _integer(frame, OFFSET) != received or received + len(data) > size:
                raise _BrokenRuleError(f"sent bytes of a part that do not follow on byte {received} of {size}")
            await _by_sink(partial(sink.feed, data))
            received += len(data)
            if frame.scalars.get(ASKED):
                await self._tell(replica, {RECEIVED: received})

    async def _frame(self, patience_seconds: float | None) -> Frame:
        return await _received(self._link, patience_seconds)

    async def _tell(self, replica: int, scalars: Mapping[str, int | bool]) -> None:
        await self._link.send(_frame(replica, scalars))

    async def _not_taken(self, replica: int, reason: str) -> PartRefusedError:
        self._refused = replica
        await refuse(self._link, replica, reason)
        return PartRefusedError(reason)


class _BrokenRuleError(Exception):
    """What the other side did that it may not."""


class _NotKeptError(Exception):
    """Why who takes a part does not take it any further."""


async def _by_sink(work: Callable[[], object]) -> None:
    try:
        await in_thread(work)
    except RavnestError as error:
        raise _NotKeptError(str(error)) from None


async def _answer(link: ResumableLink, replica: int, name: str) -> int:
    """Waits for this answer, past those that are late for another part; the number in it."""
    while True:
        frame = await _received(link, ANSWER_SECONDS)
        if frame.marks.replica != replica:
            continue
        if REFUSED in frame.tensors:
            raise PartRefusedError(f"{link.peer} does not keep it: {_text(frame)}")
        if name in frame.scalars:
            return _integer(frame, name)


async def _received(link: ResumableLink, patience_seconds: float | None) -> Frame:
    try:
        async with asyncio.timeout(patience_seconds):
            frame = await link.receive()
    except TimeoutError:
        raise PeerError(f"nothing was heard of {link.peer} for {patience_seconds:g} s") from None
    if frame is None:
        raise PeerError(f"{link.peer} ended the link")
    if frame.kind is not FrameKind.PART:
        refused = RefusedError(f"{link.peer} broke the protocol: it sent a {frame.kind.name} frame among parts")
        link.fail(refused)
        raise refused
    return frame


def _frame(replica: int, scalars: Mapping[str, int | bool], tensors: Mapping[str, torch.Tensor] | None = None) -> Frame:
    return Frame(FrameKind.PART, 0, marks=Marks(replica=replica), scalars=scalars, tensors=tensors or {})


def _integer(frame: Frame, name: str) -> int:
    value = frame.scalars.get(name)
    return value if type(value) is int else -1


def _bytes(frame: Frame, name: str, size: int | None) -> memoryview:
    """The bytes of the only tensor of a frame."""
    tensor = frame.tensors.get(name)
    if tensor is None or len(frame.tensors) > 1 or tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise _BrokenRuleError(f"sent a frame of a part without {name}")
    if not 0 < tensor.numel() <= CHUNK_BYTES or (size is not None and tensor.numel() != size):
        raise _BrokenRuleError(f"sent {tensor.numel()} bytes as {name}")
    return tensor.numpy().data


def _text(frame: Frame) -> str:
    try:
        return bytes(_bytes(frame, REFUSED, None))[: 4 * _REASON_CHARACTERS].decode(errors="replace")
    except _BrokenRuleError as error:
        return f"it {error}"

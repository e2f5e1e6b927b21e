"""Transfer of a part of a replica over a link, in PART frames that carry the number of the replica.

The sender announces the size and waits until the part is wanted. It sends the bytes in order, and then their hash. The
receiver confirms that it keeps the part, or refuses it with a reason at any moment, and skips the remaining frames of a
part that it refused. Parts are background traffic: each piece waits for its turn (net/pacing), so that activations and
gradients find the line free. Now and then the sender asks for the bytes received; on a line that was not measured it
asks after each piece, which measures the line.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

import torch

from ravnest.background import in_thread
from ravnest.errors import PeerError, RavnestError, RefusedError
from ravnest.microbatch import Marks
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.pacing.budget import PacedTransfer, StateBudget
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.provider.replicas.files import ReplicaPart

CHUNK_BYTES: Final = 256 << 10
"""Maximum bytes of a part in one frame."""

ANSWER_SECONDS: Final = 60.0
"""Timeout of an answer, and of the next frame of the other side."""

MAX_BYTES: Final = 1 << 40
"""Maximum size of a part, if no tighter limit is known."""

_ASK_PIECES: Final = 4
"""The sender asks after this many pieces."""
_MAX_ASKED: Final = 8
"""The sender waits while this many questions are unanswered. So an answer takes only as long as the line needs for
that, however large the part is."""
_REASON_CHARACTERS: Final = 1000

SIZE, OFFSET, ASKED = "size_bytes", "offset", "asked"
RECEIVED, KEPT = "received_bytes", "kept"
DATA, SHA256, REFUSED = "data", "sha256", "refused"
"""Names of scalars, first those of the sender, and of tensors."""

T = TypeVar("T")


class PartSink(Protocol):
    """Takes the bytes of a part, on a thread that may block. A RavnestError says why it stops."""

    def feed(self, data: memoryview) -> None:
        """Take the bytes that follow."""

    def finish(self, sha256: str) -> object:
        """All bytes were fed; PeerError when they do not have this hash."""

    def discard(self) -> None:
        """The part is given up; has no effect after `finish`."""


SinkT = TypeVar("SinkT", bound=PartSink)


class PartRefusedError(PeerError):
    """One part was not accepted; the link can still be used."""


async def send_part(
    link: ResumableLink,
    part: ReplicaPart,
    transfer: PacedTransfer | None = None,
    reached: Callable[[int], None] = lambda received_bytes: None,
) -> None:
    """Send a part when it is the turn of this transfer (None: at once), and return when the part is stored. `reached`
    is called with the number of bytes that have arrived.

    PartRefusedError when the other side does not store it, or the part is damaged here, which the other side is told.
    Any other PeerError when the link has failed, or there was no answer for ANSWER_SECONDS.
    """
    paced = transfer or StateBudget.unlimited().transfer("part")
    replica, began = part.replica, time.perf_counter()
    await link.send(_frame(replica, {SIZE: part.size_bytes}))
    await _answer(link, replica, RECEIVED)
    round_trip = time.perf_counter() - began
    chunks, offset, pieces, unanswered = part.chunks(CHUNK_BYTES), 0, 0, 0
    while True:
        try:
            chunk = await in_thread(lambda: next(chunks, None))
        except PeerError as error:
            await refuse(link, replica, str(error))
            raise PartRefusedError(str(error)) from None
        if chunk is None:
            break
        for piece in _pieces(chunk, paced):
            learns = paced.learns
            await paced.turn(len(piece))
            pieces += 1
            asked = learns or pieces % _ASK_PIECES == 0
            began = time.perf_counter()
            tensor = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
            await link.send(_frame(replica, {OFFSET: offset, ASKED: asked}, {DATA: tensor}))
            offset, unanswered = offset + len(piece), unanswered + asked
            while unanswered and (learns or unanswered == _MAX_ASKED):
                reached(await _answer(link, replica, RECEIVED))
                unanswered -= 1
            if learns:
                seconds = time.perf_counter() - began
                round_trip = min(round_trip, seconds)
                paced.observed(len(piece), seconds - round_trip)
    digest = torch.frombuffer(bytearray.fromhex(part.sha256), dtype=torch.uint8)
    await link.send(_frame(replica, {}, {SHA256: digest}))
    while unanswered:
        reached(await _answer(link, replica, RECEIVED))
        unanswered -= 1
    await _answer(link, replica, KEPT)


async def refuse(link: ResumableLink, replica: int, reason: str) -> None:
    """Tell the other side that a part will not be sent, or is not stored, and why."""
    text = bytearray(reason[:_REASON_CHARACTERS].encode())
    await link.send(_frame(replica, {}, {REFUSED: torch.frombuffer(text or bytearray(b"-"), dtype=torch.uint8)}))


def _pieces(chunk: bytes, paced: PacedTransfer) -> Iterator[bytes]:
    """The chunk in pieces of the size that the line takes at present."""
    start = 0
    while start < len(chunk):
        end = start + min(paced.piece_bytes, CHUNK_BYTES)
        yield chunk[start:end]
        start = end


class PartArrivals(Generic[SinkT]):
    """Receives the parts that arrive over a link, one after the other."""

    def __init__(self, link: ResumableLink, begin: Callable[[int, int], SinkT]) -> None:
        """`begin(replica, size_bytes)` returns the sink of a part, on a thread; a RavnestError says why the part is
        refused."""
        self._link = link
        self._begin = begin
        self._refused = -1
        self._early: Frame | None = None

    async def next(self, patience_seconds: float | None = None) -> tuple[int, SinkT]:
        """The next complete part, and its sink. Without a timeout, waits forever for it to begin.

        PartRefusedError when a part was refused, or the sender has given it up: there may be another. Any other
        PeerError when the link is over; a sender that breaks the rules has its link failed.
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
            # The remaining frames of a refused part are skipped.
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
            # Before the sender hears of it, so that the next part finds the disk space free.
            await in_thread(sink.discard)
            raise await self._not_taken(replica, str(error)) from None
        finally:
            # On a thread, because it may have to wait for the disk.
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
    """The other side broke a rule of the protocol."""


class _NotKeptError(Exception):
    """The sink of a part does not take it any further."""


async def _by_sink(work: Callable[[], object]) -> None:
    try:
        await in_thread(work)
    except RavnestError as error:
        raise _NotKeptError(str(error)) from None


async def _answer(link: ResumableLink, replica: int, name: str) -> int:
    """Wait for this answer, and skip late answers about other parts. Returns its number."""
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
        raise PeerError(f"no answer from {link.peer} for {patience_seconds:g} s") from None
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

"""Coded parts on their way from the owner to the holder: the owner's record of what the holder has, and the file that
the holder makes of what arrives.

A part is coded against the last part that the holder has confirmed. The owner keeps that part as the holder has it, in
a file without a name. When the holder has changed, or does not have the reference any more, the part is sent without
one.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from ravnest.background import in_thread
from ravnest.errors import PeerError, RunError
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.provider.replicas.files import PartFiles, PartWriter, ReplicaPart
from ravnest.provider.replicas.outgoing import OutgoingTransfers
from ravnest.provider.replicas.transfer import PartRefusedError, send_part
from ravnest.state.coded_part import MAGIC, DecodeTarget, PartDecoder, Preamble, encode_part
from ravnest.state.codings import EXACT
from ravnest.state.reader import PartReader

_SPARE_BYTES: Final = 64 << 10
_SPARE_SHARE: Final = 1 / 16
"""Coded bytes may be more than plain ones by this much: no form makes a piece longer by more."""


@dataclass(frozen=True, slots=True)
class HeldCopy:
    """The part that the holder has stored."""

    part: ReplicaPart
    sent_bytes: int


class CodedSender:
    """Sends the parts of one stage, coded, to its holder."""

    def __init__(self, files: PartFiles, transfers: OutgoingTransfers) -> None:
        self._files = files
        self._transfers = transfers
        self._holder = ""
        self._reference: ReplicaPart | None = None
        self._max_bytes_per_second = 0.0

    async def send(
        self, link: ResumableLink, holder: str, part: ReplicaPart, coding: str, max_bytes_per_second: float = 0.0
    ) -> HeldCopy:
        """Send a part to the holder at the other end of this link; returns what it has then. PeerError as in
        `send_part`. A maximum rate protects the holder's line; 0: there is none."""
        self._max_bytes_per_second = max_bytes_per_second
        if coding == EXACT:
            self._reference = None
            return await self._send(link, part, part)
        reference = self._reference if holder == self._holder else None
        if reference is not None and reference.key != part.key:
            reference = None
        try:
            sent = await self._send_coded(link, part, coding, reference)
        except PartRefusedError:
            if reference is None:
                raise
            # The holder may have lost the reference.
            sent = await self._send_coded(link, part, coding, None)
        self._reference, self._holder = sent.part, holder
        return sent

    async def _send_coded(
        self, link: ResumableLink, part: ReplicaPart, coding: str, reference: ReplicaPart | None
    ) -> HeldCopy:
        try:
            coded, held = await in_thread(partial(encoded, self._files, part, coding, reference))
        except RunError:
            # The disk has no room for coding. A replica that takes long is better than none.
            return await self._send(link, part, part)
        return await self._send(link, coded, held)

    async def _send(self, link: ResumableLink, sent: ReplicaPart, held: ReplicaPart) -> HeldCopy:
        with self._transfers.sending("replica", sent.key, sent.size_bytes) as sending:
            transfer = self._transfers.budget.transfer("replica", max_bytes_per_second=self._max_bytes_per_second)
            await send_part(link, sent, transfer, sending.reached)
        return HeldCopy(held, sent.size_bytes)


def encoded(
    files: PartFiles, part: ReplicaPart, coding: str, reference: ReplicaPart | None
) -> tuple[ReplicaPart, ReplicaPart]:
    """The part as coded bytes, and as the receiver decodes it, in files without names. PeerError when the part is
    damaged, RunError when the disk has no room."""
    preamble = Preamble(coding, part.size_bytes)
    if reference is not None:
        preamble = Preamble(coding, part.size_bytes, reference.replica, reference.sha256)
    max_bytes = _SPARE_BYTES + int((1 + _SPARE_SHARE) * part.size_bytes)
    coded = files.begin(part.key, part.replica, max_bytes, listed=False)
    decoded: PartWriter | None = None
    try:
        decoded = files.begin(part.key, part.replica, part.size_bytes, listed=False)
        known = None if reference is None else reference.reader()
        if encode_part(part.reader(), preamble, known, coded.feed, decoded.feed) != part.sha256:
            raise PeerError(f"{part} is damaged on the disk here; use another replica")
        return coded.finish(), decoded.finish()
    finally:
        coded.discard()
        if decoded is not None:
            decoded.discard()


class ArrivingPart:
    """The sink of a part that arrives at its holder: as it is, or coded."""

    def __init__(self, files: PartFiles, key: str, replica: int, size_bytes: int, max_bytes: int) -> None:
        """`size_bytes` will arrive; the stored part has at most `max_bytes`. RunError when the disk has no room."""
        self._files = files
        self._key = key
        self._replica = replica
        self._max_bytes = max_bytes
        self._writer = files.begin(key, replica, self._checked(size_bytes))
        self._first = bytearray()
        self._decoder: PartDecoder | None = None
        self._feed: Callable[[bytes | memoryview], None] | None = None
        self._digest = hashlib.sha256()

    def feed(self, data: memoryview) -> None:
        if self._feed is None:
            self._first += data
            if len(self._first) < len(MAGIC):
                return
            if self._first.startswith(MAGIC):
                self._decoder = PartDecoder(self._begin)
                self._feed = self._decode
            else:
                self._feed = self._writer.feed
            first, self._first = bytes(self._first), bytearray()
            self._feed(first)
            return
        self._feed(data)

    def finish(self, sha256: str) -> None:
        if self._decoder is None:
            if self._first:
                self._writer.feed(bytes(self._first))
            self._writer.finish(sha256)
            return
        if self._digest.hexdigest() != sha256:
            raise PeerError(f"the part of {self._key} of replica {self._replica} arrived damaged")
        self._writer.finish(self._decoder.finish())

    def discard(self) -> None:
        self._writer.discard()

    def _decode(self, data: bytes | memoryview) -> None:
        assert self._decoder is not None
        self._digest.update(data)
        self._decoder.feed(data)

    def _begin(self, preamble: Preamble) -> DecodeTarget:
        size_bytes = self._checked(preamble.size_bytes)
        reference: PartReader | None = None
        if preamble.replica:
            part = self._files.find(self._key, preamble.replica)
            if part.sha256 != preamble.sha256:
                raise PeerError(f"{part} is not the one here that its owner means: its sha256 is another")
            reference = part.reader()
        # The space that was taken for the coded bytes.
        self._writer.discard()
        self._writer = self._files.begin(self._key, self._replica, size_bytes)
        return DecodeTarget(self._writer.feed, reference)

    def _checked(self, size_bytes: int) -> int:
        if size_bytes > self._max_bytes:
            raise RunError(f"a part of {size_bytes:,} bytes is more than the {self._max_bytes:,} its stage can need")
        return size_bytes

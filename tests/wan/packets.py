"""Frames of a TUN device: a virtio header, then an IPv4 packet of one or several segments.

With offloading, the kernel passes a burst of TCP segments as one large packet. That saves most of the work, but a slow
line must not transmit 64 KiB at once, and loss affects single segments. So `Frame.part` cuts such a packet at segment
borders into packets that the receiving kernel accepts as if the sender had sent them.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

VIRTIO_BYTES: Final = 10
TCP: Final = 6
UDP: Final = 17
ICMP: Final = 1

_VIRTIO = struct.Struct(
    "=BBHHHH"
)  # flags, segmentation, header bytes, payload bytes per segment, checksum start, offset
_IP: Final = VIRTIO_BYTES
_PROTOCOL: Final = _IP + 9
_SOURCE = slice(_IP + 12, _IP + 16)
_TARGET = slice(_IP + 16, _IP + 20)
_FIN_PSH: Final = 0x09
_SYN_ACK: Final = 0x12
_SYN: Final = 0x02
_CWR: Final = 0x80


@dataclass(slots=True, eq=False)
class Frame:
    """One packet, or a burst of `segments` packets that share their headers."""

    data: bytes
    target: bytes
    """The IPv4 address of the receiver."""
    size_bytes: int
    """Its size on the wire, including the headers of every segment."""
    segments: int = 1
    header_bytes: int = 0
    payload_bytes: int = 0
    """The payload of each segment (the last may have less); 0 if there is only one."""

    def part(self, first: int, last: int) -> "Frame":
        """The segments from `first` up to, but not including, `last`, as a separate frame."""
        if first == 0 and last >= self.segments:
            return self
        last = min(last, self.segments)
        return _part(self, first, last)

    def chunks(self, max_bytes: float) -> Iterator["Frame"]:
        """The same segments in frames of at most `max_bytes` on the wire, but at least one segment each."""
        step = max(1, int(max_bytes // (self.header_bytes + self.payload_bytes)))
        for first in range(0, self.segments, step):
            yield self.part(first, first + step)

    def fitting(self, room_bytes: int) -> "Frame | None":
        """The first segments that fit into `room_bytes`."""
        if self.size_bytes <= room_bytes:
            return self
        count = room_bytes // (self.header_bytes + self.payload_bytes) if self.segments > 1 else 0
        return self.part(0, count) if count else None


def parse(data: bytes) -> Frame | None:
    """The frame in the data of a TUN device, or None if it is not IPv4."""
    if len(data) < _IP + 20 or data[_IP] >> 4 != 4:
        return None
    size = len(data) - VIRTIO_BYTES
    target = data[_TARGET]
    payload = data[4] | data[5] << 8 if data[1] else 0
    if not payload:
        return Frame(data, target, size)
    header = _header_bytes(data)
    segments = max(1, -(-(size - header) // payload))
    return Frame(data, target, size + (segments - 1) * header, segments, header, payload)


class Nat:
    """Filter of a home router: no new TCP connections from outside, and datagrams only from known addresses."""

    def __init__(self) -> None:
        self._opened: set[tuple[int, bytes, bytes]] = set()

    def outbound(self, frame: Frame) -> None:
        """Remembers the address to which the host behind it sends."""
        data = frame.data
        if data[_PROTOCOL] != TCP:
            self._opened.add(_conversation(data, data[_TARGET], outbound=True))

    def admits(self, frame: Frame) -> bool:
        """Whether a frame from outside may pass."""
        data = frame.data
        protocol = data[_PROTOCOL]
        if protocol == TCP:
            return data[_transport(data) + 13] & _SYN_ACK != _SYN
        if data[_IP + 6] & 0x1F or data[_IP + 7]:
            return True  # a later fragment has no ports, and is useless without the first
        if protocol == ICMP and data[_transport(data)] not in (0, 8):
            return True  # errors about packets that the host itself sent
        return _conversation(data, data[_SOURCE], outbound=False) in self._opened


def _conversation(data: bytes, peer: bytes, *, outbound: bool) -> tuple[int, bytes, bytes]:
    """Protocol, address of the other side, and the ports from the host's view (for an echo request its identifier)."""
    start = _transport(data)
    if data[_PROTOCOL] == ICMP:
        # An echo request from outside must not match the echo requests the host itself sent.
        return ICMP, peer, data[start + 4 : start + 6] + (b"" if outbound or data[start] == 0 else b"?")
    near, far = data[start : start + 2], data[start + 2 : start + 4]
    return data[_PROTOCOL], peer, near + far if outbound else far + near


def _transport(data: bytes) -> int:
    return _IP + (data[_IP] & 15) * 4


def _header_bytes(data: bytes) -> int:
    ip = (data[_IP] & 15) * 4
    return ip + (data[_IP + ip + 12] >> 4) * 4


def _part(frame: Frame, first: int, last: int) -> Frame:
    old, header, payload = frame.data, frame.header_bytes, frame.payload_bytes
    start = VIRTIO_BYTES + header
    body = old[start + first * payload : start + last * payload]
    head = bytearray(old[:start])
    segments = last - first
    flags, kind, header_hint, _, checksum_start, checksum_offset = _VIRTIO.unpack_from(old)
    many = segments > 1
    _VIRTIO.pack_into(
        head, 0, flags, kind if many else 0, header_hint, payload if many else 0, checksum_start, checksum_offset
    )

    ip_bytes = (old[_IP] & 15) * 4
    tcp = _IP + ip_bytes
    size = header + len(body)
    (identification,) = struct.unpack_from("!H", old, _IP + 4)
    struct.pack_into("!HH", head, _IP + 2, size, (identification + first) & 0xFFFF)
    struct.pack_into("!H", head, _IP + 10, 0)
    struct.pack_into("!H", head, _IP + 10, ~_sum(head[_IP:tcp]) & 0xFFFF)

    (sequence,) = struct.unpack_from("!I", old, tcp + 4)
    struct.pack_into("!I", head, tcp + 4, (sequence + first * payload) & 0xFFFFFFFF)
    if last < frame.segments:
        head[tcp + 13] &= ~_FIN_PSH
    if first:
        head[tcp + 13] &= ~_CWR
    # The kernel left the checksum to the network card, and wrote the sum of the pseudo header in its place.
    pseudo = bytes(head[_SOURCE]) + bytes(head[_TARGET]) + struct.pack("!HH", TCP, size - ip_bytes)
    struct.pack_into("!H", head, tcp + 16, _sum(pseudo))
    return Frame(
        bytes(head) + body,
        frame.target,
        size + (segments - 1) * header,
        segments,
        header if many else 0,
        payload if many else 0,
    )


def _sum(data: bytes | bytearray) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total

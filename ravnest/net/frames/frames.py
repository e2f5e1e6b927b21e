"""Frames: the unit that flows between stages, and between the coordinator and a stage.

A frame is a small protobuf header and the raw bytes of its tensors (the layout is in proto/ravnest/v1/frame.proto).
Encoding copies tensor bytes once, decoding not at all. Whatever a peer may have sent, `decode` either returns a
frame whose every length, shape, element type and name has been checked, or raises PeerError.
"""

import enum
import functools
import math
import struct
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field
from typing import Final

import torch
from google.protobuf.message import DecodeError

from ravnest.codecs.codec import codec_named
from ravnest.errors import PeerError
from ravnest.microbatch import UNMARKED, Marks
from ravnest.net.frame_limits import DEFAULT_LIMITS, FrameLimits
from ravnest.net.frames.tensor_bytes import TORCH_DTYPES, WIRE_DTYPES, on_host, tensor_bytes, tensor_view
from ravnest.net.v1 import frame_pb2

MAGIC: Final = b"RVN\x01"
ALIGNMENT_BYTES: Final = 64


class FrameKind(enum.IntEnum):
    """What a frame means to the stage that receives it."""

    FEED = 1
    """Inputs to the root or targets to the leaf, from the coordinator."""
    FORWARD = 2
    """Activations, towards the leaf."""
    BACKWARD = 3
    """Gradients, towards the root."""
    RESULT = 4
    """Loss and metrics of a microbatch, to the coordinator."""
    DONE = 5
    """The microbatch has passed its last step on this stage."""
    RESUME = 6
    """First on every connection of a link: `microbatch` counts the frames that have arrived so far."""
    ACK = 7
    """`microbatch` counts the frames that have arrived, so that the sender may forget them."""
    END = 8
    """Nothing follows."""
    CONTROL = 9
    """A message of control.proto, in the bytes of the tensor `message`."""
    RING = 10
    """A piece of what a ring averages, in the bytes of the tensor `data`."""
    PART = 11
    """Bytes of a part of a replica, in the tensor `data`; `replica` says of which."""


CODED_KINDS: Final = frozenset({FrameKind.FORWARD, FrameKind.BACKWARD})
"""Frames whose tensors may be in a codec."""


@dataclass(frozen=True, slots=True)
class RingPlace:
    """Where a piece of what a ring averages belongs."""

    round: int
    ring: int
    attempt: int = 0
    hop: int = 0
    segment: int = 0
    chunk: int = 0
    donation: bool = False
    """Not of an attempt: the anchor and the outer state, for an owner that was left out."""
    last: bool = False
    """Of a donation: nothing follows."""


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """A tensor of float32 in the bytes of a codec."""

    codec: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    """Its dimensions in the order of its memory, as `tensors.dense` gives them."""
    data: torch.Tensor
    """Flat, uint8."""

    @property
    def raw_bytes(self) -> int:
        """What it takes when it is not coded."""
        return math.prod(self.shape) * torch.float32.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One message about one microbatch. A tensor of a received frame is a view of the message it came in."""

    kind: FrameKind
    microbatch: int
    marks: Marks = UNMARKED
    """In a PART frame, `replica` says which replica the bytes belong to."""
    generation: int = 0
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scalars: Mapping[str, int | float | bool] = field(default_factory=dict)
    piece: RingPlace | None = None
    coded: Mapping[str, Coded] = field(default_factory=dict)
    """Of a FORWARD or BACKWARD frame: tensors in a codec. Their bytes are as they came: the codec looks at them."""
    residence_micros: int = 0
    """Of a BACKWARD frame: how long its sender has had the microbatch, since its activations came; 0: not told."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Of a FEED frame: the free sizes of the microbatch, by symbol."""


def encode(frame: Frame, limits: FrameLimits = DEFAULT_LIMITS) -> bytes:
    """The frame as bytes. Tensors on another device are brought to the CPU, others are read where they lie.

    Raises PeerError for a frame that the other side would refuse: too large, an element type that does not travel,
    a number that does not fit 64 bits.
    """
    pieces: list[bytes | memoryview] = [b"", b""]
    held = []  # tensors whose memory `pieces` points into; they must outlive the join
    specs = b""
    size = 0
    for name, tensor in frame.tensors.items():
        shape = tensor.shape
        tensor, order = on_host(name, tensor)
        held.append(tensor)
        specs += _spec_bytes(name, WIRE_DTYPES[tensor.dtype], shape, order)
        size += _add_bytes(pieces, tensor)
    for name, coded in frame.coded.items():
        tensor, _ = on_host(name, coded.data)
        held.append(tensor)
        specs += _coded_spec_bytes(name, coded)
        size += _add_bytes(pieces, tensor)
    header = _header_bytes(frame) + specs
    if frame.sizes:
        header += _sizes_bytes(tuple(frame.sizes.items()))
    if frame.scalars:
        header += b"".join(_scalar_bytes(name, value) for name, value in frame.scalars.items())
    head = _PREFIX_BYTES + len(header)
    padding = -head % ALIGNMENT_BYTES
    if head + padding + size > limits.frame_bytes:
        raise PeerError(
            f"the frame of microbatch {frame.microbatch} has {head + padding + size} bytes, more than the "
            f"{limits.frame_bytes} a frame may have; use smaller microbatches"
        )
    if len(header) > limits.header_bytes or len(held) > limits.tensors or len(frame.scalars) > limits.scalars:
        raise PeerError(
            f"the frame of microbatch {frame.microbatch} has {len(held)} tensors and {len(frame.scalars)} scalars in "
            f"a header of {len(header)} bytes, more than a frame may have; cut the model elsewhere"
        )
    pieces[0] = _PREFIX.pack(MAGIC, len(header))
    pieces[1] = header + _ZEROS[padding]
    return b"".join(pieces)


def decode(data: bytes, limits: FrameLimits = DEFAULT_LIMITS) -> Frame:
    """The one frame that `data` holds; its tensors are views of `data`. Raises PeerError for anything else."""
    frame, end = decode_at(data, 0, limits)
    if end != len(data):
        raise PeerError(f"a frame of {end} bytes came in a message of {len(data)} bytes")
    return frame


def decode_at(data: bytes, start: int, limits: FrameLimits = DEFAULT_LIMITS) -> tuple[Frame, int]:
    """The frame that begins at `start`, and where it ends. Raises PeerError if there is no whole valid frame."""
    available = len(data) - start
    if available < _PREFIX_BYTES:
        raise PeerError(f"a frame is cut short: {available} bytes are less than its first {_PREFIX_BYTES}")
    magic, header_bytes = _PREFIX.unpack_from(data, start)
    if magic != MAGIC:
        raise PeerError(f"a message begins with {magic!r}, which is not a frame of this protocol version ({MAGIC!r})")
    if header_bytes > limits.header_bytes:
        raise PeerError(f"the header of a frame has {header_bytes} bytes, more than {limits.header_bytes}")
    head = _PREFIX_BYTES + header_bytes
    if head > available:
        raise PeerError(f"a frame is cut short inside its header: {available} bytes of {head}")
    header = frame_pb2.FrameHeader()
    try:
        header.ParseFromString(data[start + _PREFIX_BYTES : start + head])
    except (DecodeError, ValueError) as error:
        raise PeerError(f"the header of a frame cannot be read: {error}") from None
    kind = _KINDS.get(header.kind)
    if kind is None:
        raise PeerError(f"a frame has the unknown kind {header.kind}")
    offset = head + -head % ALIGNMENT_BYTES
    tensors, coded, offset = _decode_tensors(header, data, start, offset, limits)
    if coded and kind not in CODED_KINDS:
        raise PeerError(f"a {kind.name} frame has a tensor in a codec, which only FORWARD and BACKWARD frames may")
    if offset > available:
        raise PeerError(f"a frame is cut short: {available} bytes of {offset}")
    frame = Frame(
        kind,
        header.microbatch,
        _decode_marks(header),
        header.generation,
        tensors,
        _decode_scalars(header, limits),
        piece=_decode_piece(header.piece) if header.HasField("piece") else None,
        coded=coded,
        residence_micros=header.residence_micros,
        sizes=_decode_sizes(header, limits),
    )
    return frame, start + offset


def _add_bytes(pieces: list[bytes | memoryview], tensor: torch.Tensor) -> int:
    """Adds a tensor's memory and zeros up to the next one; how many bytes that is."""
    pieces.append(tensor_bytes(tensor))
    nbytes = tensor.nbytes
    if padding := -nbytes % ALIGNMENT_BYTES:
        pieces.append(_ZEROS[padding])
    return nbytes + padding


_PREFIX = struct.Struct("<4sI")
_PREFIX_BYTES = _PREFIX.size
_ZEROS = [bytes(count) for count in range(ALIGNMENT_BYTES)]
_KINDS = {int(kind): kind for kind in FrameKind}


def _decode_tensors(
    header: frame_pb2.FrameHeader, data: bytes, start: int, offset: int, limits: FrameLimits
) -> tuple[dict[str, torch.Tensor], dict[str, Coded], int]:
    specs = header.tensors
    if len(specs) > limits.tensors:
        raise PeerError(f"a frame has {len(specs)} tensors, more than {limits.tensors}")
    available = len(data) - start
    tensors: dict[str, torch.Tensor] = {}
    coded: dict[str, Coded] = {}
    for spec in specs:
        name = spec.name
        _check_name(name, tensors.keys() | coded.keys(), limits)
        known = TORCH_DTYPES.get(spec.dtype)
        if known is None:
            raise PeerError(f"the tensor {name!r} of a frame has the unknown element type {spec.dtype}")
        dtype, itemsize = known
        shape = tuple(spec.shape)
        if len(shape) > limits.dimensions:
            raise PeerError(
                f"the tensor {name!r} of a frame has {len(shape)} dimensions, more than {limits.dimensions}"
            )
        nbytes = reach = itemsize
        for size in shape:
            nbytes *= size
            # An empty tensor has no bytes but still strides: the product of its other sizes must stay sane too.
            reach *= size or 1
        if reach > limits.frame_bytes:
            raise PeerError(
                f"the tensor {name!r} of a frame has the shape {shape}, more than {limits.frame_bytes} bytes"
            )
        if spec.codec:
            if dtype is not torch.float32:
                raise PeerError(f"the tensor {name!r} of a frame is {dtype} in a codec, which only float32 may be")
            nbytes = _coded_bytes(spec, nbytes // itemsize)
        if offset + nbytes > available:
            raise PeerError(f"a frame is cut short inside its tensor {name!r}: {available} bytes of {offset + nbytes}")
        order = tuple(spec.order)
        if order and sorted(order) != list(range(len(shape))):
            raise PeerError(f"the tensor {name!r} of a frame says its {len(shape)} dimensions lie in the order {order}")
        if spec.codec:
            view = tensor_view(name, data, start + offset, torch.uint8, (nbytes,))
            coded[name] = Coded(spec.codec, shape, order, view)
        else:
            tensors[name] = tensor_view(name, data, start + offset, dtype, shape, order)
        offset += nbytes
        offset += -offset % ALIGNMENT_BYTES
    return tensors, coded, offset


def _coded_bytes(spec: frame_pb2.TensorSpec, count: int) -> int:
    """How many bytes the values of a coded tensor take."""
    codec = codec_named(spec.codec)
    most = codec.size_bytes(count)
    if not codec.varies:
        return most
    if spec.coded_bytes > most:
        raise PeerError(
            f"the tensor {spec.name!r} of a frame has {spec.coded_bytes} bytes in {codec.name}, where {count} values "
            f"are at most {most}"
        )
    return spec.coded_bytes


def _decode_scalars(header: frame_pb2.FrameHeader, limits: FrameLimits) -> dict[str, int | float | bool]:
    if len(header.scalars) > limits.scalars:
        raise PeerError(f"a frame has {len(header.scalars)} scalars, more than {limits.scalars}")
    scalars: dict[str, int | float | bool] = {}
    for scalar in header.scalars:
        _check_name(scalar.name, scalars, limits)
        which = scalar.WhichOneof("value")
        if which is None:
            raise PeerError(f"the scalar {scalar.name!r} of a frame has no value")
        scalars[scalar.name] = getattr(scalar, which)
    return scalars


def _decode_sizes(header: frame_pb2.FrameHeader, limits: FrameLimits) -> dict[str, int]:
    if len(header.sizes) > limits.sizes:
        raise PeerError(f"a frame has {len(header.sizes)} free sizes, more than {limits.sizes}")
    sizes: dict[str, int] = {}
    for entry in header.sizes:
        _check_name(entry.symbol, sizes, limits)
        sizes[entry.symbol] = entry.size
    return sizes


def _decode_marks(header: frame_pb2.FrameHeader) -> Marks:
    try:
        return Marks(
            train=header.train,
            samples=header.samples,
            checkpoint=header.checkpoint,
            flush=header.flush,
            round=header.round,
            fragment=header.fragment,
            updates=header.updates,
            replica=header.replica,
        )
    except ValueError as error:
        raise PeerError(f"the frame of microbatch {header.microbatch} contradicts itself: {error}") from None


def _decode_piece(piece: frame_pb2.RingPiece) -> RingPlace:
    return RingPlace(
        piece.round,
        piece.ring,
        piece.attempt,
        piece.hop,
        piece.segment,
        piece.chunk,
        piece.donation,
        piece.last,
    )


def _check_name(name: str, taken: Container[str], limits: FrameLimits) -> None:
    if not name or len(name) > limits.name_characters:
        raise PeerError(f"a frame names a value with {len(name)} characters; 1 to {limits.name_characters} are allowed")
    if name in taken:
        raise PeerError(f"a frame names the value {name!r} twice")


def _header_bytes(frame: Frame) -> bytes:
    marks = frame.marks
    try:
        return frame_pb2.FrameHeader(
            kind=frame.kind.value,  # type: ignore[arg-type]
            microbatch=frame.microbatch,
            train=marks.train,
            samples=marks.samples,
            checkpoint=marks.checkpoint,
            generation=frame.generation,
            flush=marks.flush,
            round=marks.round,
            fragment=marks.fragment,
            updates=marks.updates,
            piece=None if frame.piece is None else frame_pb2.RingPiece(**asdict(frame.piece)),
            residence_micros=frame.residence_micros,
            replica=marks.replica,
        ).SerializeToString()
    except (ValueError, TypeError) as error:
        raise PeerError(f"the frame of microbatch {frame.microbatch} cannot be sent: {error}") from None


# A protobuf message is the concatenation of its fields, so the part of the header that repeats from frame to frame
# (the specs of the same tensors, microbatch after microbatch) is serialised once. Not many: pieces of replicas have
# other sizes each time, and would fill whatever room there is over the hours.
@functools.lru_cache(maxsize=512)
def _spec_bytes(name: str, dtype: int, shape: torch.Size, order: tuple[int, ...], codec: str = "") -> bytes:
    _check_own_name(name)
    spec = frame_pb2.TensorSpec(name=name, dtype=dtype, shape=shape, order=order, codec=codec)  # type: ignore[arg-type]
    return frame_pb2.FrameHeader(tensors=[spec]).SerializeToString()


@functools.lru_cache(maxsize=512)
def _sizes_bytes(sizes: tuple[tuple[str, int], ...]) -> bytes:
    if len(sizes) > DEFAULT_LIMITS.sizes:
        raise PeerError(f"a frame cannot carry {len(sizes)} free sizes, {DEFAULT_LIMITS.sizes} are the most")
    for symbol, _ in sizes:
        _check_own_name(symbol)
    return frame_pb2.FrameHeader(
        sizes=[frame_pb2.Size(symbol=symbol, size=size) for symbol, size in sizes]
    ).SerializeToString()


def _coded_spec_bytes(name: str, coded: Coded) -> bytes:
    if not codec_named(coded.codec).varies:
        return _spec_bytes(name, frame_pb2.DTYPE_FLOAT32, torch.Size(coded.shape), coded.order, coded.codec)
    _check_own_name(name)
    spec = frame_pb2.TensorSpec(
        name=name,
        dtype=frame_pb2.DTYPE_FLOAT32,
        shape=coded.shape,
        order=coded.order,
        codec=coded.codec,
        coded_bytes=coded.data.numel(),
    )
    return frame_pb2.FrameHeader(tensors=[spec]).SerializeToString()


def _scalar_bytes(name: str, value: int | float | bool) -> bytes:
    _check_own_name(name)
    try:
        if isinstance(value, bool):
            scalar = frame_pb2.Scalar(name=name, truth=value)
        elif isinstance(value, int):
            scalar = frame_pb2.Scalar(name=name, integer=value)
        else:
            scalar = frame_pb2.Scalar(name=name, real=value)
    except (ValueError, TypeError) as error:
        raise PeerError(f"the scalar {name!r} cannot be sent: {error}") from None
    return frame_pb2.FrameHeader(scalars=[scalar]).SerializeToString()


def _check_own_name(name: str) -> None:
    if not name or len(name) > DEFAULT_LIMITS.name_characters:
        most = DEFAULT_LIMITS.name_characters
        raise PeerError(f"a frame cannot carry a value named {name[:40]!r}: names have 1 to {most} characters")

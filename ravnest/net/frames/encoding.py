"""Encoding of frames as bytes: a small protobuf header, then the raw bytes of the tensors, which are copied once.

The layout is in proto/ravnest/v1/frame.proto. `encode` raises PeerError for a frame that the other side would refuse.
"""

import functools
from dataclasses import asdict

import torch

from ravnest.codecs.codec import codec_named
from ravnest.errors import PeerError
from ravnest.net.frame_limits import DEFAULT_LIMITS, FrameLimits
from ravnest.net.frames.frames import ALIGNMENT_BYTES, MAGIC, MARKS, PREFIX, Coded, Frame, FrameKind
from ravnest.net.frames.packed_integers import IntegerRange, packed, packing_of
from ravnest.net.frames.tensor_bytes import WIRE_DTYPES, on_host, tensor_bytes
from ravnest.net.v1 import frame_pb2

_ZEROS = [bytes(count) for count in range(ALIGNMENT_BYTES)]


def encode(frame: Frame, limits: FrameLimits = DEFAULT_LIMITS) -> bytes:
    """The frame as bytes. Tensors on another device are copied to the CPU, others are read in place.

    Raises PeerError for a frame that the other side would refuse: too large, an element type that does not travel, a
    number that does not fit 64 bits.
    """
    pieces: list[bytes | memoryview] = [b"", b""]
    held = []  # tensors whose memory `pieces` points into, kept alive until the join
    specs = b""
    size = 0
    for name, tensor in frame.tensors.items():
        shape = tensor.shape
        tensor, order = on_host(name, tensor)
        spec = _spec_bytes(name, WIRE_DTYPES[tensor.dtype], shape, order)
        if frame.kind is FrameKind.FEED and (packing := packing_of(tensor)) is not None:
            tensor = packed(tensor, packing)
            spec = _packed_spec_bytes(name, shape, order, packing)
        held.append(tensor)
        specs += spec
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
    head = PREFIX.size + len(header)
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
    pieces[0] = PREFIX.pack(MAGIC, len(header))
    pieces[1] = header + _ZEROS[padding]
    return b"".join(pieces)


def _add_bytes(pieces: list[bytes | memoryview], tensor: torch.Tensor) -> int:
    """Add a tensor's memory, and zeros up to the next alignment. Returns the number of bytes."""
    pieces.append(tensor_bytes(tensor))
    nbytes = tensor.nbytes
    if padding := -nbytes % ALIGNMENT_BYTES:
        pieces.append(_ZEROS[padding])
    return nbytes + padding


def _header_bytes(frame: Frame) -> bytes:
    try:
        return frame_pb2.FrameHeader(
            kind=frame.kind.value,  # type: ignore[arg-type]
            microbatch=frame.microbatch,
            generation=frame.generation,
            piece=None if frame.piece is None else frame_pb2.RingPiece(**asdict(frame.piece)),
            residence_micros=frame.residence_micros,
            **{name: getattr(frame.marks, name) for name in MARKS},
        ).SerializeToString()
    except (ValueError, TypeError) as error:
        raise PeerError(f"the frame of microbatch {frame.microbatch} cannot be sent: {error}") from None


# A protobuf message is the concatenation of its fields. So the part of the header that repeats from frame to frame, the
# specs of the same tensors, is serialised once. The cache is small, because pieces of replicas have new sizes each time
# and would fill any cache within hours.
@functools.lru_cache(maxsize=512)
def _spec_bytes(name: str, dtype: int, shape: torch.Size, order: tuple[int, ...], codec: str = "") -> bytes:
    _check_own_name(name)
    spec = frame_pb2.TensorSpec(name=name, dtype=dtype, shape=shape, order=order, codec=codec)  # type: ignore[arg-type]
    return frame_pb2.FrameHeader(tensors=[spec]).SerializeToString()


def _packed_spec_bytes(name: str, shape: torch.Size, order: tuple[int, ...], packing: IntegerRange) -> bytes:
    spec = frame_pb2.TensorSpec(
        name=name,
        dtype=frame_pb2.DTYPE_INT64,
        shape=shape,
        order=order,
        packed_bytes=packing.size_bytes,
        packed_from=packing.lowest,
    )
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

"""Decoding of frames from bytes of a peer, without a copy: the tensors of a frame are views of its message.

The result is either a frame whose every length, shape, element type and name has been checked, or a PeerError.
"""

from collections.abc import Container

import torch
from google.protobuf.message import DecodeError

from ravnest.codecs.codec import codec_named
from ravnest.errors import PeerError
from ravnest.microbatch import Marks
from ravnest.net.frame_limits import DEFAULT_LIMITS, FrameLimits
from ravnest.net.frames.frames import ALIGNMENT_BYTES, MAGIC, MARKS, PLACE, PREFIX, Coded, Frame, FrameKind, RingPlace
from ravnest.net.frames.packed_integers import TYPES, IntegerRange, unpacked
from ravnest.net.frames.tensor_bytes import TORCH_DTYPES, tensor_view
from ravnest.net.v1 import frame_pb2

_KINDS = {int(kind): kind for kind in FrameKind}
_CODED_KINDS = frozenset({FrameKind.FORWARD, FrameKind.BACKWARD})
"""Frames whose tensors may be in a codec."""


def decode(data: bytes, limits: FrameLimits = DEFAULT_LIMITS) -> Frame:
    """The one frame that `data` holds; its tensors are views of `data`. Raises PeerError for anything else."""
    frame, end = decode_at(data, 0, limits)
    if end != len(data):
        raise PeerError(f"a frame of {end} bytes came in a message of {len(data)} bytes")
    return frame


def decode_at(data: bytes, start: int, limits: FrameLimits = DEFAULT_LIMITS) -> tuple[Frame, int]:
    """The frame that begins at `start`, and its end. Raises PeerError if there is no complete valid frame."""
    available = len(data) - start
    if available < PREFIX.size:
        raise PeerError(f"a frame is cut short: {available} bytes are less than its first {PREFIX.size}")
    magic, header_bytes = PREFIX.unpack_from(data, start)
    if magic != MAGIC:
        raise PeerError(f"a message begins with {magic!r}, which is not a frame of this protocol version ({MAGIC!r})")
    if header_bytes > limits.header_bytes:
        raise PeerError(f"the header of a frame has {header_bytes} bytes, more than {limits.header_bytes}")
    head = PREFIX.size + header_bytes
    if head > available:
        raise PeerError(f"a frame is cut short inside its header: {available} bytes of {head}")
    header = frame_pb2.FrameHeader()
    try:
        header.ParseFromString(data[start + PREFIX.size : start + head])
    except (DecodeError, ValueError) as error:
        raise PeerError(f"the header of a frame cannot be read: {error}") from None
    kind = _KINDS.get(header.kind)
    if kind is None:
        raise PeerError(f"a frame has the unknown kind {header.kind}")
    offset = head + -head % ALIGNMENT_BYTES
    tensors, coded, offset = _decode_tensors(header, data, start, offset, limits)
    if coded and kind not in _CODED_KINDS:
        raise PeerError(f"a {kind.name} frame has a tensor in a codec, which only FORWARD and BACKWARD frames may")
    if kind is not FrameKind.FEED and any(spec.packed_bytes for spec in header.tensors):
        raise PeerError(f"a {kind.name} frame has a packed tensor, which only FEED frames may")
    if offset > available:
        raise PeerError(f"a frame is cut short: {available} bytes of {offset}")
    frame = Frame(
        kind,
        header.microbatch,
        _decode_marks(header),
        header.generation,
        tensors,
        _decode_scalars(header, limits),
        piece=RingPlace(*(getattr(header.piece, name) for name in PLACE)) if header.HasField("piece") else None,
        coded=coded,
        residence_micros=header.residence_micros,
        sizes=_decode_sizes(header, limits),
    )
    return frame, start + offset


def _decode_tensors(
    header: frame_pb2.FrameHeader, data: bytes, start: int, offset: int, limits: FrameLimits
) -> tuple[dict[str, torch.Tensor], dict[str, Coded], int]:
    specs = header.tensors
    if len(specs) > limits.tensors:
        raise PeerError(f"a frame has {len(specs)} tensors, more than {limits.tensors}")
    available = len(data) - start
    tensors: dict[str, torch.Tensor] = {}
    coded: dict[str, Coded] = {}
    unpacked_bytes = 0  # They are copied out of the message: a small one must not take much memory.
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
            # An empty tensor has no bytes, but it has strides: the product of its other sizes must stay in bounds too.
            reach *= size or 1
        if reach > limits.frame_bytes:
            raise PeerError(
                f"the tensor {name!r} of a frame has the shape {shape}, more than {limits.frame_bytes} bytes"
            )
        if spec.codec:
            if dtype is not torch.float32:
                raise PeerError(f"the tensor {name!r} of a frame is {dtype} in a codec, which only float32 may be")
            nbytes = _coded_bytes(spec, nbytes // itemsize)
        packing = _packing(spec)
        if packing is not None:
            unpacked_bytes += nbytes
            if unpacked_bytes > limits.frame_bytes:
                raise PeerError(
                    f"the packed tensors of a frame have {unpacked_bytes} bytes, more than {limits.frame_bytes}"
                )
            nbytes = nbytes // itemsize * packing.size_bytes
        if offset + nbytes > available:
            raise PeerError(f"a frame is cut short inside its tensor {name!r}: {available} bytes of {offset + nbytes}")
        order = tuple(spec.order)
        if order and sorted(order) != list(range(len(shape))):
            raise PeerError(f"the tensor {name!r} of a frame says its {len(shape)} dimensions lie in the order {order}")
        if spec.codec:
            view = tensor_view(name, data, start + offset, torch.uint8, (nbytes,))
            coded[name] = Coded(spec.codec, shape, order, view)
        elif packing is not None:
            distances = tensor_view(name, data, start + offset, TYPES[packing.size_bytes], shape, order)
            tensors[name] = unpacked(distances, packing)
        else:
            tensors[name] = tensor_view(name, data, start + offset, dtype, shape, order)
        offset += nbytes
        offset += -offset % ALIGNMENT_BYTES
    return tensors, coded, offset


def _packing(spec: frame_pb2.TensorSpec) -> IntegerRange | None:
    """How a tensor is packed; None where it is not."""
    if not spec.packed_bytes:
        return None
    if spec.packed_bytes not in TYPES or spec.dtype != frame_pb2.DTYPE_INT64 or spec.codec:
        raise PeerError(
            f"the tensor {spec.name!r} of a frame is packed into {spec.packed_bytes} bytes a value, which only int64 "
            f"without a codec may be, into {', '.join(map(str, TYPES))}"
        )
    return IntegerRange(spec.packed_bytes, spec.packed_from)


def _coded_bytes(spec: frame_pb2.TensorSpec, count: int) -> int:
    """Number of bytes that the values of a coded tensor take."""
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
        return Marks(**{name: getattr(header, name) for name in MARKS})
    except ValueError as error:
        raise PeerError(f"the frame of microbatch {header.microbatch} contradicts itself: {error}") from None


def _check_name(name: str, taken: Container[str], limits: FrameLimits) -> None:
    if not name or len(name) > limits.name_characters:
        raise PeerError(f"a frame names a value with {len(name)} characters; 1 to {limits.name_characters} are allowed")
    if name in taken:
        raise PeerError(f"a frame names the value {name!r} twice")

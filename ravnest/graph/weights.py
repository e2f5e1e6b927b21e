"""Stream of weights: a safetensors file in chunks, written and read without a copy of the whole.

The sender yields the chunks of one tensor after the other. The receiver allocates every tensor once, from the header,
and copies each chunk into place. It checks everything before use: an invalid stream is a GraphError, and nothing of it
is returned.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ravnest.errors import GraphError
from ravnest.safe_json import read_json

MAX_HEADER_BYTES: Final = 64 << 20
MAX_DIMENSIONS: Final = 64
MAX_NAME_CHARACTERS: Final = 1024
MAX_HEADER_VALUES: Final = 4_000_000

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES: Final = 8
_METADATA_KEY: Final = "__metadata__"


def stream_tensors(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    chunk_bytes: int = 1 << 20,
    offset_bytes: int = 0,
) -> Iterator[bytes]:
    """Yield a valid safetensors file in chunks of `chunk_bytes` (the last may be shorter), starting at `offset_bytes`.

    The same names, values and metadata give the same bytes, whatever their order and device. At most one tensor at a
    time is made contiguous or copied to the CPU. The values are read while the stream is consumed, so a caller that
    continues training must pass a snapshot. A dtype that safetensors cannot hold is a GraphError.
    """
    assert chunk_bytes > 0 and offset_bytes >= 0
    buffer = bytearray()
    for piece in _pieces(tensors, metadata or {}, offset_bytes):
        while piece:
            if not buffer and len(piece) >= chunk_bytes:
                yield bytes(piece[:chunk_bytes])
                piece = piece[chunk_bytes:]
                continue
            taken = piece[: chunk_bytes - len(buffer)]
            buffer += taken
            piece = piece[len(taken) :]
            if len(buffer) == chunk_bytes:
                yield bytes(buffer)
                buffer.clear()
    if buffer:
        yield bytes(buffer)


def stream_size_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> int:
    """The exact number of bytes that `stream_tensors` yields for the same arguments."""
    return len(stream_header(tensors, metadata or {})) + sum(
        tensor.numel() * tensor.itemsize for tensor in tensors.values()
    )


def content_hash(chunks: Iterable[bytes]) -> str:
    """The sha256 of a stream as hexadecimal text, independent of how it is cut into chunks."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


class WeightsReader:
    """Builds tensors from the chunks of one safetensors stream of exactly `size_bytes` bytes.

    - Memory is allocated only after the header has been compared with `size_bytes`, so a malicious sender cannot make
      the receiver allocate more.
    - Any disagreement (sizes, offsets, dtypes, names, too many or too few bytes) is a GraphError, and the reader cannot
      be used after it.
    """

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < _LENGTH_BYTES + 2:
            raise GraphError(f"a weights stream of {size_bytes} bytes is too short to hold a header; send it again")
        self._size_bytes = size_bytes
        self._received_bytes = 0
        self._head = bytearray()
        self._entries: list[TensorEntry] | None = None
        self._metadata: dict[str, str] = {}
        self._buffers: list[Tensor] = []
        self._current = 0
        self._position = 0

    def feed(self, chunk: bytes | bytearray | memoryview) -> None:
        """Take the next bytes of the stream."""
        view = memoryview(chunk).cast("B")
        self._received_bytes += len(view)
        if self._received_bytes > self._size_bytes:
            raise GraphError(f"a weights stream is longer than the announced {self._size_bytes} bytes; send it again")
        if self._entries is None:
            view = self._feed_header(view)
        while view:
            view = self._feed_tensor(view)

    def finish(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors by name, and the metadata; GraphError if the stream ended early."""
        if self._entries is None or self._received_bytes != self._size_bytes:
            raise GraphError(
                f"a weights stream ended after {self._received_bytes} of {self._size_bytes} bytes; send it again"
            )
        tensors: dict[str, Tensor] = {}
        for entry, buffer in zip(self._entries, self._buffers, strict=True):
            if entry.dtype is torch.bool and buffer.numel() and int(buffer.max()) > 1:
                raise GraphError(f"tensor {entry.name!r} is of type BOOL, but holds other bytes than 0 and 1")
            tensors[entry.name] = buffer.view(entry.dtype).view(entry.shape)
        return tensors, self._metadata

    def _feed_header(self, view: memoryview) -> memoryview:
        """Collect the header, and allocate the tensors once it is complete; returns the bytes after it."""
        view = self._collect(view, _LENGTH_BYTES)
        if len(self._head) < _LENGTH_BYTES:
            return view
        header_bytes = int.from_bytes(self._head[:_LENGTH_BYTES], "little")
        if header_bytes > min(MAX_HEADER_BYTES, self._size_bytes - _LENGTH_BYTES):
            raise GraphError(
                f"a weights stream of {self._size_bytes} bytes announces a header of {header_bytes} bytes, "
                f"more than fit into the stream or the limit of {MAX_HEADER_BYTES} bytes"
            )
        view = self._collect(view, _LENGTH_BYTES + header_bytes)
        if len(self._head) < _LENGTH_BYTES + header_bytes:
            return view
        data_bytes = self._size_bytes - _LENGTH_BYTES - header_bytes
        entries, self._metadata = parse_header(bytes(self._head[_LENGTH_BYTES:]), data_bytes)
        self._head.clear()
        self._buffers = [_allocate(entry) for entry in entries]
        self._entries = entries
        return view

    def _collect(self, view: memoryview, until: int) -> memoryview:
        missing = max(0, until - len(self._head))
        self._head += view[:missing]
        return view[missing:]

    def _feed_tensor(self, view: memoryview) -> memoryview:
        """Copy the bytes of the current tensor into it; returns the rest."""
        while self._position == self._buffers[self._current].numel():
            self._current += 1
            self._position = 0
        target = self._buffers[self._current].numpy().data[self._position :]
        count = min(len(target), len(view))
        target[:count] = view[:count]
        self._position += count
        return view[count:]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in the header of a stream."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte after the header."""
    end: int


def read_header(header: bytes, size_bytes: int) -> list[TensorEntry]:
    """The tensors of a stream of `size_bytes` with this header, in order; GraphError if it cannot have it."""
    length = int.from_bytes(header[:_LENGTH_BYTES], "little")
    if len(header) < _LENGTH_BYTES or length != len(header) - _LENGTH_BYTES or len(header) > size_bytes:
        raise GraphError(f"the header of a weights stream has {len(header)} bytes, and announces others")
    if length > MAX_HEADER_BYTES:
        raise GraphError(f"the header of a weights stream has {length} bytes, more than {MAX_HEADER_BYTES}")
    return parse_header(header[_LENGTH_BYTES:], size_bytes - len(header))[0]


def _pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], skip: int) -> Iterator[memoryview]:
    header = stream_header(tensors, metadata)
    yield memoryview(header)[skip:]
    skip = max(0, skip - len(header))
    for name in stream_order(tensors):
        size = tensors[name].numel() * tensors[name].itemsize
        if size > skip:
            flat = tensors[name].detach().cpu().contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data[skip:]
        skip = max(0, skip - size)


def stream_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names in the order in which a stream has the tensors."""
    # The widest dtype first, so that every tensor is aligned to its element size: memory-mapped readers rely on it.
    return sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))


def stream_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The beginning of the stream of these tensors; their bytes follow in the order of `stream_order`."""
    described: dict[str, object] = {_METADATA_KEY: dict(sorted(metadata.items()))} if metadata else {}
    begin = 0
    for name in stream_order(tensors):
        tensor = tensors[name]
        if tensor.dtype not in _DTYPE_NAMES:
            raise GraphError(f"tensor {name!r} is of type {tensor.dtype}, which safetensors cannot hold; convert it")
        if name == _METADATA_KEY:
            raise GraphError(f"a tensor cannot be called {_METADATA_KEY!r}, the format reserves that name; rename it")
        end = begin + tensor.numel() * tensor.itemsize
        described[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def parse_header(text: bytes, data_bytes: int) -> tuple[list[TensorEntry], dict[str, str]]:
    """The tensors in the order of their bytes, which cover all of `data_bytes`, and the metadata; GraphError when the
    header is invalid."""
    try:
        header = read_json(text, MAX_HEADER_VALUES, object_pairs_hook=_without_repeats)
    except ValueError as error:
        raise GraphError(f"the header of a weights stream is not valid JSON ({error}); send it again") from None
    if not isinstance(header, dict):
        raise GraphError("the header of a weights stream is not a JSON object; send it again")
    metadata = header.pop(_METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise GraphError("the metadata of a weights stream does not consist of text; send it again")
    entries = sorted(
        (_entry(name, described) for name, described in header.items()), key=lambda entry: (entry.begin, entry.end)
    )
    position = 0
    for entry in entries:
        if entry.begin != position:
            raise GraphError(f"tensor {entry.name!r} starts at byte {entry.begin} of the data, not at {position}")
        position = entry.end
    if position != data_bytes:
        raise GraphError(f"the tensors of a weights stream cover {position} of its {data_bytes} bytes of data")
    return entries, metadata


def _entry(name: str, described: object) -> TensorEntry:
    if len(name) > MAX_NAME_CHARACTERS:
        raise GraphError(f"a tensor has a name of {len(name)} characters, more than {MAX_NAME_CHARACTERS}")
    if not isinstance(described, dict) or described.keys() != {"dtype", "shape", "data_offsets"}:
        raise GraphError(f"tensor {name!r} must be described by dtype, shape and data_offsets alone")
    dtype_name, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise GraphError(f"tensor {name!r} has the dtype {str(dtype_name)[:40]!r}; known are {', '.join(DTYPES)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise GraphError(f"the shape of tensor {name!r} is not a list of at most {MAX_DIMENSIONS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise GraphError(f"the data_offsets of tensor {name!r} are not two sizes")
    dtype, (begin, end) = DTYPES[dtype_name], offsets
    if math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 1 << 63:
        raise GraphError(f"the shape of tensor {name!r} is too large to address")
    needed = math.prod(shape) * dtype.itemsize
    if end - begin != needed:
        raise GraphError(f"tensor {name!r} needs {needed} bytes for its shape, but its offsets span {end - begin}")
    return TensorEntry(name, dtype, tuple(shape), begin, end)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _without_repeats(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _allocate(entry: TensorEntry) -> Tensor:
    try:
        return torch.empty(entry.end - entry.begin, dtype=torch.uint8)
    except (RuntimeError, MemoryError):
        raise GraphError(
            f"tensor {entry.name!r} of {entry.end - entry.begin} bytes does not fit into memory; "
            "free some memory or use more providers"
        ) from None

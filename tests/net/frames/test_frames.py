"""Frames come back as they went, and nothing a peer can send does more than raise PeerError."""

import contextlib
import ctypes
import gc
import math
import struct
import subprocess
import sys
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.errors import PeerError
from ravnest.microbatch import Marks
from ravnest.net.frame_limits import FrameLimits
from ravnest.net.frames.decoding import decode, decode_at
from ravnest.net.frames.encoding import encode
from ravnest.net.frames.frames import Coded, Frame, FrameKind
from ravnest.net.frames.tensor_bytes import WIRE_DTYPES
from ravnest.net.v1 import frame_pb2

INT64 = st.integers(-(2**63), 2**63 - 1)
UINT64 = st.integers(0, 2**64 - 1)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
SHAPES = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(list(WIRE_DTYPES)))
    shape = draw(SHAPES)
    values = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    if dtype is torch.bool:
        values %= 2
    return values.view(dtype).reshape(shape) if values.numel() else torch.empty(shape, dtype=dtype)


@st.composite
def marks(draw: st.DrawFn) -> Marks:
    samples = draw(UINT64)
    if not draw(st.booleans()):
        return Marks(train=False, samples=samples)
    round = draw(UINT64)
    return Marks(
        samples=samples,
        checkpoint=draw(UINT64),
        flush=draw(st.booleans()),
        round=round,
        fragment=draw(st.integers(0, 2**32 - 1)) if round else 0,
        updates=draw(UINT64),
        replica=draw(UINT64),
    )


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    return Frame(
        kind=draw(st.sampled_from(FrameKind)),
        microbatch=draw(INT64),
        marks=draw(marks()),
        generation=draw(INT64),
        residence_micros=draw(st.integers(0, 2**64 - 1)),
        tensors=draw(st.dictionaries(NAMES, tensors(), max_size=4)),
        scalars=draw(st.dictionaries(NAMES, st.booleans() | INT64 | st.floats(), max_size=4)),
    )


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def assert_same(left: Frame, right: Frame) -> None:
    for name in ("kind", "microbatch", "marks", "generation", "residence_micros"):
        assert getattr(left, name) == getattr(right, name), name
    assert list(left.tensors) == list(right.tensors)
    for name, tensor in left.tensors.items():
        other = right.tensors[name]
        assert (tensor.dtype, tensor.shape, raw(tensor)) == (other.dtype, other.shape, raw(other)), name
    assert list(left.scalars) == list(right.scalars)
    for name, value in left.scalars.items():
        other_value = right.scalars[name]
        assert type(value) is type(other_value)
        assert value == other_value or (math.isnan(value) and math.isnan(other_value))


@settings(max_examples=200)
@given(frames())
def test_a_frame_comes_back_as_it_went(frame: Frame) -> None:
    data = encode(frame)
    assert len(data) % 64 == 0
    assert_same(decode(data), frame)


@settings(max_examples=50)
@given(st.lists(frames(), min_size=1, max_size=4))
def test_frames_joined_together_come_apart_in_order(several: list[Frame]) -> None:
    data = b"".join(encode(frame) for frame in several)
    offset = 0
    for frame in several:
        decoded, offset = decode_at(data, offset)
        assert_same(decoded, frame)
    assert offset == len(data)


@settings(max_examples=500)
@given(st.binary(max_size=400))
def test_any_bytes_raise_nothing_but_peer_error(data: bytes) -> None:
    for candidate in (data, b"RVN\x01" + data, b"RVN\x01" + struct.pack("<I", max(len(data) - 4, 0)) + data):
        with contextlib.suppress(PeerError):
            decode(candidate)


@settings(max_examples=300)
@given(frames(), st.data())
def test_a_damaged_frame_raises_nothing_but_peer_error(frame: Frame, data: st.DataObject) -> None:
    damaged = bytearray(encode(frame))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(PeerError):
        decode(bytes(damaged))


@settings(max_examples=100)
@given(frames(), st.data())
def test_a_truncated_frame_is_refused(frame: Frame, data: st.DataObject) -> None:
    whole = encode(frame)
    with pytest.raises(PeerError):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


def test_bytes_after_a_frame_are_refused() -> None:
    with pytest.raises(PeerError, match="message of"):
        decode(encode(Frame(FrameKind.DONE, 1)) + bytes(64))


def test_decoding_copies_no_tensor_bytes() -> None:
    data = encode(Frame(FrameKind.FORWARD, 1, tensors={"x": torch.zeros(1 << 22)}))
    tracemalloc.start()
    tensor = decode(data).tensors["x"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert tensor.shape == (1 << 22,)
    assert peak < 100_000
    view = torch.frombuffer(data, dtype=torch.uint8)
    assert view.data_ptr() < tensor.data_ptr() < view.data_ptr() + len(data)


def test_encoding_allocates_the_message_and_little_else() -> None:
    frame = Frame(FrameKind.FORWARD, 1, tensors={"x": torch.zeros(1 << 22), "y": torch.zeros(1 << 20)})
    encode(frame)
    tracemalloc.start()
    data = encode(frame)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(data) + 100_000


def test_tensors_that_are_strided_or_need_gradients_are_sent_by_value() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    frame = Frame(FrameKind.FORWARD, 1, tensors={"t": parameter.t(), "e": torch.ones(1, 3).expand(2, 3)})
    came = decode(encode(frame)).tensors
    assert torch.equal(came["t"], parameter.detach().t())
    assert torch.equal(came["e"], torch.ones(2, 3))
    assert not came["t"].requires_grad


def test_reading_a_frame_warns_of_nothing() -> None:
    program = (
        "import torch; from ravnest.net.frames.decoding import *; from ravnest.net.frames.encoding import *; "
        "decode(encode(Frame(FrameKind.FEED, 1, tensors={'x': torch.ones(3)})))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (Frame(FrameKind.FORWARD, 1, tensors={"z": torch.zeros(2, dtype=torch.complex64)}), "complex64"),
        (Frame(FrameKind.FORWARD, 1, tensors={"s": torch.zeros(2, 2).to_sparse()}), "dense"),
        (Frame(FrameKind.FORWARD, 1, tensors={"m": torch.zeros(2, device="meta")}), "dense"),
        (Frame(FrameKind.FORWARD, 1, tensors={"": torch.zeros(2)}), "named"),
        (Frame(FrameKind.FORWARD, 1, tensors={"n" * 300: torch.zeros(2)}), "named"),
        (Frame(FrameKind.FORWARD, 2**63), "cannot be sent"),
        (Frame(FrameKind.FORWARD, 1, marks=Marks(samples=-1)), "cannot be sent"),
        (Frame(FrameKind.FORWARD, 1, scalars={"x": 2**63}), "'x' cannot be sent"),
    ],
)
def test_a_frame_that_cannot_travel_is_refused_by_its_sender(frame: Frame, words: str) -> None:
    with pytest.raises(PeerError, match=words):
        encode(frame)


def test_a_frame_over_the_limit_is_refused_on_both_sides() -> None:
    frame = Frame(FrameKind.FORWARD, 7, tensors={"x": torch.zeros(1000)})
    with pytest.raises(PeerError, match=r"microbatch 7 has .* smaller microbatches"):
        encode(frame, FrameLimits(frame_bytes=3000))
    with pytest.raises(PeerError, match="'x'"):
        decode(encode(frame), FrameLimits(frame_bytes=3000))


def frame_of(header: frame_pb2.FrameHeader, payload: bytes = b"") -> bytes:
    data = header.SerializeToString()
    return (b"RVN\x01" + struct.pack("<I", len(data)) + data).ljust(-(-(8 + len(data)) // 64) * 64, b"\0") + payload


def header_of(*specs: frame_pb2.TensorSpec, **fields: object) -> frame_pb2.FrameHeader:
    return frame_pb2.FrameHeader(kind=2, tensors=specs, **fields)  # type: ignore[arg-type]


def spec(name: str = "x", dtype: int = frame_pb2.DTYPE_FLOAT32, shape: tuple[int, ...] = (1,)) -> frame_pb2.TensorSpec:
    return frame_pb2.TensorSpec(name=name, dtype=dtype, shape=shape)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cut short"),
        (b"\x80\x04\x95" + bytes(61), "not a frame"),
        (b"RVN\x02" + bytes(60), "not a frame"),
        (b"RVN\x01\xff\xff\xff\xff" + bytes(56), "header of a frame has"),
        (frame_of(frame_pb2.FrameHeader()), "unknown kind 0"),
        (frame_of(frame_pb2.FrameHeader(kind=99)), "unknown kind 99"),  # type: ignore[arg-type]
        (frame_of(header_of(spec(dtype=77)), bytes(64)), "unknown element type 77"),
        (frame_of(header_of(spec(name="")), bytes(64)), "names a value"),
        (frame_of(header_of(spec(name="n" * 257)), bytes(64)), "names a value"),
        (frame_of(header_of(spec(), spec()), bytes(128)), "twice"),
        (frame_of(header_of(spec(shape=(1,) * 17)), bytes(64)), "17 dimensions"),
        (frame_of(header_of(spec(shape=(2**40, 2**40))), bytes(64)), "shape"),
        (frame_of(header_of(spec(shape=(2**63, 2, 0)))), "shape"),
        (frame_of(header_of(spec(shape=(0, 2**62, 2**62)))), "shape"),
        (frame_of(header_of(spec(shape=(2**20,))), bytes(64)), "cut short inside its tensor 'x'"),
        (frame_of(header_of(*[spec(str(i), shape=(0,)) for i in range(1025)])), "1025 tensors"),
        (frame_of(header_of(spec(dtype=frame_pb2.DTYPE_BOOL)), b"\x02" + bytes(63)), "other than 0 and 1"),
        (frame_of(header_of(scalars=[frame_pb2.Scalar(name="x")])), "no value"),
        (frame_of(header_of(train=True, fragment=2)), "fragment 2 belongs to no round"),
        (frame_of(header_of(checkpoint=2)), "an evaluation has marks that only training may have"),
    ],
)
def test_a_malformed_frame_is_refused_in_words(data: bytes, words: str) -> None:
    with pytest.raises(PeerError, match=words):
        decode(data)


def test_a_small_message_that_claims_much_allocates_little() -> None:
    claims = [frame_of(header_of(spec(shape=(2**27,)))), frame_of(header_of(spec(shape=(0, 2**27))))]
    tracemalloc.start()
    for claim in claims:
        with contextlib.suppress(PeerError):
            decode(claim)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def coded_header(
    codec: str, dtype: int = frame_pb2.DTYPE_FLOAT32, kind: FrameKind = FrameKind.FORWARD, coded_bytes: int = 0
) -> bytes:
    """A frame that says it has 512 values in this codec."""
    spec = frame_pb2.TensorSpec(
        name="x",
        dtype=dtype,  # type: ignore[arg-type]
        shape=[512],
        codec=codec,
        coded_bytes=coded_bytes,
    )
    header = frame_pb2.FrameHeader(kind=int(kind), tensors=[spec]).SerializeToString()  # type: ignore[arg-type]
    head = struct.pack("<4sI", b"RVN\x01", len(header)) + header
    return head + bytes(-len(head) % 64)


def test_a_coded_tensor_comes_back_as_it_went() -> None:
    packed = Coded("int8", (2, 128), (1, 0), torch.arange(260).to(torch.uint8))
    found = decode(encode(Frame(FrameKind.BACKWARD, 3, tensors={"y": torch.ones(3)}, coded={"x": packed})))
    assert list(found.tensors) == ["y"]
    again = found.coded["x"]
    assert (again.codec, again.shape, again.order, raw(again.data)) == ("int8", (2, 128), (1, 0), raw(packed.data))


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (coded_header("zip"), "no codec 'zip'"),
        (coded_header("int8", frame_pb2.DTYPE_INT64), "only float32"),
        (coded_header("int8", kind=FrameKind.FEED), "only FORWARD and BACKWARD"),
        (coded_header("lossless", coded_bytes=2062), "has 2062 bytes in lossless, where 512 values are at most 2061"),
    ],
)
def test_a_codec_that_cannot_be_is_refused(header: bytes, reason: str) -> None:
    with pytest.raises(PeerError, match=reason):
        decode(header + bytes(4096))


@pytest.mark.parametrize(("codec", "size"), [("int8", 520), ("bfloat16", 1024), ("float16", 1024)])
def test_the_size_of_what_is_coded_travels_where_it_depends_on_the_values(codec: str, size: int) -> None:
    """And is not believed where it does not."""
    whole = -(-size // 64) * 64
    assert decode(coded_header(codec, coded_bytes=77) + bytes(whole)).coded["x"].data.numel() == size
    found = decode(coded_header("lossless", coded_bytes=1700) + bytes(1728)).coded["x"]
    assert found.data.numel() == 1700 and found.raw_bytes == 2048
    with pytest.raises(PeerError):
        decode(coded_header("lossless", coded_bytes=1700) + bytes(1664))


@pytest.mark.parametrize(("codec", "size"), [("int8", 520), ("bfloat16", 1024), ("float16", 1024)])
def test_coded_bytes_that_are_not_there_are_refused(codec: str, size: int) -> None:
    whole = -(-size // 64) * 64
    assert decode(coded_header(codec) + bytes(whole)).coded["x"].data.numel() == size
    for wrong in (0, whole - 64, whole + 64):
        with pytest.raises(PeerError):
            decode(coded_header(codec) + bytes(wrong))


def test_tensors_of_ever_other_sizes_leave_nothing_behind() -> None:
    def kept() -> int:
        return sum(type(each) is of_arrays for each in gc.get_objects())

    of_arrays = type(ctypes.c_char * 1)

    gc.collect()
    before = kept()
    for size in range(1, 200):
        encode(Frame(FrameKind.FORWARD, microbatch=size, tensors={"x": torch.zeros(size, dtype=torch.uint8)}))
    # Other threads make and let go of some meanwhile; one for each size would be 199.
    assert kept() < before + 100

"""Integers that are fed travel in the smallest type that holds them, and come back exactly as they were."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravnest.errors import PeerError
from ravnest.net.frame_limits import FrameLimits
from ravnest.net.frames.decoding import decode
from ravnest.net.frames.encoding import encode
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.frames.packed_integers import fed_bytes, packing_of
from ravnest.net.v1 import frame_pb2

LOWEST, HIGHEST = -(2**63), 2**63 - 1
EDGES = st.sampled_from([LOWEST, LOWEST + 1, -(2**31), -100, -1, 0, 1, 255, 256, 65535, 65536, 2**32 - 1, HIGHEST])


def fed(tensor: torch.Tensor) -> bytes:
    return encode(Frame(FrameKind.FEED, 1, tensors={"ids": tensor}))


@given(st.lists(EDGES | st.integers(LOWEST, HIGHEST) | st.integers(-300, 300), max_size=6))
def test_any_values_come_back_exactly(values: list[int]) -> None:
    tensor = torch.tensor(values, dtype=torch.int64)
    found = decode(fed(tensor)).tensors["ids"]
    assert found.dtype is torch.int64 and found.tolist() == values


@pytest.mark.parametrize(
    ("values", "size_bytes"),
    [
        ([0, 255], 1),
        ([0, 256], 2),
        ([-100, 50256], 2),
        ([0, 65536], 4),
        ([LOWEST, LOWEST + 2**32 - 1], 4),
        ([0, 2**32], 8),
        ([LOWEST, HIGHEST], 8),
    ],
)
def test_the_smallest_type_is_taken_and_counted(values: list[int], size_bytes: int) -> None:
    tensor = torch.tensor(values * 512)
    assert fed_bytes(tensor) == 1024 * size_bytes
    assert 0 <= len(fed(tensor)) - 1024 * size_bytes <= 256


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int16, torch.float32])
def test_other_types_travel_as_they_are(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 4, dtype=dtype)
    found = decode(fed(tensor)).tensors["ids"]
    assert found.dtype is dtype and torch.equal(found, tensor) and fed_bytes(tensor) == tensor.nbytes


def test_the_order_of_dimensions_in_memory_is_kept() -> None:
    tensor = torch.arange(24).view(2, 3, 4).transpose(0, 2)
    found = decode(fed(tensor)).tensors["ids"]
    assert torch.equal(found, tensor) and found.stride() == tensor.stride()


def test_values_between_stages_are_not_packed() -> None:
    tensor = torch.zeros(1000, dtype=torch.int64)
    assert packing_of(tensor) is not None
    assert len(encode(Frame(FrameKind.FORWARD, 1, tensors={"ids": tensor}))) >= tensor.nbytes


def packed_header(kind: FrameKind = FrameKind.FEED, **fields: object) -> bytes:
    given = {"dtype": frame_pb2.DTYPE_INT64, "shape": (64,), "packed_bytes": 1} | fields
    spec = frame_pb2.TensorSpec(name="ids", **given)  # type: ignore[arg-type]
    header = frame_pb2.FrameHeader(kind=kind.value, tensors=[spec]).SerializeToString()  # type: ignore[arg-type]
    return (b"RVN\x01" + len(header).to_bytes(4, "little") + header).ljust(64, b"\0") + bytes(64)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (packed_header(packed_bytes=3), "packed into 3 bytes a value"),
        (packed_header(dtype=frame_pb2.DTYPE_INT32), "which only int64"),
        (packed_header(FrameKind.FORWARD), "which only FEED frames may"),
        (packed_header(shape=(1000,)), "cut short inside its tensor"),
    ],
)
def test_a_packing_that_cannot_be_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(PeerError, match=reason):
        decode(data)


def test_a_small_message_cannot_take_much_memory() -> None:
    tensors = {name: torch.zeros(100, dtype=torch.int64) for name in "abc"}
    data = encode(Frame(FrameKind.FEED, 1, tensors=tensors))
    with pytest.raises(PeerError, match="the packed tensors of a frame have 2400 bytes, more than 2000"):
        decode(data, FrameLimits(frame_bytes=2000))

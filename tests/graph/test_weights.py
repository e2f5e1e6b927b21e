"""The streaming writer and reader agree with the safetensors library and refuse everything else."""

import json
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from ravnest.errors import GraphError
from ravnest.graph.weights import (
    DTYPES,
    MAX_HEADER_BYTES,
    WeightsReader,
    content_hash,
    stream_size_bytes,
    stream_tensors,
)

# The library itself does not write complex tensors in every supported version.
LIBRARY_DTYPES = [dtype for name, dtype in DTYPES.items() if name != "C64"]


def a_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


@st.composite
def tensor_maps(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    names = draw(st.lists(st.text(min_size=1, max_size=8).filter(_is_utf8), unique=True, max_size=5))
    shapes = st.lists(st.integers(0, 4), max_size=4)
    return {
        name: a_tensor(draw(st.sampled_from(LIBRARY_DTYPES)), draw(shapes), draw(st.integers(0, 9))) for name in names
    }


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read(data: bytes, chunk_bytes: int = 7) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    reader = WeightsReader(len(data))
    for start in range(0, len(data), chunk_bytes):
        reader.feed(data[start : start + chunk_bytes])
    return reader.finish()


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        other = right[name]
        assert tensor.dtype == other.dtype and tensor.shape == other.shape, name
        assert torch.equal(
            tensor.contiguous().reshape(-1).view(torch.uint8),
            other.contiguous().reshape(-1).view(torch.uint8),
        )


@settings(max_examples=60)
@given(tensors=tensor_maps(), chunk_bytes=st.integers(1, 200))
def test_the_library_reads_what_we_stream(tensors: dict[str, torch.Tensor], chunk_bytes: int) -> None:
    chunks = list(stream_tensors(tensors, {"step": "3"}, chunk_bytes))
    assert all(len(chunk) == chunk_bytes for chunk in chunks[:-1])
    data = b"".join(chunks)
    assert len(data) == stream_size_bytes(tensors, {"step": "3"})
    assert_same(load(data), tensors)


@settings(max_examples=60)
@given(tensors=tensor_maps(), chunk_bytes=st.integers(1, 200))
def test_we_read_what_the_library_writes(tensors: dict[str, torch.Tensor], chunk_bytes: int) -> None:
    loaded, metadata = read(save(tensors, {"step": "3"}), chunk_bytes)
    assert_same(loaded, tensors)
    assert metadata == {"step": "3"}


@settings(max_examples=60)
@given(tensors=tensor_maps(), share=st.floats(0, 1), chunk_bytes=st.integers(1, 200))
def test_the_stream_goes_on_from_any_byte(tensors: dict[str, torch.Tensor], share: float, chunk_bytes: int) -> None:
    whole = b"".join(stream_tensors(tensors, {"step": "3"}))
    offset = round(share * len(whole))
    rest = b"".join(stream_tensors(tensors, {"step": "3"}, chunk_bytes, offset))
    assert rest == whole[offset:]


def test_tensors_before_the_byte_asked_for_are_not_touched() -> None:
    # A tensor on the meta device has no values to read.
    tensors = {"a": torch.empty(1000, device="meta"), "b": torch.arange(5, dtype=torch.int16)}
    size = stream_size_bytes(tensors)
    assert b"".join(stream_tensors(tensors, offset_bytes=size - 6)) == tensors["b"][2:].numpy().tobytes()


def test_the_same_content_has_the_same_hash_whatever_its_order_and_layout() -> None:
    tensors = {"w": torch.arange(12.0).view(3, 4), "b": torch.ones(3), "n": torch.arange(4)}
    again = {"n": torch.arange(8)[:4], "b": torch.ones(6)[::2], "w": torch.arange(12.0).view(3, 4).t().contiguous().t()}
    assert content_hash(stream_tensors(tensors, {"version": "7", "optimizer": "{}"})) == content_hash(
        stream_tensors(again, {"optimizer": "{}", "version": "7"})
    )


def test_strided_tied_and_gradient_tensors_are_written_by_value() -> None:
    base = torch.arange(12.0, requires_grad=True)
    tensors = {"transposed": base.view(3, 4).t(), "slice": base[2::3], "again": base, "twice": base}
    loaded, _ = read(b"".join(stream_tensors(tensors)))
    assert_same(loaded, {name: tensor.detach() for name, tensor in tensors.items()})


def test_complex_and_scalar_tensors_survive() -> None:
    tensors = {
        "c": torch.randn(3, dtype=torch.complex64),
        "step": torch.tensor(7.0),
        "none": torch.empty(0, 3),
    }
    loaded, metadata = read(b"".join(stream_tensors(tensors)))
    assert_same(loaded, tensors)
    assert metadata == {}


def test_the_loaded_tensors_can_be_changed_in_place() -> None:
    loaded, _ = read(b"".join(stream_tensors({"w": torch.zeros(3)})))
    loaded["w"].add_(1.0)
    assert loaded["w"].tolist() == [1.0, 1.0, 1.0]


def test_the_stream_is_produced_lazily() -> None:
    stream = stream_tensors({"w": torch.zeros(1000)}, chunk_bytes=64)
    assert isinstance(stream, Iterator)
    assert len(next(stream)) == 64


def test_the_hash_does_not_depend_on_the_chunks() -> None:
    tensors = {"w": torch.randn(100), "b": torch.ones(3)}
    assert content_hash(stream_tensors(tensors, chunk_bytes=5)) == content_hash(stream_tensors(tensors))
    assert content_hash(stream_tensors(tensors)) != content_hash(stream_tensors({"w": tensors["w"]}))


def a_stream(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def described(shape: object = (2,), offsets: object = (0, 8), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (a_stream(b"{nonsense"), "not valid JSON"),
        (a_stream(b"[" * 100_000), "not valid JSON"),
        (a_stream(b'"\xff\xfe"'), "not valid JSON"),
        (a_stream([1]), "not a JSON object"),
        (a_stream({"__metadata__": {"a": 1}}), "metadata"),
        (a_stream({"w": described(dtype="PICKLE")}, bytes(8)), "dtype"),
        (a_stream({"w": described(dtype=["F32"])}, bytes(8)), "dtype"),
        (a_stream({"w": described(shape=[-2])}, bytes(8)), "shape"),
        (a_stream({"w": described(shape=[2.0])}, bytes(8)), "shape"),
        (a_stream({"w": described(shape=[True] * 2)}, bytes(8)), "shape"),
        (a_stream({"w": described(shape=[1] * 65, offsets=[0, 4])}, bytes(4)), "shape"),
        (a_stream({"w": described(shape=[3])}, bytes(8)), "needs 12 bytes"),
        (a_stream({"w": described(shape=[0, 1 << 62, 1 << 62], offsets=[0, 0])}), "too large to address"),
        (a_stream({"w": described(offsets=[0])}, bytes(8)), "two sizes"),
        (a_stream({"w": described(offsets=[4, 12])}, bytes(12)), "not at 0"),
        (a_stream({"v": described(), "w": described()}, bytes(8)), "not at 8"),
        (a_stream({"w": described()}, bytes(9)), "cover 8 of its 9"),
        (a_stream({"w": described()}, bytes(7)), "cover 8 of its 7"),
        (a_stream({"w": {**described(), "code": "x"}}, bytes(8)), "alone"),
        (a_stream(b'{"w":1,"w":2}'), "twice"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}", "announces a header"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "announces a header"),
        (a_stream({"m": described(shape=[2], offsets=[0, 2], dtype="BOOL")}, b"\x01\x02"), "BOOL"),
    ],
)
def test_a_malformed_stream_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(GraphError, match=words):
        read(data, chunk_bytes=1 << 16)


def test_a_header_that_claims_more_than_was_declared_allocates_nothing() -> None:
    stream = a_stream({"w": described(shape=[1 << 50], offsets=[0, 1 << 52])})
    with pytest.raises(GraphError, match="cover"):
        read(stream)


def test_a_stream_that_ends_early_is_refused() -> None:
    data = b"".join(stream_tensors({"w": torch.randn(9)}))
    for length in (0, 4, 20, len(data) - 1):
        reader = WeightsReader(len(data))
        reader.feed(data[:length])
        with pytest.raises(GraphError, match=f"ended after {length} of"):
            reader.finish()


def test_a_stream_that_goes_on_is_refused() -> None:
    data = b"".join(stream_tensors({"w": torch.randn(9)}))
    reader = WeightsReader(len(data))
    reader.feed(data)
    with pytest.raises(GraphError, match="longer than the announced"):
        reader.feed(b"\x00")


@settings(max_examples=150)
@given(position=st.integers(0, 150), value=st.integers(0, 255))
def test_a_flipped_byte_never_does_worse_than_a_graph_error(position: int, value: int) -> None:
    data = bytearray(b"".join(stream_tensors({"w": torch.randn(2, 3), "m": torch.ones(2, dtype=torch.bool)})))
    data[position % len(data)] = value
    try:
        tensors, _ = read(bytes(data))
    except GraphError:
        return
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())


def test_a_dtype_that_weights_cannot_hold_is_named() -> None:
    with pytest.raises(GraphError, match="complex128"):
        list(stream_tensors({"w": torch.zeros(1, dtype=torch.complex128)}))

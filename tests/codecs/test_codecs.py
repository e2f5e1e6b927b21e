"""Every codec: encoded sizes, error bounds, byte order, and the refusal of damaged bytes."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy
from torch import Tensor

from ravnest.codecs.codec import CODECS, Codec, codec_named
from ravnest.errors import PeerError

LARGEST = torch.finfo(torch.float32).max
DENORMAL = 2.0**-149

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
quantising = pytest.mark.parametrize("codec", [CODECS["int8"], CODECS["int4"]], ids=["int8", "int4"])
lengths = st.integers(0, 700) | st.sampled_from([63, 64, 65, 255, 256, 257, 2048])


@st.composite
def finite_values(draw: st.DrawFn) -> Tensor:
    """Values of one magnitude, with a few from the whole range of float32."""
    count = draw(lengths)
    magnitude = draw(st.sampled_from([0.0, DENORMAL, 1e-40, 1e-37, 1e-20, 1e-6, 1.0, 7e4, 1e30, LARGEST]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = (torch.rand(count, generator=generator, dtype=torch.float64) * 2 - 1).mul(magnitude).float()
    anything = st.floats(width=32, allow_nan=False, allow_infinity=False)
    chosen = draw(of_numpy.arrays("float32", st.integers(0, min(count, 8)), elements=anything))
    values[: len(chosen)] = torch.from_numpy(chosen)
    return values[torch.randperm(count, generator=generator)]


@every_codec
@given(values=finite_values())
@example(values=torch.tensor([LARGEST, -LARGEST, 0.0, DENORMAL, -DENORMAL]))
@example(values=torch.full((300,), -LARGEST))
def test_finite_values_come_back_finite_and_within_the_error(codec: Codec, values: Tensor) -> None:
    data = codec.encode(values.clone())
    size = codec.size_bytes(len(values))
    assert data.dtype == torch.uint8 and data.dim() == 1
    assert data.numel() <= size if codec.varies else data.numel() == size
    decoded = codec.decode(data, len(values))
    assert decoded.dtype == torch.float32 and decoded.shape == values.shape
    assert decoded.isfinite().all()
    if len(values):
        distance = (decoded.double() - values.double()).abs().max().item()
        assert distance <= codec.error(values.abs().max().item())
    assert codec.lossy or torch.equal(decoded.view(torch.int32), values.view(torch.int32)), "zeros keep their sign"


@pytest.mark.parametrize(("codec", "block"), [(CODECS["int8"], 256), (CODECS["int4"], 64)], ids=["int8", "int4"])
@given(values=finite_values())
def test_the_error_of_a_block_follows_its_own_largest_value(codec: Codec, block: int, values: Tensor) -> None:
    decoded = codec.decode(codec.encode(values), len(values)).double()
    for part, back in zip(values.split(block), decoded.split(block), strict=True):
        if len(part):
            assert (back - part.double()).abs().max().item() <= codec.error(part.abs().max().item())


@every_codec
def test_the_error_bound_is_at_most_twice_the_actual_error(codec: Codec) -> None:
    values = torch.rand(1 << 16, generator=torch.Generator().manual_seed(1)) * 3 - 1.5
    lost = (codec.decode(codec.encode(values), len(values)) - values).abs().max().item()
    assert lost >= codec.error(values.abs().max().item()) / 2


@every_codec
def test_decoded_values_are_encoded_to_the_same_values_again(codec: Codec) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(2)) * 1e-5
    once = codec.decode(codec.encode(values), 1000).clone()
    twice = codec.decode(codec.encode(once), 1000)
    # Not bit for bit: int4 rounds the scale, which changes the largest value of a block slightly.
    torch.testing.assert_close(twice, once, rtol=2**-7, atol=0.0)


@every_codec
def test_a_tensor_longer_than_the_scratch_memory_decodes_as_its_parts_do(codec: Codec) -> None:
    count = (1 << 18) + (1 << 17) + 77
    values = torch.randn(count, generator=torch.Generator().manual_seed(3))
    whole = codec.decode(codec.encode(values), count)
    parts = [codec.decode(codec.encode(part.clone()), len(part)) for part in values.split(1 << 16)]
    assert torch.equal(whole, torch.cat(parts))


@every_codec
def test_unaligned_bytes_are_decoded_to_the_same_values(codec: Codec) -> None:
    values = torch.randn(300, generator=torch.Generator().manual_seed(4))
    data = codec.encode(values)
    for offset in (1, 2, 3):
        shifted = torch.cat([torch.zeros(offset, dtype=torch.uint8), data])[offset:]
        assert torch.equal(codec.decode(shifted, 300), codec.decode(data, 300))


@every_codec
def test_encoding_and_decoding_do_not_change_their_arguments(codec: Codec) -> None:
    values = torch.randn(777, generator=torch.Generator().manual_seed(5))
    before = values.clone()
    data = codec.encode(values)
    kept = data.clone()
    codec.decode(data, 777)
    assert torch.equal(values, before) and torch.equal(data, kept)


@quantising
def test_a_machine_that_computes_denormal_numbers_as_zero_decodes_the_same_bits(codec: Codec) -> None:
    values = torch.tensor([DENORMAL, 1e-40, 2e-38, -3e-37, 0.0] * 60)
    data = codec.encode(values)
    usual = codec.decode(data, len(values)).view(torch.int32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush denormal numbers")
    try:
        other = codec.decode(data, len(values)).view(torch.int32)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(usual, other)


@every_codec
def test_several_threads_may_use_one_codec(codec: Codec) -> None:
    tensors = [torch.full((5000,), float(number)) for number in range(1, 9)]
    with ThreadPoolExecutor(4) as pool:
        decoded = list(pool.map(lambda t: codec.decode(codec.encode(t), len(t)), tensors * 20))
    for values, back in zip(tensors * 20, decoded, strict=True):
        torch.testing.assert_close(back, values, rtol=2**-7, atol=0.0)


@every_codec
def test_a_thread_may_encode_in_inference_mode_and_then_outside_of_it(codec: Codec) -> None:
    def both() -> None:
        values = torch.ones(300)
        with torch.inference_mode():
            codec.encode(values)
        codec.encode(values)

    with ThreadPoolExecutor(1) as fresh:
        fresh.submit(both).result()


def test_the_bytes_of_int8_are_scales_and_then_values() -> None:
    values = torch.zeros(258)
    values[0], values[1], values[2], values[257] = 127.0, -63.6, -127.0, 0.5
    data = CODECS["int8"].encode(values).numpy().tobytes()
    assert data[:4] == b"\x00\x00\x80\x3f", "1.0 as little-endian float32"
    assert len(data) == 2 * 4 + 258
    steps = torch.frombuffer(bytearray(data[8:]), dtype=torch.int8).tolist()
    assert steps == [127, -64, -127] + [0] * 254 + [127]


def test_the_bytes_of_int4_are_scales_and_then_two_values_each() -> None:
    values = torch.tensor([7.0, -7.0, 1.2, 0.0, 3.0])
    data = CODECS["int4"].encode(values).numpy().tobytes()
    # bfloat16 1.0; then 7 and 0, -7 and 3, 1 and padding, each plus 8, the second one in the high bits.
    assert data == b"\x80\x3f" + bytes([15 | 8 << 4, 1 | 11 << 4, 9 | 8 << 4])


def test_values_beyond_the_range_of_float16_are_clamped() -> None:
    codec = CODECS["float16"]
    assert codec.decode(codec.encode(torch.tensor([1e6, -1e30])), 2).tolist() == [65504.0, -65504.0]


MIN_RATIOS = [("float32", 1.0), ("lossless", 1.19), ("float16", 2.0), ("int8", 3.9), ("int4", 7.5)]


@pytest.mark.parametrize(("name", "min_ratio"), MIN_RATIOS)
def test_a_codec_compresses_at_least_this_much(name: str, min_ratio: float) -> None:
    values = torch.randn(10**6, generator=torch.Generator().manual_seed(6))
    assert values.nbytes / CODECS[name].encode(values).numel() >= min_ratio


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 1e20])
def test_lossless_compresses_values_like_those_of_a_model(scale: float) -> None:
    """Results of ReLUs are half zeros, and gradients have a wider distribution than activations."""
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(1 << 16, generator=generator) * scale
    for values in (normal.relu(), normal * torch.rand(1 << 16, generator=generator), normal + 3 * scale):
        assert CODECS["lossless"].encode(values).numel() < 0.86 * values.nbytes


@given(data=st.binary(max_size=4000))
def test_lossless_keeps_every_bit_of_any_values(data: bytes) -> None:
    bits = torch.frombuffer(bytearray(data[: len(data) // 4 * 4] or b"\0\0\xc0\x7f"), dtype=torch.int32)
    codec = CODECS["lossless"]
    encoded = codec.encode(bits.view(torch.float32))
    assert encoded.numel() <= codec.size_bytes(len(bits))
    assert torch.equal(codec.decode(encoded, len(bits)).view(torch.int32), bits)


@pytest.mark.parametrize("count", [1, 16383, 16384, 40000, 300001])
def test_lossless_never_exceeds_its_maximum_size(count: int) -> None:
    noise = torch.randint(-(2**31), 2**31 - 1, (count,), generator=torch.Generator().manual_seed(8), dtype=torch.int32)
    codec = CODECS["lossless"]
    encoded = codec.encode(noise.view(torch.float32))
    assert encoded.numel() <= codec.size_bytes(count) <= 4.002 * count + 13
    assert torch.equal(codec.decode(encoded, count).view(torch.int32), noise)


def test_a_stream_that_lossless_does_not_write_is_refused() -> None:
    codec = CODECS["lossless"]
    data, bomb = codec.encode(torch.ones(600)), codec.encode(torch.ones(1 << 20))[3 << 20 :]
    plain = data[:1800]
    for stream in (
        data[1800:-1],
        torch.cat([data[1800:], torch.zeros(1, dtype=torch.uint8)]),
        codec.encode(torch.ones(599))[1797:],
        codec.encode(torch.ones(601))[1803:],
        torch.full((50,), 255, dtype=torch.uint8),
        bomb[:600],
    ):
        with pytest.raises(PeerError, match=r"unpack"):
            codec.decode(torch.cat([plain, stream]), 600)


@every_codec
@given(count=lengths, change=st.integers(-5, 5).filter(bool))
def test_bytes_of_another_length_are_refused(codec: Codec, count: int, change: int) -> None:
    length = max(0, codec.size_bytes(count) + change)
    if codec.varies:
        length = codec.size_bytes(count) + change if change > 0 else 3 * count
    if length != codec.size_bytes(count):
        with pytest.raises(PeerError, match="bytes"):
            codec.decode(torch.ones(length, dtype=torch.uint8), count)


def forged_scales(codec: Codec) -> Iterator[Tensor]:
    dtype = torch.float32 if codec.name == "int8" else torch.bfloat16
    for scale in (float("nan"), float("inf"), -float("inf"), -1.0, -0.0, 0.0, 1e-40, LARGEST):
        yield torch.tensor([scale], dtype=torch.float64).to(dtype).view(torch.uint8)


@quantising
def test_scales_that_no_encoder_writes_are_refused(codec: Codec) -> None:
    data = codec.encode(torch.ones(600))
    for scale in forged_scales(codec):
        for place in (0, len(scale), 2 * len(scale)):
            damaged = data.clone()
            damaged[place : place + len(scale)] = scale
            with pytest.raises(PeerError, match="scale"):
                codec.decode(damaged, 600)


@quantising
@pytest.mark.parametrize("place", [0, 100, -1])
def test_a_step_that_no_encoder_writes_is_refused(codec: Codec, place: int) -> None:
    data = codec.encode(torch.ones(600))
    steps = data[12:] if codec.name == "int8" else data[20:]
    for forged in (0x80,) if codec.name == "int8" else (0x0F, 0xF0, 0x00):
        steps[place] = forged
        with pytest.raises(PeerError, match="no encoder writes"):
            codec.decode(data, 600)


@quantising
@given(data=st.data(), count=st.integers(1, 400))
def test_any_bytes_decode_to_finite_values_or_are_refused(codec: Codec, data: st.DataObject, count: int) -> None:
    size = codec.size_bytes(count)
    drawn = torch.frombuffer(bytearray(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    try:
        decoded = codec.decode(drawn, count)
    except PeerError:
        return
    assert decoded.isfinite().all()


@quantising
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused_or_decoded_to_finite_ones(codec: Codec, value: float) -> None:
    values = torch.ones(100)
    values[70] = value
    try:
        decoded = codec.decode(codec.encode(values), 100)
    except PeerError:
        return
    assert decoded.isfinite().all()


def test_the_error_for_an_unknown_codec_lists_the_known_ones() -> None:
    with pytest.raises(PeerError, match=r"no codec 'zip'.*float32, lossless, float16, bfloat16, int8, int4"):
        codec_named("zip")
    assert codec_named("int8") is CODECS["int8"]

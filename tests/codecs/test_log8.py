"""log8: the relative error of moments in 8 bits, zeros, and the refusal of damaged bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ravnest.codecs.log8 import SIGNED, UNSIGNED, Log8Codec
from ravnest.errors import PeerError

both = pytest.mark.parametrize("codec", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])


def moments(seed: int, count: int, octaves: float) -> Tensor:
    """Positive values of this range, spread evenly over their logarithms."""
    generator = torch.Generator().manual_seed(seed)
    return torch.exp2(-octaves * torch.rand(count, generator=generator)) * 1e-7


@both
@given(seed=st.integers(0, 2**31), count=st.integers(0, 700), octaves=st.floats(0, 15.5))
def test_every_value_in_the_range_of_a_block_has_the_same_relative_error(
    codec: Log8Codec, seed: int, count: int, octaves: float
) -> None:
    values = moments(seed, count, octaves)
    if codec.signed:
        values = torch.where(torch.arange(count) % 3 == 0, -values, values)
    found = codec.decode(codec.encode(values), count)
    assert bool(((found - values).abs() <= codec.error * values.abs()).all())


def test_a_narrow_range_has_fine_levels() -> None:
    values = moments(1, 256, 2.0)
    found = UNSIGNED.decode(UNSIGNED.encode(values), 256)
    assert float(((found - values) / values).abs().max()) < 0.006


def test_no_mean_of_squares_becomes_zero_and_no_zero_becomes_a_value() -> None:
    values = torch.tensor([0.0, 1e-45, 1e-38, 1e-20, 1.0, 3e38])
    found = UNSIGNED.decode(UNSIGNED.encode(values), 6)
    assert float(found[0]) == 0 and bool((found[1:] >= values[1:] * (1 - UNSIGNED.error)).all())


def test_a_signed_value_far_below_the_largest_stays_small() -> None:
    values = torch.tensor([1.0, -1e-30, 1e-6, -0.5])
    found = SIGNED.decode(SIGNED.encode(values), 4)
    assert float((found - values).abs().max()) < 2e-5 and float(found[3]) == pytest.approx(-0.5, rel=0.05)


@both
def test_zeros_and_the_largest_values_are_exact(codec: Log8Codec) -> None:
    largest = torch.finfo(torch.float32).max
    for values in (torch.zeros(300), torch.full((3,), largest)):
        assert torch.equal(codec.decode(codec.encode(values), len(values)), values)


@both
@given(data=st.data(), count=st.integers(1, 600))
def test_any_bytes_decode_to_finite_values_or_are_refused(codec: Log8Codec, data: st.DataObject, count: int) -> None:
    blob = data.draw(st.binary(min_size=codec.size_bytes(count), max_size=codec.size_bytes(count)))
    try:
        found = codec.decode(torch.frombuffer(bytearray(blob), dtype=torch.uint8), count)
    except PeerError:
        return
    assert found.shape == (count,) and bool(torch.isfinite(found).all()) and (codec.signed or bool((found >= 0).all()))


@both
def test_another_size_scale_or_step_is_refused(codec: Log8Codec) -> None:
    good = codec.encode(torch.ones(300))
    nan = good.clone()
    nan[:4] = torch.tensor([float("nan")]).view(torch.uint8)
    step = good.clone()
    step[8] = 0
    for bad in (good[:-1], torch.cat((good, good[:1])), nan, step):
        with pytest.raises(PeerError):
            codec.decode(bad, 300)

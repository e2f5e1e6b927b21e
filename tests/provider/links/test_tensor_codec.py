"""Coding of tensors between stages: which tensors travel in a codec, and which unchanged."""

import math

import pytest
import torch

from ravnest.codecs.codec import CODECS, Codec
from ravnest.errors import PeerError
from ravnest.microbatch import Marks
from ravnest.net.frames.decoding import decode
from ravnest.net.frames.encoding import encode
from ravnest.net.frames.frames import Coded, Frame, FrameKind
from ravnest.provider.links.tensor_codec import coded, decoded, raw_bytes, saved_bytes

LOSSY = [CODECS[name] for name in ("float16", "bfloat16", "int8")]
INT8, FLOAT32, LOSSLESS = CODECS["int8"], CODECS["float32"], CODECS["lossless"]


def activations(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def frame(train: bool = True, **tensors: torch.Tensor) -> Frame:
    return Frame(FrameKind.FORWARD, 3, marks=Marks(train=train), generation=1, tensors=tensors)


def over_the_wire(given: Frame, codec: Codec) -> Frame:
    return decoded(decode(encode(coded(given, codec))), codec)


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
@pytest.mark.parametrize("shape", [(256,), (7, 331), (2, 3, 5, 64)])
def test_a_tensor_comes_back_within_what_its_codec_loses(codec: Codec, shape: tuple[int, ...]) -> None:
    given = activations(*shape)
    found = over_the_wire(frame(x=given), codec).tensors["x"]
    assert found.shape == given.shape and found.dtype == torch.float32
    assert 0 < float((found - given).abs().max()) <= codec.error(float(given.abs().max()))


def test_int8_takes_about_a_quarter_of_the_bytes() -> None:
    given = frame(x=activations(64, 1024))
    packed = coded(given, INT8)
    assert len(encode(packed)) < 0.26 * len(encode(given))
    assert raw_bytes(packed) == raw_bytes(given) == 64 * 1024 * 4
    assert len(encode(given)) - len(encode(packed)) == pytest.approx(saved_bytes(packed), abs=64)


def test_lossless_keeps_every_bit_of_whatever_is_computed_in_training_and_evaluation() -> None:
    given = activations(4, 8, 16, 16).to(memory_format=torch.channels_last)
    given[1, 2, 3, :3] = torch.tensor([math.nan, -math.inf, -0.0])
    for train in (True, False):
        packed = coded(frame(train, x=given), LOSSLESS)
        assert len(encode(packed)) < 0.86 * given.nbytes and set(packed.coded) == {"x"}
        found = over_the_wire(frame(train, x=given), LOSSLESS).tensors["x"]
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(found.view(torch.int32), given.view(torch.int32))


def test_float32_changes_nothing() -> None:
    given = frame(x=activations(64, 64))
    assert coded(given, FLOAT32) is given
    assert decoded(given, FLOAT32) is given


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_arrives_as_it_is(codec: Codec, odd: float) -> None:
    given = activations(50, 50)
    given[17, 3] = odd
    packed = coded(frame(x=given, y=activations(50, 50)), codec)
    assert set(packed.tensors) == {"x"} and set(packed.coded) == {"y"}
    found = over_the_wire(frame(x=given), codec).tensors["x"]
    assert torch.equal(found, given) or (math.isnan(odd) and torch.equal(found.isnan(), given.isnan()))


def test_what_float16_would_cut_off_arrives_as_it_is() -> None:
    given = activations(50, 50) * 1e5
    assert torch.equal(over_the_wire(frame(x=given), CODECS["float16"]).tensors["x"], given)


def test_evaluation_is_not_coded() -> None:
    given = frame(train=False, x=activations(64, 64))
    assert not coded(given, INT8).coded


def test_small_tensors_and_whole_numbers_are_not_coded() -> None:
    given = frame(
        small=activations(255), whole=torch.arange(1000), truth=torch.ones(4000, dtype=torch.bool), none=torch.empty(0)
    )
    assert not coded(given, INT8).coded


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
def test_a_tensor_that_lies_otherwise_in_memory_still_does(codec: Codec) -> None:
    given = activations(4, 8, 6, 6).to(memory_format=torch.channels_last)
    found = over_the_wire(frame(x=given), codec).tensors["x"]
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert float((found - given).abs().max()) <= codec.error(float(given.abs().max()))


def test_another_codec_than_the_link_s_is_refused() -> None:
    packed = coded(frame(x=activations(64, 64)), INT8)
    for other in ("float32", "bfloat16"):
        with pytest.raises(PeerError, match="came in int8"):
            decoded(packed, CODECS[other])


def test_a_scale_that_is_not_finite_is_refused() -> None:
    packed = coded(frame(x=activations(64, 64)), INT8).coded["x"]
    data = packed.data.clone()
    data[:4] = torch.tensor([math.nan]).view(torch.uint8)
    forged = Frame(FrameKind.FORWARD, 3, coded={"x": Coded("int8", packed.shape, packed.order, data)})
    with pytest.raises(PeerError, match="scale"):
        decoded(decode(encode(forged)), INT8)

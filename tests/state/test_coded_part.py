"""Coded parts: what the receiver makes of them, and the refusal of what no sender writes."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ravnest.errors import PeerError
from ravnest.graph.weights import WeightsReader, stream_tensors
from ravnest.state.coded_part import MAGIC, DecodeTarget, PartDecoder, Preamble, encode_part
from ravnest.state.codings import INT8, LOSSLESS, STATE_CODINGS, check_coding
from ravnest.state.reader import PartReader

Tensors = Mapping[str, Tensor]
METADATA = {"version": "7", "applied": "[3, 4]"}


def state(seed: int = 0, values: int = 5000, distance: float = 0.0) -> dict[str, Tensor]:
    """What `Stage.state` names, with every kind of tensor; `distance` moves the parameters."""
    generator = torch.Generator().manual_seed(seed)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    moved = torch.Generator().manual_seed(99)
    return {
        "param:w": normal(values) + distance * torch.randn(values, generator=moved),
        "param:bias": normal(10),
        "buffer:count": torch.tensor(3 + seed),
        "buffer:mask": torch.tensor([True, False]),
        "optim:w:exp_avg": normal(values) * 1e-4,
        "optim:w:exp_avg_sq": normal(values).square() * 1e-7,
        "optim:w:step": torch.tensor(12.0),
        "outer:w": normal(values),
        "anchor:w": normal(values),
    }


def part_of(tensors: Tensors) -> bytes:
    return b"".join(stream_tensors(tensors, METADATA))


def reader(part: bytes) -> PartReader:
    return PartReader(lambda offset, size: part[offset : offset + size], len(part))


def tensors_of(part: bytes) -> dict[str, Tensor]:
    found = WeightsReader(len(part))
    found.feed(part)
    tensors, metadata = found.finish()
    assert metadata == METADATA
    return tensors


@dataclass(frozen=True)
class Sent:
    coded: bytes
    decoded: bytes


def sent(part: bytes, coding: str, reference: bytes | None = None) -> Sent:
    coded, decoded = bytearray(), bytearray()
    preamble = Preamble(coding, len(part), 0 if reference is None else 4, "" if reference is None else "a hash")
    known = None if reference is None else reader(reference)

    def write(data: bytes) -> None:
        coded.extend(data)

    def write_decoded(data: bytes) -> None:
        decoded.extend(data)

    assert encode_part(reader(part), preamble, known, write, write_decoded) == hashlib.sha256(part).hexdigest()
    return Sent(bytes(coded), bytes(decoded))


def received(coded: bytes, reference: bytes | None = None, chunk_bytes: int = 1 << 20) -> bytes:
    found = bytearray()

    def begin(preamble: Preamble) -> DecodeTarget:
        return DecodeTarget(found.extend, None if reference is None else reader(reference))

    decoder = PartDecoder(begin)
    for offset in range(0, len(coded), chunk_bytes):
        decoder.feed(coded[offset : offset + chunk_bytes])
    assert decoder.finish() == hashlib.sha256(found).hexdigest()
    return bytes(found)


@pytest.mark.parametrize("coding", [LOSSLESS, INT8])
@pytest.mark.parametrize("with_reference", [False, True])
@pytest.mark.parametrize("chunk_bytes", [7, 4096, 1 << 20])
def test_the_receiver_has_what_the_sender_believes_it_has(coding: str, with_reference: bool, chunk_bytes: int) -> None:
    part = part_of(state(1))
    reference = part_of(state(1, distance=0.01)) if with_reference else None
    found = sent(part, coding, reference)
    assert received(found.coded, reference, chunk_bytes) == found.decoded
    assert tensors_of(found.decoded).keys() == tensors_of(part).keys()


def test_lossless_is_bit_for_bit_and_shorter_with_a_reference() -> None:
    part, reference = part_of(state(1)), part_of(state(1, distance=0.001))
    alone, difference = sent(part, LOSSLESS), sent(part, LOSSLESS, reference)
    assert alone.decoded == part and difference.decoded == part
    assert len(difference.coded) < len(alone.coded) < len(part)


def test_int8_rounds_parameters_and_moments_alone() -> None:
    tensors = state(1)
    reference = part_of({**state(2), "param:w": state(1, distance=0.01)["param:w"]})
    found = tensors_of(sent(part_of(tensors), INT8, reference).decoded)
    rounded = {name for name in tensors if not torch.equal(tensors[name], found[name])}
    assert rounded == {"param:w", "optim:w:exp_avg", "optim:w:exp_avg_sq"}
    assert float((found["param:w"] - tensors["param:w"]).abs().max()) < 0.06 / 254
    assert bool((found["optim:w:exp_avg_sq"] > 0).all())
    exp_avg = tensors["optim:w:exp_avg"]
    assert float((found["optim:w:exp_avg"] - exp_avg).abs().max()) < 0.05 * float(exp_avg.abs().max())


def test_int8_takes_a_quarter_of_the_bytes() -> None:
    tensors = {
        name: tensor for name, tensor in state(1, 1 << 20).items() if "anchor" not in name and "outer" not in name
    }
    moved = {**tensors, "param:w": tensors["param:w"] + 0.01 * torch.randn(1 << 20)}
    found = sent(part_of(moved), INT8, part_of(tensors))
    assert len(found.coded) < 3.1 * (1 << 20)


def test_a_parameter_without_a_reference_is_not_rounded() -> None:
    tensors = state(1)
    other = {**state(2), "param:w": torch.randn(60, 100)}
    for reference in (None, part_of(other)):
        assert torch.equal(tensors_of(sent(part_of(tensors), INT8, reference).decoded)["param:w"], tensors["param:w"])


def test_errors_do_not_add_up_over_differences() -> None:
    tensors = state(1)
    held = sent(part_of(tensors), INT8).decoded
    for _ in range(20):
        tensors["param:w"] += 0.01 * torch.randn(5000)
        held = sent(part_of(tensors), INT8, held).decoded
    error = float((tensors_of(held)["param:w"] - tensors["param:w"]).abs().max())
    assert error < 0.06 / 254


def test_an_unchanged_part_takes_next_to_no_bytes() -> None:
    part = part_of(state(1, 1 << 18))
    assert len(sent(part, LOSSLESS, part).coded) < 4096


def test_values_that_are_not_finite_arrive_as_they_are() -> None:
    tensors = state(1)
    for name in ("param:w", "optim:w:exp_avg", "optim:w:exp_avg_sq"):
        tensors[name][7] = float("nan")
        tensors[name][8] = float("inf")
    tensors["optim:w:exp_avg_sq"][9] = -1.0
    part = part_of(tensors)
    assert sent(part, INT8, part_of(state(1, distance=0.1))).decoded == part


def test_another_reference_at_the_receiver_is_noticed() -> None:
    part, reference = part_of(state(1)), part_of(state(1, distance=0.01))
    coded = sent(part, INT8, reference).coded
    with pytest.raises(PeerError, match="other bytes here"):
        received(coded, part_of(state(1, distance=0.02)))
    with pytest.raises(PeerError, match="not here"):
        received(coded, None)


def test_an_unknown_coding_is_refused() -> None:
    assert [check_coding(name) for name in ("", *STATE_CODINGS)] == ["float32", *STATE_CODINGS]
    with pytest.raises(PeerError, match="there is no coding"):
        check_coding("int3")


def with_preamble(change: Callable[[dict[str, object]], None]) -> bytes:
    coded = sent(part_of(state(1)), INT8).coded
    length = int.from_bytes(coded[8:12], "little")
    fields = json.loads(coded[12 : 12 + length])
    change(fields)
    text = json.dumps(fields).encode()
    return MAGIC + len(text).to_bytes(4, "little") + text + coded[12 + length :]


@pytest.mark.parametrize(
    "fields",
    [
        {"coding": "int3"},
        {"coding": 4},
        {"size_bytes": -1},
        {"size_bytes": 3},
        {"size_bytes": 1 << 40},
        {"size_bytes": True},
        {"replica": "1"},
        {"sha256": 1},
        {"more": 1},
    ],
)
def test_a_forged_preamble_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(PeerError):
        received(with_preamble(lambda known: known.update(fields)))


def test_a_part_that_ends_too_early_or_goes_on_is_refused() -> None:
    coded = sent(part_of(state(1)), INT8).coded
    for bad in (coded[:-1], coded + b"x", coded[:5], b"x" + coded[1:]):
        with pytest.raises(PeerError):
            received(bad)


@given(place=st.integers(0, 10**6), value=st.integers(0, 255), cut=st.booleans())
def test_no_damage_gives_another_part(place: int, value: int, cut: bool) -> None:
    part, reference = part_of(state(1, 4100)), part_of(state(1, 4100, distance=0.01))
    coded = bytearray(sent(part, INT8, reference).coded)
    place %= len(coded)
    expected = sent(part, INT8, reference).decoded
    if cut:
        del coded[place]
    else:
        coded[place] = value
    with contextlib.suppress(PeerError):
        assert received(bytes(coded), reference) == expected

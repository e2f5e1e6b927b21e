"""The speed of a device is measured in a few seconds, with a block that suits it."""

import time

import pytest
import torch

from ravnest.engine.speed import device_speed as speed
from ravnest.engine.speed.device_speed import SIZES, SMALL, BlockSize, measure_speed

CPU = torch.device("cpu")


def test_a_machine_is_measured_in_a_few_seconds() -> None:
    began = time.perf_counter()
    measure_speed(CPU, 4 << 30, halves=())
    assert time.perf_counter() - began < 5
    found = measure_speed(CPU, 4 << 30)
    assert time.perf_counter() - began < 15
    # From a weak core to a large server: anything else is a mistake in the counting.
    assert 1e8 < found.flops_per_second < 1e14
    assert 1e8 < found.memory_bytes_per_second < 1e13


def test_a_slow_machine_does_two_steps_of_the_smallest_block_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[BlockSize] = []
    now = 0.0

    def steps_of(size: BlockSize, device: torch.device, precision: str) -> object:
        nonlocal now
        while True:
            steps.append(size)
            now += 5.0
            yield

    monkeypatch.setattr(speed, "training_steps", steps_of)
    found = measure_speed(CPU, 1 << 20, clock=lambda: now)
    assert steps == [SIZES[0], SIZES[0], SMALL, SMALL, SMALL, SMALL]
    assert found.flops_per_second == pytest.approx(SIZES[0].flops / 5)


def test_a_fast_device_gets_a_large_block_unless_its_memory_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    largest: list[BlockSize] = []
    now = 0.0

    def steps_of(size: BlockSize, device: torch.device, precision: str) -> object:
        nonlocal now
        if precision == "float32":
            largest.append(size)
        while True:
            now += 100e-6 + size.flops / 30e12
            yield

    monkeypatch.setattr(speed, "training_steps", steps_of)
    fast = measure_speed(CPU, 80 << 30, clock=lambda: now)
    assert largest[-1] == SIZES[-1] and fast.flops_per_second == pytest.approx(30e12, rel=0.05)
    measure_speed(CPU, 1 << 30, clock=lambda: now)
    assert 2 * largest[-1].memory_bytes <= 1 << 30


def test_mixed_precision_is_measured_with_the_same_block_unless_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: dict[str, list[BlockSize]] = {"float32": [], "bfloat16": [], "float16": []}
    rates = {"float32": 30e12, "bfloat16": 120e12, "float16": 5e9}
    now = 0.0

    def steps_of(size: BlockSize, device: torch.device, precision: str) -> object:
        nonlocal now
        blocks[precision].append(size)
        while True:
            now += size.flops / rates[precision]
            yield

    monkeypatch.setattr(speed, "training_steps", steps_of)
    found = measure_speed(CPU, 80 << 30, clock=lambda: now)
    assert blocks["bfloat16"] == [SMALL, blocks["float32"][-1]] and blocks["float16"] == [SMALL]
    assert {name: found.flops_in(name) for name in rates} == pytest.approx(rates)
    assert found.divided(4).flops_in("bfloat16") == pytest.approx(30e12)


def test_where_there_is_no_mixed_precision_it_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda device_type: False)
    found = measure_speed(CPU, 1 << 20, 0.01)
    assert found.bfloat16_flops_per_second == found.float16_flops_per_second == found.flops_per_second


def test_precisions_that_are_not_requested_are_not_measured() -> None:
    found = measure_speed(CPU, 1 << 20, 0.01, halves=())
    assert found.bfloat16_flops_per_second == 0 and found.flops_in("bfloat16") == found.flops_per_second

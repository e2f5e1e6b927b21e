"""For any bytes, a decoder returns a value or one sentence: no other exception, no hang, no excessive memory."""

import gc
import time
from random import Random

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.mutations import mutate
from tests.fuzz.targets import TARGETS, Target, bombs, judge

EXAMPLES = 80
BOMB_SECONDS = 5.0
BOMB_BYTES = 300 << 20

every_target = pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
# The cases are the same in every run, so that failures are reproducible; `make fuzz` tries others.
fixed = settings(max_examples=EXAMPLES, derandomize=True, database=None)


@every_target
def test_a_valid_input_is_read(target: Target) -> None:
    assert any(judge(target, seed) is None for seed in target.seeds())


@every_target
@fixed
@given(data=st.binary(max_size=300))
def test_any_bytes_are_read_or_refused_with_one_sentence(target: Target, data: bytes) -> None:
    judge(target, data)


@every_target
@fixed
@given(number=st.integers(0, 2**64 - 1))
def test_a_valid_input_that_was_changed_is_read_or_refused_with_one_sentence(target: Target, number: int) -> None:
    random = Random(number)
    judge(target, mutate(random.choice(target.seeds()), random, target.is_json))


@every_target
def test_a_small_input_that_asks_for_much_gets_little(target: Target) -> None:
    process = psutil.Process()
    gc.collect()
    before, started = process.memory_info().rss, time.monotonic()
    for name, data in bombs():
        for bomb in (data, data + b"\n", b'{"format":' + data + b"}"):
            judge(target, bomb)
        assert time.monotonic() - started < BOMB_SECONDS, name
        assert process.memory_info().rss - before < BOMB_BYTES, name


def test_a_decoder_that_lets_another_exception_through_is_noticed() -> None:
    def careless(data: bytes) -> None:
        raise ValueError(data)

    with pytest.raises(ValueError):
        judge(Target("careless", careless, list), b"x")

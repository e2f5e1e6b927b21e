"""A provider that has less memory than it says gets no stage again that it could not hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.coordinator.plan.observed_limits import SLOW_HALF_SECONDS, ObservedLimits, evident_memory
from ravnest.coordinator.plan.provider_profiles import Machine, provider_of
from ravnest.coordinator.swarm.members import LentMachine, Member
from ravnest.coordinator.swarm.reachability import Reach
from ravnest.graph.profile import CostProfile

COSTS = CostProfile({}, samples=8, threads=1, flops_per_second=100e9, memory_bytes_per_second=10e9)
GIB = 1 << 30


def member(name: str = "anna", memory: int = 16 * GIB) -> Member:
    return Member(name, "10.0.0.1:7000", LentMachine("cpu", memory))


def test_what_a_provider_says_is_believed_until_it_fails() -> None:
    assert ObservedLimits().memory_bytes(member()) == 16 * GIB


def test_after_a_failure_the_planner_takes_it_for_less_than_the_stage_needed() -> None:
    believed = ObservedLimits()
    found = believed.note_failure(member(), 5 * GIB, "another 1.2 GiB were needed")
    assert found.memory_bytes == 4 * GIB
    assert "anna reported 16 GiB" in found.reason and "another 1.2 GiB" in found.reason
    planned = provider_of(member(), COSTS, Reach("", ""), Machine(1, 1), believed)
    assert planned.memory_bytes == 4 * GIB
    assert provider_of(member("ben"), COSTS, Reach("", ""), Machine(1, 1), believed).memory_bytes == 16 * GIB


def test_one_that_joins_again_and_says_the_same_again_is_not_believed() -> None:
    believed = ObservedLimits()
    believed.note_failure(member(), 5 * GIB)
    assert believed.memory_bytes(member(memory=32 * GIB)) == 4 * GIB
    assert believed.memory_bytes(member(memory=1 * GIB)) == 1 * GIB


@given(st.integers(0, 1 << 50), st.lists(st.integers(0, 1 << 50), max_size=5))
def test_every_failure_makes_it_less_and_never_enough_for_a_stage_that_failed(said: int, failed: list[int]) -> None:
    believed, before = said, said
    for stage in failed:
        believed = evident_memory(believed, stage)
        assert 0 <= believed <= before and (believed < stage or stage == 0)
        before = believed


def test_how_slow_one_was_counts_for_less_as_time_goes_by() -> None:
    now = 0.0
    believed = ObservedLimits(lambda: now)
    assert believed.slowness("p") == 1
    believed.note_slow("p", 8.0)
    assert believed.slowness("p") == 8 and believed.slowness("q") == 1
    now = SLOW_HALF_SECONDS
    assert believed.slowness("p") == pytest.approx(4)
    now = 100 * SLOW_HALF_SECONDS
    assert believed.slowness("p") == 1

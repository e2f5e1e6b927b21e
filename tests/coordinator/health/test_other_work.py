"""A stage whose machine swaps is at work, for as long as can be believed."""

from ravnest.coordinator.health.other_work import MAX_SECONDS, is_other_work
from ravnest.provider.machine.memory import page_faults


def test_a_stage_whose_machine_swaps_is_at_work_for_a_while() -> None:
    is_work, why = is_other_work(100, 5000, 30.0)
    assert is_work and "4900 page faults" in why
    assert not is_other_work(100, 5000, MAX_SECONDS + 1.0)[0], "a claim does not last"


def test_a_stray_fault_and_a_counter_that_falls_are_no_work() -> None:
    assert not is_other_work(100, 103, 1.0)[0]
    assert not is_other_work(100, 0, 1.0)[0]


def test_a_process_counts_its_faults() -> None:
    assert page_faults() >= 0

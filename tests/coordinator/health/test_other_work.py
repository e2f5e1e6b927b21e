"""A stage whose machine swaps is at work, for as long as can be believed."""

from ravnest.coordinator.health.other_work import MAX_SECONDS, WINDOW_SECONDS, OtherWork
from ravnest.provider.machine.memory import page_faults


def test_a_stage_whose_machine_swaps_is_at_work_for_a_while() -> None:
    work = OtherWork()
    is_work, why = work.is_work(4900, 30.0, 1000.0)
    assert is_work and "4900 page faults" in why
    assert work.is_work(4900, MAX_SECONDS - 30.0, 1100.0)[0]
    assert not work.is_work(4900, 1.0, 1101.0)[0], "a claim does not last"


def test_a_task_now_and_then_does_not_renew_the_claim() -> None:
    work, now, excused = OtherWork(), 0.0, 0.0
    while now < 5 * WINDOW_SECONDS:
        # It finishes a task every two minutes, and claims faults in every report between.
        now += 1.0
        if now % 119 and work.is_work(20, 1.0, now)[0]:
            excused += 1.0
    assert MAX_SECONDS <= excused <= 5 * MAX_SECONDS


def test_a_stray_fault_and_a_counter_that_falls_are_no_work() -> None:
    assert not OtherWork().is_work(3, 1.0, 0.0)[0]
    assert not OtherWork().is_work(-100, 1.0, 0.0)[0]


def test_a_process_counts_its_faults() -> None:
    assert page_faults() >= 0

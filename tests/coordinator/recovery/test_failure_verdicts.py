"""When a failure ends a run, and when a machine that fails is not given a stage any more."""

from ravnest.coordinator.recovery.failure_verdicts import FailureCounts


def test_one_machine_that_fails_once_ends_nothing() -> None:
    assert FailureCounts().failed("a", 7, 10) == ("", "")


def test_a_microbatch_that_fails_at_two_machines_fails_everywhere() -> None:
    failures = FailureCounts()
    failures.failed("a", 7, 10)
    assert failures.failed("b", 8, 10) == ("", "")
    assert "microbatch 7 fails wherever it is tried" in failures.failed("b", 7, 10).ends_run


def test_a_machine_alone_is_tried_three_times_with_the_same() -> None:
    failures = FailureCounts()
    assert [bool(failures.failed("a", 7, 10).ends_run) for _ in range(3)] == [False, False, True]


def test_a_machine_that_can_build_no_stage_is_set_aside_and_the_others_are_not() -> None:
    failures = FailureCounts()
    failures.failed("b", -1, 10)
    assert [bool(failures.failed("a", -1, 10).set_aside) for _ in range(3)] == [False, False, True]
    assert not failures.failed("b", -1, 10).set_aside


def test_what_was_before_something_was_completed_is_forgotten() -> None:
    failures = FailureCounts()
    failures.failed("a", 7, 10)
    failures.failed("a", -1, 10)
    assert failures.failed("b", 7, 11) == ("", "")
    assert failures.failed("a", -1, 12) == ("", "") and failures.failed("a", -1, 12) == ("", "")


def test_a_machine_whose_links_never_hold_is_set_aside() -> None:
    """Each time its cluster stands still for it: one that only says so could keep a run from ever going on."""
    failures = FailureCounts()
    assert [bool(failures.lost_link("a", 10).set_aside) for _ in range(6)] == [False] * 5 + [True]
    assert not failures.lost_link("a", 11).set_aside

"""Replicas come often enough to lose little, and rarely enough to cost little."""

import pytest

from ravnest.coordinator.replicas.pace import MAX_RETAINED_BYTES, MAX_RETAINED_MICROBATCHES, replica_due


def due(**changed: float | None) -> tuple[bool, str]:
    usual: dict[str, float | None] = {
        "seconds_since_last": 10.0,
        "period_seconds": 5.0,
        "retained_microbatches": 20,
        "retained_bytes": 1 << 20,
        "updates_since": 5,
    }
    return replica_due(**(usual | changed))  # type: ignore[arg-type]


def test_the_first_update_is_worth_a_replica() -> None:
    assert due(seconds_since_last=None)[0]


def test_without_an_update_there_is_none_whatever_is_kept() -> None:
    assert not due(updates_since=0, retained_bytes=1 << 40)[0]


def test_there_are_two_seconds_between_two_of_them_even_when_much_is_kept() -> None:
    assert not due(seconds_since_last=1.9, retained_bytes=1 << 40)[0]
    assert due(seconds_since_last=2.0, retained_bytes=1 << 40)[0]


def test_one_is_due_as_often_as_the_lines_allow() -> None:
    late, reason = due(seconds_since_last=149.0, period_seconds=150.0)
    assert not late and "its lines allow one every 2:30" in reason
    assert due(seconds_since_last=150.0, period_seconds=150.0)[0]


def test_copying_takes_at_most_a_fiftieth_of_a_stages_time() -> None:
    late, reason = due(copy_seconds=0.25)
    assert not late and "copying took 0.25 s" in reason
    assert due(copy_seconds=0.15)[0]


@pytest.mark.parametrize(
    "kept", [{"retained_bytes": MAX_RETAINED_BYTES}, {"retained_microbatches": MAX_RETAINED_MICROBATCHES}]
)
def test_much_that_is_kept_brings_one_however_slow_the_line(kept: dict[str, float]) -> None:
    assert not due(period_seconds=3600.0)[0]
    came, reason = due(period_seconds=3600.0, **kept)
    assert came and "retained for a replay" in reason

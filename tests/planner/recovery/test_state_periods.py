"""How often state travels, from sizes and lines, and what the user is told of it."""

import pytest

from ravnest.planner.problem import NO_LIMIT
from ravnest.planner.recovery.state_periods import (
    MIN_REPLICA_SECONDS,
    StageState,
    budget_share,
    state_periods,
    travelling_bytes,
)
from ravnest.state_budget import BUDGET_SHARE

MBIT = 1e6 / 8


def stage(name: str, megabytes: float, mbps: float) -> StageState:
    return StageState(name, megabytes * 1e6, megabytes * 1e6, mbps * MBIT)


def test_the_slowest_line_decides_and_state_stays_within_its_share() -> None:
    stages = [stage("a", 19, 10), stage("b", 19, 20), stage("c", 40, 40)]
    periods = state_periods(stages, 60.0)
    assert periods.slowest is not None and periods.slowest.provider == "a"
    for each in stages:
        replicas = each.replica_bytes / periods.replica_seconds
        assert periods.checkpoint_seconds is not None
        checkpoints = each.checkpoint_bytes / periods.checkpoint_seconds
        assert replicas + checkpoints <= BUDGET_SHARE * each.up_bytes_per_second * 1.0001
    assert periods.sending_seconds == pytest.approx(19e6 / (BUDGET_SHARE * 10 * MBIT))
    assert periods.at_most_lost_seconds == pytest.approx(2.5 * periods.sending_seconds)


def test_a_wish_that_the_lines_allow_is_met() -> None:
    periods = state_periods([stage("a", 1, 100), stage("b", 1, 100)], 60.0)
    assert periods.meets_wish and periods.checkpoint_seconds == 60.0
    assert periods.sentences() == (
        "a lost machine costs at most 2.5 s of one stage's work (a replica every 2.0 s)",
        "a checkpoint every 1:00",
    )


def test_a_wish_that_a_line_cannot_meet_is_refused_in_one_sentence() -> None:
    periods = state_periods([stage("a", 19, 10), stage("b", 19, 100)], 60.0)
    assert not periods.meets_wish
    lost, checkpoint = periods.sentences()
    assert lost == (
        "a lost machine costs at most 4:13 of one stage's work (a replica every 2:32: 18.1 MiB over a's 10 Mbit/s)"
    )
    assert checkpoint == (
        "a checkpoint every 5:04 instead of 1:00: a sends 18.1 MiB over 10 Mbit/s, of which 5% are for checkpoints"
    )


def test_the_requesters_own_line_limits_checkpoints_of_many_stages() -> None:
    stages = [stage(f"p{number}", 50, 1000) for number in range(10)]
    periods = state_periods(stages, 60.0, 20 * MBIT)
    assert periods.checkpoint_seconds == pytest.approx(500e6 / (BUDGET_SHARE * 20 * MBIT))
    assert "the requester receives" in periods.limit
    assert periods.replica_seconds < 10, "replicas do not pass the requester"


def test_lines_without_a_limit_leave_only_the_shortest_period() -> None:
    periods = state_periods([StageState("a", 1e9, 1e9), StageState("b", 1e9, 1e9)], 30.0, NO_LIMIT)
    assert periods.replica_seconds == MIN_REPLICA_SECONDS and periods.sending_seconds == 0.0
    assert periods.checkpoint_seconds == 30.0


def test_a_cluster_without_replicas_has_the_whole_share_for_checkpoints() -> None:
    one, other = (state_periods([stage("a", 100, 10)], 1.0, has_replicas=has) for has in (True, False))
    assert one.checkpoint_seconds is not None and other.checkpoint_seconds is not None
    assert one.checkpoint_seconds == pytest.approx(3 * other.checkpoint_seconds)
    assert other.replica_seconds == 0.0 and "lost machine" not in " ".join(other.sentences())


def test_without_a_wish_there_is_no_checkpoint_by_time() -> None:
    periods = state_periods([stage("a", 100, 10)], None)
    assert periods.checkpoint_seconds is None and periods.meets_wish
    assert len(periods.sentences()) == 1


def test_a_plan_counts_the_bytes_of_the_coding_that_a_line_gets() -> None:
    part = 200e6
    thin, wide = 10 * MBIT, 10_000 * MBIT
    rounded = travelling_bytes(part, thin, is_exact=False, is_local=False)
    exact = travelling_bytes(part, thin, is_exact=True, is_local=False)
    assert rounded < exact / 2 < exact < part
    assert travelling_bytes(part, wide, is_exact=False, is_local=False) == part
    assert travelling_bytes(part, thin, is_exact=False, is_local=True) == part


def test_a_replica_that_takes_longer_than_planned_makes_them_rarer_and_the_user_hears_the_truth() -> None:
    stages = [stage("a", 1, 10), stage("b", 1, 10)]
    planned, busy = (state_periods(stages, 60.0, measured_seconds=seconds) for seconds in (0.0, 40.0))
    assert planned.sending_seconds < 40.0 == busy.sending_seconds
    assert busy.replica_seconds == pytest.approx(60.0) and busy.at_most_lost_seconds == pytest.approx(100.0)
    assert state_periods(stages, 60.0, measured_seconds=0.1) == planned, "a lucky one is no promise"


def test_clusters_that_average_leave_most_of_the_budget_to_rounds() -> None:
    assert budget_share(1) == BUDGET_SHARE
    assert budget_share(2) == budget_share(5) == pytest.approx(BUDGET_SHARE / 3)

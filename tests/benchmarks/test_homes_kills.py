"""The benchmark of homes: what it reads from a run whose machines were killed."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.homes_parts.kills import Killed
from benchmarks.homes_parts.recoveries import (
    Kill,
    PowerCut,
    clusters_of,
    power_cut,
    recovery,
    told_loss_seconds,
    told_seconds,
)
from benchmarks.homes_parts.rows import kill_rows, kill_targets

Lines = list[dict[str, Any]]


def summary(*clusters: tuple[str, ...]) -> dict[str, Any]:
    return {
        "clusters": [
            {"id": number, "stages": [{"provider": name, "stage": stage} for stage, name in enumerate(names)]}
            for number, names in enumerate(clusters)
        ]
    }


def updates(*reports: tuple[float, int, int]) -> Lines:
    return [{"at": at, "cluster": cluster, "stage": stage} for at, cluster, stage in reports]


FAILOVER: Lines = [
    {"kind": "failover_begun", "at": 101.0, "lost": "b", "updates_lost": 3},
    {"kind": "failover", "at": 102.0, "cluster": 0},
]


def test_a_failover_ends_when_every_stage_of_the_cluster_has_made_an_update_after_it() -> None:
    now = summary(("a", "c"), ("d",))
    assert recovery("b", 100.0, FAILOVER, updates((101.5, 0, 1), (103.0, 0, 0)), now) is None
    found = recovery("b", 100.0, FAILOVER, updates((103.0, 0, 0), (104.0, 0, 1), (109.0, 1, 0)), now, told=9.0)
    assert found == Kill("b", "failover", 4.0, 9.0, 3)


def test_a_summary_from_before_the_kill_shows_no_recovery() -> None:
    reports = updates((103.0, 0, 0), (104.0, 0, 1))
    assert recovery("b", 100.0, FAILOVER, reports, summary(("a", "b"))) is None
    assert recovery("b", 100.0, FAILOVER, reports, summary()) is None


def test_the_recovery_of_another_machine_does_not_count() -> None:
    reports = updates((103.0, 0, 0), (104.0, 0, 1))
    assert recovery("x", 100.0, FAILOVER, reports, summary(("a", "c"))) is None


def test_after_a_division_all_stages_must_train() -> None:
    events = [{"kind": "reform_begun", "at": 101.0}, {"kind": "reformed", "at": 105.0}]
    now = summary(("a",), ("c",))
    assert recovery("b", 100.0, events, updates((106.0, 0, 0)), now) is None
    found = recovery("b", 100.0, events, updates((106.0, 0, 0), (107.5, 1, 0)), now)
    assert found == Kill("b", "reformed", 7.5, None, 0)


def test_when_a_cluster_is_dissolved_the_others_must_train() -> None:
    reason = "cluster 0 is dissolved: b, which held stage 1, is gone"
    events = [
        {"kind": "deployed", "at": 20.0},
        {"kind": "cluster_lost", "at": 101.0, "cluster": 0, "reason": reason, "samples": 12},
    ]
    # A summary names a dissolved cluster until the next deployment.
    now = summary(("a", "b"), ("c",))
    assert recovery("b", 100.0, events, updates((102.0, 0, 0)), now) is None
    assert recovery("b", 100.0, events, updates((102.0, 1, 0)), now) == Kill("b", "cluster_lost", 2.0, None, 12)
    assert recovery("x", 100.0, events, updates((102.0, 1, 0)), now) is None
    assert [each["id"] for each in clusters_of(now, events)] == [1]
    assert [each["id"] for each in clusters_of(now, [*events, {"kind": "deployed", "at": 110.0}])] == [0, 1]


def losses(*points: tuple[float, int]) -> Lines:
    return [{"at": at, "samples": samples, "updates": samples // 4} for at, samples in points]


def test_a_power_cut_costs_the_samples_between_the_kill_and_where_training_continued() -> None:
    curve = losses((70.0, 400), (85.0, 700), (100.0, 1000), (150.0, 808), (151.0, 804))
    assert power_cut(100.0, 110.0, [], curve[:3]) is None
    found = power_cut(100.0, 110.0, [{"kind": "resumed_swarm", "source": "replica"}], curve, told=20.0)
    assert found is not None
    assert (found.samples_before, found.samples_after, found.samples_lost) == (1000, 800, 200)
    assert (found.seconds, found.source, found.rate) == (40.0, "replica", 10.0)
    assert (found.lost_seconds, found.told_seconds) == (20.0, 20.0)


def test_what_a_loss_costs_is_read_as_the_run_tells_it() -> None:
    told = {"state": {"at_most_lost_seconds": 20.0, "checkpoint_seconds": 60.0}}
    assert (told_seconds(told), told_loss_seconds(told)) == (20.0, 60.0)
    for silent in ({}, {"state": {"at_most_lost_seconds": None, "checkpoint_seconds": None}}):
        assert told_seconds(silent) is None and told_loss_seconds(silent) is None


LEDGER = {"fed": 9, "completed": 9, "replayed": 2, "lost": 0, "applied_twice": 0}
CUT = PowerCut(40.0, 1000, 800, "replica", 10.0, told_seconds=30.0)
GOOD = Killed((Kill("a", "failover", 2.0, 4.0, 0), Kill("b", "reformed", 3.0, 4.0, 0)), "", CUT, 5.0, LEDGER)


def test_each_promise_of_a_swarm_whose_machines_are_killed_has_a_target_that_it_can_miss() -> None:
    assert len(kill_targets("x", GOOD)) == 5 and all(target.met for target in kill_targets("x", GOOD))
    bad = Killed(
        (Kill("a", "failover", 9.0, 4.0, 0),),
        "no update of every stage after a was killed within 600 s",
        replace(CUT, samples_after=100),
        None,
        LEDGER,
    )
    assert not any(target.met for target in kill_targets("x", bad))
    for wrong in ({"lost": 1}, {"applied_twice": 1}, {"completed": 8}):
        assert not replace(GOOD, ledger=LEDGER | wrong).is_complete


def test_the_rows_have_the_median_and_the_worst_kill_and_what_a_power_cut_cost() -> None:
    kills, cut = kill_rows("x", GOOD)
    assert (kills["kills"], kills["median_seconds"], kills["worst_seconds"]) == (2, 2.5, 3.0)
    assert (cut["samples_lost"], cut["lost_seconds"]) == (200, pytest.approx(20.0))

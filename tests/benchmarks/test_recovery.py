"""Readings of benchmarks.recovery from a run directory: a lost stage has recovered once it trains again, not before."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recovery import Kills
from benchmarks.recovery_parts.watching import RunObserver

KILLED_AT = 100.0
PARTS = {"detect_seconds": 0.5, "decide_seconds": 0.1, "fetch_seconds": 0.3, "resume_seconds": 0.4, "seconds": 1.3}


def write(run: Path, events: list[dict[str, Any]], updates: list[tuple[float, int]], stages: int = 3) -> RunObserver:
    run.mkdir(exist_ok=True)
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    lines = [{"at": at, "kind": "stage", "stage": stage} for at, stage in updates]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    held = [{"stage": number, "provider": f"m{number}"} for number in range(stages)]
    (run / "summary.json").write_text(json.dumps({"clusters": [{"stages": held}]}))
    return RunObserver(run)


BEGUN = {"at": 100.6, "kind": "failover_begun", "source": "replica"}
DONE = {"at": 101.5, "kind": "failover", "replayed": 4, **PARTS}


def test_a_failover_ends_with_the_first_update_of_the_stage_that_was_lost(tmp_path: Path) -> None:
    # Earlier reports, those of the killed stage that were still on their way, and those of other stages do not count.
    updates = [(99.0, 1), (100.1, 1), (100.8, 0), (101.25, 1), (102.0, 1)]
    found = write(tmp_path, [BEGUN, DONE], updates).recovery("stem", 1, KILLED_AT)
    assert found is not None
    assert (found.whole, found.detect, found.decide, found.fetch, found.resume) == (1.25, 0.5, 0.1, 0.3, 0.4)
    assert (found.way, found.source, found.replayed, found.told) == ("failover", "replica", 4, 1.3)


def test_nothing_is_recovered_before_both_were_told(tmp_path: Path) -> None:
    assert write(tmp_path, [BEGUN, DONE], [(100.1, 1)]).recovery("stem", 1, KILLED_AT) is None
    assert write(tmp_path, [BEGUN], [(101.0, 1)]).recovery("stem", 1, KILLED_AT) is None
    assert write(tmp_path, [DONE | {"at": 99.0}], [(101.0, 1)]).recovery("stem", 1, KILLED_AT) is None


def test_a_repartitioned_model_has_recovered_when_all_its_stages_train(tmp_path: Path) -> None:
    events = [
        {"at": 100.6, "kind": "reform_begun"},
        {"at": 103.75, "kind": "deployed"},
        {"at": 106.0, "kind": "reformed", "seconds": 5.4, "decide_seconds": 0.25, "fetch_seconds": 2.0},
    ]
    # Reports from before the deployment belong to the old stages.
    updates = [(101.0, 0), (101.0, 1), (104.0, 0)]
    assert write(tmp_path, events, updates, stages=2).recovery("leaf", 2, KILLED_AT) is None
    found = write(tmp_path, events, [*updates, (104.5, 1)], stages=2).recovery("leaf", 2, KILLED_AT)
    assert found is not None
    assert (found.way, found.whole, found.decide, found.fetch, found.resume) == ("reformed", 4.5, 0.25, 2.0, 0.75)
    assert found.detect == pytest.approx(0.6)


def test_a_swarm_that_breaks_misses_a_target() -> None:
    kills = Kills("standby")
    with kills.counted():
        raise TimeoutError("no update within 120 s")
    assert kills.rows() == []
    assert [target.met for target in kills.targets("with a warm standby", "failover", 5.0)] == [False, True]

"""The numbers that the display and summary.json show are the run's own."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ravnest.coordinator.feed.cluster_state import Clusters
from ravnest.coordinator.feed.ledger import DataPosition, Ledger, LedgerEntry
from ravnest.coordinator.report.progress import Progress
from ravnest.coordinator.report.training_clock import TrainingClock
from ravnest.monitor.report import final_facts
from ravnest.monitor.run_directory import RunPaths
from ravnest.monitor.summary import Fault, Summary
from ravnest.planner.plan import Plan
from tests.builders import cluster_plan, stage_plan


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def a_progress(clock: Clock, start: DataPosition = DataPosition(), epochs: int = 4) -> Progress:  # noqa: B008
    ledger = Ledger(start)
    return Progress("digits", epochs, ledger, TrainingClock(ledger, clock=clock))


def train(progress: Progress, clock: Clock, count: int, seconds_each: float = 0.1) -> None:
    progress.clock.run()
    for _ in range(count):
        clock.now += seconds_each
        number, ledger = progress.ledger.completed, progress.ledger
        after = DataPosition(0, number + 1, number + 1, ledger.updates + 1, ledger.samples + 8)
        ledger.feed(LedgerEntry(number, 8, after))
        ledger.complete(number)
        progress.clock.on_microbatch()


def test_the_rate_is_that_of_training_and_not_of_evaluations(clock: Clock) -> None:
    progress = a_progress(clock)
    clock.now += 50
    train(progress, clock, 10)
    progress.clock.pause()
    clock.now += 50
    train(progress, clock, 10)
    assert progress.clock.samples_per_second() == pytest.approx(80)
    assert progress.clock.recent_samples_per_second() == pytest.approx(80)
    assert progress.summary("running", "").samples_per_second == pytest.approx(80)


def test_the_first_microbatch_wakes_everything_up_and_does_not_count(clock: Clock) -> None:
    progress = a_progress(clock)
    train(progress, clock, 1, seconds_each=30.0)
    assert progress.clock.samples_per_second() == pytest.approx(8 / 30)
    train(progress, clock, 10)
    assert progress.clock.samples_per_second() == pytest.approx(80)
    assert progress.clock.first_update_seconds == 30.0


def test_what_was_done_before_a_resume_counts_as_done_and_not_as_fast(clock: Clock) -> None:
    progress = a_progress(clock, DataPosition(epoch=0, position=100, microbatches=100, updates=100, samples=800))
    train(progress, clock, 10)
    assert progress.summary("running", "").samples == 880
    assert progress.summary("running", "").updates == 110
    assert progress.clock.samples_per_second() == pytest.approx(80)
    assert progress.clock.recent_samples_per_second() == pytest.approx(80)


def test_a_run_that_has_come_to_a_halt_does_not_keep_its_rate(clock: Clock) -> None:
    progress = a_progress(clock)
    train(progress, clock, 50)
    assert progress.clock.recent_samples_per_second() == pytest.approx(80)
    clock.now += 45
    assert progress.clock.recent_samples_per_second() == pytest.approx(8, rel=0.05)


def test_the_time_left_follows_from_what_the_data_promises(clock: Clock) -> None:
    progress = a_progress(clock)
    assert progress.snapshot().eta_seconds is None
    progress.epochs.samples = 400
    train(progress, clock, 10)
    snapshot = progress.snapshot()
    assert (snapshot.samples_done, snapshot.samples_total) == (80, 1600)
    assert snapshot.eta_seconds == pytest.approx((1600 - 80) / 80)
    progress.epochs.max_samples = 480
    assert progress.snapshot().samples_total == 480


def test_epochs_are_counted_by_batches(clock: Clock) -> None:
    progress = a_progress(clock)
    progress.epochs.batches = 8
    train(progress, clock, 6)
    assert progress.summary("stopped", "").epochs == 0.75
    progress.ledger.end_epoch(DataPosition(1, 0, 6, 6, 48))
    assert progress.summary("stopped", "").epochs == 1.0


def test_the_loss_is_the_mean_over_samples_of_the_last_microbatches(clock: Clock) -> None:
    progress = a_progress(clock)
    assert progress.train_loss is None
    progress.losses.extend([(1.0, 30), (4.0, 10)])
    assert progress.train_loss == pytest.approx(1.75)
    progress.losses.extend([(2.0, 8)] * 50)
    assert progress.train_loss == pytest.approx(2.0)


def test_what_is_in_flight_is_lost_only_when_the_run_is_over(clock: Clock) -> None:
    progress = a_progress(clock)
    progress.ledger.feed(LedgerEntry(0, 8, DataPosition(0, 1, 1, 1, 8)))
    assert progress.summary("running", "").ledger.lost == 0
    assert progress.summary("failed", "").ledger.lost == 1


def test_the_first_update_is_timed_from_the_command(clock: Clock) -> None:
    progress = a_progress(clock)
    clock.now += 7
    train(progress, clock, 3, seconds_each=1)
    assert progress.summary("running", "").first_update_seconds == pytest.approx(8)


def test_faults_are_in_the_summary(clock: Clock) -> None:
    progress = a_progress(clock)
    fault = Fault(kind="provider_lost", provider="provider-1", cluster=0, at=clock.now)
    progress.faults.append(fault)
    assert progress.summary("failed", "").faults == (fault,)


def test_how_far_the_stages_are_is_told_for_each_or_for_the_slowest(clock: Clock) -> None:
    progress = a_progress(clock)
    assert progress.snapshot().detail == ""
    progress.fetching = {"anna": 0.4399, "ben": 1.0}
    assert progress.snapshot().detail == "anna 43 %, ben 100 %"
    progress.fetching = {f"p{number}": min(1.0, number / 10) for number in range(20)}
    assert progress.snapshot().detail == "10 of 20, p0 0 %, p1 10 %, p2 20 %"


def test_a_run_that_is_over_does_not_go_on_because_somebody_looked_late(clock: Clock, tmp_path: Path) -> None:
    progress, run = a_progress(clock), RunPaths(tmp_path)
    late = progress.summary("running", "training")
    progress.write(progress.summary("finished", "all epochs are done"), run)
    progress.write(late, run)
    assert Summary.read(run.summary_path).status == "finished"


def test_the_summary_says_what_limits_the_plan_and_so_does_the_speed_of_the_report(clock: Clock) -> None:
    progress = a_progress(clock)
    limit = "the requester's uplink: 3.1 MB a sample, 20 Mbit/s, 0.8 samples/s"
    stage = stage_plan("a", 0)
    plan = SimpleNamespace(predicted_samples_per_second=80.0, limit=limit, stages=(stage,))
    progress.plan = cast(Plan, plan)
    progress.clusters = Clusters([cluster_plan((stage,))])
    train(progress, clock, 10)
    summary = progress.summary("running", "")
    assert summary.clusters[0].limit == limit
    assert dict(final_facts(summary))["speed"].endswith(f"limited by {limit}")
    progress.snapshot()

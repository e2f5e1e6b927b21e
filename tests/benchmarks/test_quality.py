"""The benchmark of quality: its virtual pipeline must be as stale as theory says, and its sums must be right."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import quality
from benchmarks.pipeline_parts.swarms import MICROBATCHES as IN_A_STEP
from benchmarks.quality_parts.rates import Rates, read_rates
from benchmarks.quality_parts.study import Found, rows
from benchmarks.quality_parts.tasks import TASKS, DigitsNet
from benchmarks.quality_parts.times import times_to_loss
from benchmarks.quality_parts.trial import Outcome, Trial, Way, allowed, job_of, places, run_trial
from benchmarks.quality_parts.virtual import VirtualPipeline, in_flight_of_plan
from ravnest.engine.corrections.correction import DEFAULT
from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage
from ravnest.errors import RunError
from ravnest.graph.capture.capture import Captured, capture
from ravnest.graph.cutting.partition import split
from ravnest.spec import OptimizerSpec

MICROBATCHES = 20


def some_batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn((4, 1, 8, 8), generator=generator), torch.randint(10, (4,), generator=generator))
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    return capture(DigitsNet(), F.cross_entropy, {}, some_batches(2))


def a_pipeline(
    captured: Captured,
    stages: int,
    in_flight: int,
    link: float = 0.0,
    allowed: Callable[[int], int] | None = None,
    **settings: Any,
) -> VirtualPipeline:
    told = [
        StageSettings(
            optimizer=OptimizerSpec("SGD", {"lr": 0.01}).to_json(),
            stage=n,
            stages=stages,
            in_flight=in_flight,
            **settings,
        )
        for n in range(stages)
    ]
    graphs = split(captured.graph, places(captured.graph, stages))
    made = [
        Stage(graph, {spec.key: captured.weights[spec.key].clone() for spec in graph.weights}, each)
        for graph, each in zip(graphs, told, strict=True)
    ]
    return VirtualPipeline(made, in_flight, link, allowed=allowed)


def fed(captured: Captured, count: int = MICROBATCHES) -> list[Mapping[str, torch.Tensor]]:
    return [captured.structure.flatten(batch) for batch in some_batches(count)]


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_just_enough_in_flight_is_as_stale_as_there_are_stages_after_this_one(captured: Captured, stages: int) -> None:
    pipeline = a_pipeline(captured, stages, in_flight=stages)
    pipeline.train(fed(captured))
    for place, counts in enumerate(pipeline.staleness):
        assert counts.total() == MICROBATCHES
        # Steady from the filling to the draining: all but as many updates as are in flight.
        assert counts[stages - 1 - place] >= MICROBATCHES - stages
    assert max(pipeline.staleness[0]) == stages - 1 and pipeline.staleness[-1] == {0: MICROBATCHES}


@pytest.mark.parametrize(("stages", "link"), [(2, 0.0), (4, 0.0), (4, 2.2)])
def test_what_a_plan_begins_with_keeps_every_stage_busy(captured: Captured, stages: int, link: float) -> None:
    just = math.ceil((3 * stages + 2 * (stages - 1) * link) / 3)
    took = {}
    for in_flight in (just - 1, in_flight_of_plan(stages, link)):
        pipeline = a_pipeline(captured, stages, in_flight, link)
        times = []
        for count in (16, 36):
            began = pipeline.seconds
            pipeline.train(fed(captured, count))
            times.append(pipeline.seconds - began)
        # Filling and draining take the same for both counts: what is between them is steady.
        took[in_flight] = (times[1] - times[0]) / 20
    assert took[in_flight_of_plan(stages, link)] == pytest.approx(3.0), "what the slowest stage takes, and no pause"
    assert took[just - 1] > 3.1


def test_nothing_is_staler_than_what_is_in_flight(captured: Captured) -> None:
    pipeline = a_pipeline(captured, 4, in_flight=7, link=3.0)
    pipeline.train(fed(captured))
    assert max(pipeline.staleness[0]) == 6
    assert all(max(counts) <= 6 for counts in pipeline.staleness)
    assert pipeline.staleness[-1] == {0: MICROBATCHES}


def test_the_number_in_flight_stays_within_the_limit_for_the_number_of_updates(captured: Captured) -> None:
    pipeline = a_pipeline(captured, 4, in_flight=7, link=3.0, allowed=lambda updates: 2 if updates < 10 else 9)
    pipeline.train(fed(captured, 10))
    assert max(pipeline.staleness[0]) == 1
    pipeline.train(fed(captured))
    assert max(pipeline.staleness[0]) == 6


def test_the_default_has_fewer_in_flight_while_its_rate_is_high() -> None:
    ways = {correction: Way("gpt", 8, "stash", correction, link=4.0) for correction in ("foresight", DEFAULT)}
    bounds = {name: allowed(job_of(Trial(way, 4e-3, 1, 12)), way) for name, way in ways.items()}
    assert bounds["foresight"] is None
    bound = bounds[DEFAULT]
    assert bound is not None and bound(300) == 8 < ways[DEFAULT].in_flight <= bound(2900)


def test_one_in_flight_is_one_stage(captured: Captured) -> None:
    losses = []
    for stages in (1, 4):
        pipeline = a_pipeline(captured, stages, in_flight=1)
        pipeline.train(fed(captured, 6))
        assert all(set(counts) == {0} for counts in pipeline.staleness)
        losses.append(pipeline.losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_what_is_summed_up_is_applied_at_the_end(captured: Captured) -> None:
    pipeline = a_pipeline(captured, 2, in_flight=3, accumulate=3)
    pipeline.train(fed(captured, 7), last=6)
    assert [counts.total() for counts in pipeline.staleness] == [3, 3]


def test_a_trial_gives_the_same_each_time_whatever_the_machine_does() -> None:
    trial = Trial(Way("digits", 8), TASKS["digits"].rates[1], seed=1, epochs=1)
    outcome = run_trial(trial)
    assert outcome == run_trial(trial)
    assert outcome.staleness > 3


def test_the_gpt_can_be_cut_into_eight_stages() -> None:
    job = TASKS["gpt"].job(1, 1, 1e-3, 1)
    graph = capture(job.model, job.loss, job.metrics, [next(job.train_batches())]).graph
    assert all(stage.parameters for stage in split(graph, places(graph, 8)))


def found(way: Way, *losses: float) -> Found:
    curves = [((10, loss + 2), (20, loss + 1), (30, loss)) for loss in losses]
    outcomes = tuple(Outcome(curve, curve[-1][1], 1.0, full=(15.0, 35.0, 45.0)) for curve in curves)
    return Found(way, 0.1, outcomes, ((0.1, losses[0]), (0.2, losses[0])))


def test_a_way_is_compared_with_synchronous_training_of_its_task() -> None:
    exact, other = found(Way("gpt"), 1.0, 2.0), found(Way("gpt", 4), 2.0, 3.0)
    first, second = rows({exact.way: exact, other.way: other})
    assert first["above_synchronous"] is None
    assert second["above_synchronous"] == pytest.approx(1.0) and second["spread"] == pytest.approx(0.7071, abs=1e-4)
    assert exact.is_at_the_edge


def test_samples_to_a_loss_are_read_off_between_evaluations() -> None:
    each = found(Way("gpt"), 1.0, 2.0)
    # The mean curve is 3.5, 2.5, 1.5.
    assert each.samples_to(2.0) == pytest.approx(25.0)
    assert each.samples_to(4.0) == pytest.approx(10.0)
    assert each.samples_to(1.0) is None
    assert each.full_samples_to(2.0) == pytest.approx(40.0)
    assert each.full_samples_to(1.0) is None


def test_1f1b_updates_as_often_as_it_did_when_its_rate_was_measured() -> None:
    to_reach = TASKS["gpt"].loss_to_reach
    # They are there after 20 samples, 10 and 30.
    ways = {Way("gpt", 4, link=2.2): -1.0, Way("gpt"): -2.0, Way("gpt", accumulate=IN_A_STEP): 0.0}
    all_found = {way: found(way, to_reach + loss) for way, loss in ways.items()}
    (row,), (target,) = times_to_loss(all_found, Rates(ours=6.0, one_f_one_b=1.5))
    # For ours it is time that counts: in that of 20 samples, 35 might have been trained on.
    assert row["times_faster"] == target.value == pytest.approx(4 * 30 / 35)
    assert row["times_faster_if_1f1b_updated_each_time"] == pytest.approx(4 * 10 / 35)
    (row,), targets = times_to_loss(all_found, None)
    assert not targets and row["our_samples"] == pytest.approx(20.0)


def test_rates_are_read_from_what_the_benchmark_of_pipelines_writes(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.json"
    file.write_text('{"rows": [{"case": "gpt 4 100/50", "float32": 6.5, "1f1b": 1.5}, {"case": "gpt 4 20/100"}]}')
    assert read_rates(file, 4) == Rates(ours=6.5, one_f_one_b=1.5)


@pytest.mark.parametrize("text", ['{"rows": []}', "[]", "", '{"rows": [{"case": "gpt 4 100/50", "1f1b": null}]}'])
def test_a_file_without_rates_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "pipeline.json"
    file.write_text(text)
    with pytest.raises(RunError, match="has no rates"):
        read_rates(file, 4)


def ways(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[Way]:
    monkeypatch.setattr("sys.argv", ["quality", "--task", "gpt", *words])
    return quality.selected_ways(quality.parse_arguments())


def test_rows_of_the_default_come_with_the_default_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("--stages", "4", "--correction", DEFAULT)
    latest = Way("gpt", 4, "latest", DEFAULT)
    assert ways(monkeypatch, *asked, "--versions", "latest") == [Way("gpt"), latest]
    found = ways(monkeypatch, *asked, "--versions", "stash")
    assert Way("gpt", 4, "stash", DEFAULT, codec="int8") in found
    assert Way("gpt", accumulate=IN_A_STEP) in found and any(way.link for way in found)


def test_links_that_are_asked_for_come_in_place_of_other_rows_and_without_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    default = Way("gpt", 8, "stash", DEFAULT)
    slow = Way("gpt", 8, "stash", DEFAULT, link=4.0)
    given = ("--stages", "8", "--versions", "stash", "--correction", DEFAULT, "--link")
    assert ways(monkeypatch, *given, "4") == [Way("gpt"), default, slow]
    assert slow.in_flight == 40
    assert times_to_loss({way: found(way, 2.0, 1.0) for way in (Way("gpt"), slow)}, None) == ([], [])
    with pytest.raises(SystemExit):
        ways(monkeypatch, *given, "0")

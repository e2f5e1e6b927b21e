"""How busy stages are is told of a full pipeline, not of one that fills, runs empty or evaluates."""

from dataclasses import replace

import pytest

from ravnest.monitor.steady import last_of, steady_stretch
from ravnest.monitor.trace import TraceSpan, TraceStage
from tests.monitor.pipelines import BACKWARD, FORWARD, UPDATE, pipeline


def shifted(stages: list[TraceStage], seconds: float) -> list[TraceStage]:
    return [
        replace(
            stage,
            spans=tuple(replace(s, began=s.began + seconds, ended=s.ended + seconds) for s in stage.spans),
        )
        for stage in stages
    ]


def joined(*parts: list[TraceStage]) -> list[TraceStage]:
    return [
        replace(stages[0], spans=tuple(span for stage in stages for span in stage.spans))
        for stages in zip(*parts, strict=True)
    ]


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_busy_fraction_is_that_of_the_full_pipeline(stages: int) -> None:
    cold, *rest = pipeline(stages, 30)
    # The very first backward takes for ever: it tells nothing of the rest.
    first = next(span for span in cold.spans if span.kind == "backward")
    warm = [replace(s, began=s.began + 50, ended=s.ended + 50) for s in cold.spans if s.began > first.began]
    late = [replace(stage, spans=tuple(shifted([stage], 50.0)[0].spans)) for stage in rest]
    cold = replace(cold, spans=(*(s for s in cold.spans if s.began < first.began), *warm, replace(first, ended=50.0)))
    found = steady_stretch([cold, *late])
    assert found is not None and found.steady and len(found.microbatches) >= 15
    for each in found.stages:
        assert each.busy_fraction == pytest.approx(FORWARD + BACKWARD + UPDATE, abs=0.02)
        (why,) = each.waits
        assert why == ("nothing ready" if each.stage.stage else "limit")
        assert each.waits[why] == pytest.approx(0.2, abs=0.02)
        assert each.mean_seconds["forward"] == pytest.approx(0.03)
        assert each.mean_seconds["backward"] == pytest.approx(0.04)


def test_an_evaluation_in_between_is_not_part_of_it() -> None:
    evaluation = [
        replace(stage, spans=tuple(TraceSpan("evaluate", -1 - n, 4 + n / 10, 4.05 + n / 10) for n in range(20)))
        for stage in pipeline(2, 0)
    ]
    stages = joined(pipeline(2, 30), evaluation, shifted(pipeline(2, 15, first=30), 7.0))
    found = steady_stretch(stages)
    assert found is not None and found.steady
    assert set(found.microbatches) <= set(range(30, 45)) and found.began > 7
    assert all(each.busy_fraction == pytest.approx(0.8, abs=0.03) for each in found.stages)


def test_a_later_window_is_taken_unless_it_is_too_short() -> None:
    later = joined(pipeline(2, 30), shifted(pipeline(2, 30, first=200), 60.0))
    found = steady_stretch(later)
    assert found is not None and min(found.microbatches) >= 200
    short = joined(pipeline(2, 30), shifted(pipeline(2, 4, first=200), 60.0))
    found = steady_stretch(short)
    assert found is not None and max(found.microbatches) < 30


def test_too_few_microbatches_are_shown_and_not_called_steady() -> None:
    found = steady_stretch(pipeline(4, 2))
    assert found is not None and not found.steady
    assert steady_stretch([replace(stage, spans=()) for stage in pipeline(2, 2)]) is None


def test_a_microbatch_that_one_stage_does_not_tell_of_is_passed_over() -> None:
    stages = pipeline(2, 30)
    stages[1] = replace(stages[1], spans=tuple(s for s in stages[1].spans if s.microbatch != 29))
    found = steady_stretch(stages)
    assert found is not None and found.steady and 29 not in found.microbatches


def test_the_picture_has_the_last_of_a_long_stretch() -> None:
    stages = pipeline(2, 100)
    found = steady_stretch(stages)
    assert found is not None
    began, ended = last_of(found, stages, 40)
    assert ended == found.ended and began == pytest.approx(ended - 4.0, abs=0.2)

"""The benchmark of pipelines: its cells, its limits, its cuts and its sums must be what it says."""

import pytest
import torch

from benchmarks.pipeline_parts.cells import ALL, LINES, PACE, Cell, chosen
from benchmarks.pipeline_parts.models import BLOCKS, CROSSING_BYTES, TASKS, cut_blocks, stage_module
from benchmarks.pipeline_parts.steady import Moment, StageMoment, steady
from benchmarks.pipeline_parts.swarms import step_seconds

UNSHAPED, FAST, MIDDLE, SLOW = LINES


@pytest.mark.parametrize("task", ["gpt", "cnn"])
@pytest.mark.parametrize("stages", [2, 3, 8])
def test_the_stages_of_a_task_make_up_its_model_and_a_mebibyte_crosses_each_way(task: str, stages: int) -> None:
    made = TASKS[task]
    model = made.model().eval()
    inputs, targets = made.batches()[0]
    assert len(inputs) == made.samples
    with torch.no_grad():
        values = inputs
        for stage in range(stages):
            if stage:
                assert values.numel() * values.element_size() == CROSSING_BYTES
            values = stage_module(model, stage, stages)(values)
        torch.testing.assert_close(values, model(inputs))
        assert torch.isfinite(made.loss(values, targets))


def test_stages_are_as_equal_as_they_can_be() -> None:
    assert [cut_blocks(stages) for stages in (1, 2, 3, 4)] == [(), (4,), (3, 6), (2, 4, 6)]
    assert cut_blocks(BLOCKS) == tuple(range(1, BLOCKS))


def test_the_limit_is_the_slower_of_stages_and_lines() -> None:
    assert Cell("gpt", 4, UNSHAPED).limit() == pytest.approx(1 / 0.15)
    assert Cell("gpt", 4, MIDDLE).limit() == pytest.approx(1 / 0.15)
    assert Cell("gpt", 4, SLOW).limit() == pytest.approx(20e6 / 2**23)
    assert Cell("gpt", 4, SLOW).limit(CROSSING_BYTES / 4) == pytest.approx(1 / 0.15)
    assert Cell("gpt", 4, MIDDLE).computes and not Cell("gpt", 4, SLOW).computes


def test_as_many_in_flight_as_the_way_is_long_are_needed_and_two() -> None:
    assert Cell("gpt", 2, UNSHAPED).needed_in_flight() == 4
    # 0.6 s in stages and three times 0.05 + 2 x 0.0839 s on lines, at 0.15 s each.
    assert Cell("gpt", 4, MIDDLE).needed_in_flight() == 11


def test_cells_are_chosen_by_words_of_their_names() -> None:
    assert chosen([]) == list(ALL)
    assert chosen(["gpt,4,100/50"]) == [Cell("gpt", 4, MIDDLE)]
    assert {cell.task for cell in chosen(["8"])} == {"gpt", "cnn"}
    assert len(chosen(["cnn,2", "cnn, 3", "cnn,3,20/100"])) == 8
    with pytest.raises(ValueError, match=r"'5' is in no cell; words are 100/50,"):
        chosen(["gpt,5"])


def test_steady_state_leaves_out_the_beginning_and_the_end() -> None:
    moments = [
        Moment(at, (StageMoment(at, 0.5 * at), StageMoment(at + 3, 0.9 * at)), 7) for at in (0, 1, 1.5, 2, 2.5, 9)
    ]
    found = steady(moments, after=1, until=3)
    assert found.microbatches_per_second == pytest.approx(2.0)
    assert (found.microbatches, found.in_flight) == (4, 7)
    assert found.busy == pytest.approx((0.5, 0.9))
    with pytest.raises(ValueError, match=r"only 2 microbatches"):
        steady(moments, after=2, until=3)


def test_a_step_counts_at_its_best_with_a_pace_and_on_average_without_one() -> None:
    assert step_seconds([3.0, 1.0, 2.0], PACE) == 1.0
    assert step_seconds([9.0, 1.0, 2.0], None) == 1.5
    assert step_seconds([9.0], None) == 9.0

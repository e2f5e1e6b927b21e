"""The benchmark of learning with several clusters: its sums must be right, and its data must be what it says."""

import pytest
import torch

from benchmarks.convergence import (
    Outcome,
    Setting,
    above_after_samples,
    above_after_seconds,
    int8_above_float32,
    standard_error,
)
from benchmarks.learning import CHARACTERS, TASKS, characters, documentation


def outcome(*curve: tuple[float, float]) -> Outcome:
    return Outcome(curve, samples_per_second=1.0, rounds=0)


def test_several_clusters_are_compared_with_one_at_the_time_when_they_had_finished() -> None:
    one = [outcome(*((10.0 * place, 10.0 - place) for place in range(1, 9)))]
    # At 50 s its last four evaluations were 8, 7, 6 and 5; at 70 s they were 6, 5, 4 and 3.
    assert above_after_seconds([outcome((50, 7.0))], one) == pytest.approx(0.5)
    assert above_after_seconds([outcome((61, 7.0))], one) == pytest.approx(2.5)
    assert above_after_seconds([outcome((5, 7.0))], one) == pytest.approx(-2.0)
    assert above_after_seconds([outcome((500, 7.0))], one) == pytest.approx(3.5)


def test_the_loss_of_a_run_is_the_mean_of_its_last_four_evaluations() -> None:
    assert outcome((1, 9.0), (2, 4.0), (3, 1.0), (4, 2.0), (5, 1.0)).loss == pytest.approx(2.0)


def test_the_noise_is_that_of_both_means() -> None:
    one, runs = [outcome((1, 1.0)), outcome((1, 3.0))], [outcome((1, 5.0)), outcome((1, 5.0))]
    assert above_after_samples(runs, one) == pytest.approx(3.0)
    assert standard_error(runs, one) == pytest.approx(1.0)


def test_int8_is_compared_with_float32_at_the_same_setting_and_seed() -> None:
    outcomes = {
        Setting(1): [outcome((1, 9.0))],
        Setting(2): [outcome((1, 1.0)), outcome((1, 2.0))],
        Setting(2, codec="int8"): [outcome((1, 1.1)), outcome((1, 2.3))],
    }
    assert int8_above_float32(outcomes) == pytest.approx(0.2)


def test_the_held_out_part_is_not_in_the_training_data() -> None:
    train, held_out = documentation()
    assert 0.08 < len(held_out) / len(train) < 0.13
    assert int(train.max()) < CHARACTERS.vocabulary
    part = held_out[:1024]
    windows = train.unfold(0, 64, 1)
    assert not (windows == part[:64]).all(dim=1).any()


@pytest.mark.parametrize("task", TASKS, ids=[task.title for task in TASKS])
def test_a_seed_decides_the_initial_weights(task: object) -> None:
    job = next(t for t in TASKS if t is task).job
    first, again, other = (torch.cat([p.detach().flatten() for p in job(s, 1).model.parameters()]) for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_the_target_of_a_character_is_the_one_after_it() -> None:
    job = characters(1, 1)
    for inputs, targets in (next(job.train_batches()), next(job.eval_batches())):
        assert torch.equal(inputs[:, 1:], targets[:, :-1])

"""Before a run says that it has finished, its model is evaluated from the file: summary.json says what was compared."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ravnest.coordinator.launch import final_model
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.coordinator.verification import final_check
from ravnest.coordinator.verification.decisions import Effort
from ravnest.monitor.summary import Check, Summary
from tests.e2e.jobs import CLASSES, FEATURES, a_job, accuracy, batches
from tests.e2e.watching import kinds

EVAL = batches([8, 8, 5], seed=1)


class Normalised(nn.Module):
    """Batch norm, dropout, a tied weight, and a buffer that is in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.norm, self.drop = nn.BatchNorm1d(FEATURES), nn.Dropout(0.5)
        self.register_buffer("scale", torch.full((FEATURES,), 0.5), persistent=False)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.second(self.norm(self.first(x)).relu() * self.scale)))


@pytest.fixture(scope="module")
def swarm() -> Iterator[EmbeddedSwarm]:
    with EmbeddedSwarm(2) as swarm:
        yield swarm


def checked(swarm: EmbeddedSwarm, run: Path, *, resume: bool = False, clusters: int = 1, **changes: Any) -> Check:
    job = a_job(metrics={"accuracy": accuracy}, **changes)
    result = swarm.train(job, run=run, display=False, resume=resume, clusters=clusters)
    assert result.summary.status == "finished"
    check = Summary.read(run / "summary.json").check
    assert check.status == "passed" and "checked" in kinds(run), check
    assert check.reported.keys() == check.measured.keys() == {"loss", "accuracy"}
    assert check.measured["loss"] == pytest.approx(check.reported["loss"], rel=1e-5)
    return check


@pytest.mark.parametrize("clusters", [1, 2])
def test_all_of_a_small_evaluation_is_compared(swarm: EmbeddedSwarm, clusters: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    check = checked(swarm, run, eval_data=EVAL, model=Normalised(), clusters=clusters)
    assert (check.on, check.samples, check.batches) == ("eval_data", 21, 3)
    told = Summary.read(run / "summary.json").eval
    assert check.reported["loss"] == pytest.approx(told["loss"])
    # A run that had finished evaluates again when it is resumed, and is checked again.
    assert checked(swarm, run, eval_data=EVAL, model=Normalised(), clusters=clusters, resume=True).samples == 21


def test_without_eval_data_a_few_batches_of_training_are_evaluated_at_the_end(
    swarm: EmbeddedSwarm, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    check = checked(swarm, run, model=Normalised())
    assert (check.on, check.batches, check.samples) == ("train_data", 4, 32)
    assert Summary.read(run / "summary.json").eval == {}, "it is no evaluation that was asked for"
    assert checked(swarm, run, model=Normalised(), resume=True).on == "train_data"


def test_a_part_of_a_batch_is_enough_where_a_whole_one_takes_too_long_here(
    swarm: EmbeddedSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(final_check, "effort", lambda *_: Effort(0.3, 2, 1, "as if a batch took long"))
    check = checked(swarm, tmp_path / "run", eval_data=EVAL)
    assert (check.on, check.batches, check.samples) == ("eval_data", 1, 2)


def test_an_interrupt_while_the_model_is_checked_leaves_the_model_and_says_stopped(
    swarm: EmbeddedSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Check:
        raise KeyboardInterrupt

    monkeypatch.setattr(final_model, "check_written", interrupted)
    result = swarm.train(a_job(eval_data=EVAL), run=tmp_path / "run", display=False)
    assert (result.summary.status, result.summary.check.status) == ("stopped", "none")
    assert result.model is not None and result.model.exists()
    assert "continue with --resume" in result.summary.reason

"""Runs in mixed precision through real providers: the same links, nearly the same result as in float32."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ravnest import Job, Pipeline
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from tests.e2e.jobs import a_net, batches


def loss_of(swarm: EmbeddedSwarm, run: Path, precision: str) -> float:
    job = Job(
        model=a_net(),
        loss=F.cross_entropy,
        train_data=batches([8] * 40),
        eval_data=batches([8] * 4),
        optimizer=partial(torch.optim.SGD, lr=0.05),
        pipeline=Pipeline(in_flight=1, precision=precision),
    )
    swarm.train(job, providers=2, run=run, display=False)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ledger"]["completed"] == 40
    return float(summary["eval"]["loss"])


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_stages_in_mixed_precision_learn_what_stages_in_float32_do(
    swarm: EmbeddedSwarm, tmp_path: Path, precision: str
) -> None:
    exact, mixed = loss_of(swarm, tmp_path / "exact", "float32"), loss_of(swarm, tmp_path / "mixed", precision)
    assert mixed == pytest.approx(exact, abs=0.02)
    assert mixed != exact, "something was computed in fewer bits"

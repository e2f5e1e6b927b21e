"""A provider that saves something else than it trained, or reports something else than it computed: real processes.

The run does not say that it has finished: it has failed, with both figures, and nothing goes on from what was written.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.coordinator.verification.final_check import NotAsReportedError
from ravnest.monitor.summary import Summary
from tests.adversary.lying_swarm import events, lying_swarm
from tests.e2e.jobs import a_job, accuracy, batches, every_updates

BATCHES = batches([8] * 24)


def refused(swarm: EmbeddedSwarm, run: Path, **changes: Any) -> tuple[str, Summary]:
    job = a_job(BATCHES, metrics={"accuracy": accuracy}, **changes)
    with pytest.raises(NotAsReportedError) as caught:
        swarm.train(job, run=run, display=False)
    assert caught.value.exit_code != 0
    return str(caught.value), Summary.read(run / "summary.json")


@pytest.mark.parametrize("eval_data", [batches([8] * 4, seed=1), None], ids=["with eval_data", "without"])
def test_a_stage_that_saves_noise_is_no_success(eval_data: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with lying_swarm(3, "provider-1", "noise") as swarm:
        said, summary = refused(swarm, run, eval_data=eval_data, checkpoint=every_updates(10))
    check = summary.check
    assert (summary.status, summary.reason, check.status) == ("failed", said, "failed")
    assert check.on == ("train_data" if eval_data is None else "eval_data")
    assert f"loss {check.measured['loss']:.4g} and {check.reported['loss']:.4g}" in said
    assert (run / "model.safetensors").exists(), "it is there to be looked at"
    last = f"{summary.updates:010d}"
    assert (run / "checkpoints" / f"{last}-not-as-reported").is_dir()
    assert not (run / "checkpoints" / last).exists(), "nothing goes on from it"
    assert events(run, "check_failed") and not events(run, "finished", "checked")


def test_a_leaf_that_reports_a_better_score_is_no_success(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with lying_swarm(3, "provider-2", "a better score") as swarm:
        said, summary = refused(swarm, run, eval_data=batches([8] * 4, seed=1))
    assert summary.check.reported == {"loss": 0.001, "accuracy": 1.0}
    assert "reported by provider-2" in said and summary.check.measured["loss"] != 0.001
    told = json.loads((run / "summary.json").read_text())["check"]
    assert told["samples"] == 32 and told["on"] == "eval_data"

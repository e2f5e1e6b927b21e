"""As many clusters as are asked for, of all providers, which train one model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ravnest import Averaging, Pipeline
from ravnest.coordinator.embedded import EmbeddedSwarm
from ravnest.errors import PlanError
from tests.e2e.command import ravnest
from tests.e2e.jobs import a_job, a_job_file, a_net, batches


@pytest.mark.parametrize(("providers", "clusters", "stages"), [(4, 2, [2, 2]), (3, 2, [1, 2]), (4, 4, [1, 1, 1, 1])])
def test_all_providers_have_a_stage_in_exactly_so_many_clusters(
    swarm: EmbeddedSwarm, tmp_path: Path, providers: int, clusters: int, stages: list[int]
) -> None:
    job = a_job(batches([8] * 40), averaging=Averaging(every=64), pipeline=Pipeline(), eval_data=batches([8]))
    result = swarm.train(job, providers=providers, clusters=clusters, run=tmp_path / "run", display=False)
    summary = result.summary
    assert summary.status == "finished" and summary.samples == 320
    assert sorted(len(cluster.stages) for cluster in summary.clusters) == stages
    assert [cluster.id for cluster in summary.clusters] == list(range(clusters))
    held = [stage.provider for cluster in summary.clusters for stage in cluster.stages]
    assert len(set(held)) == providers
    assert sum(cluster.samples for cluster in summary.clusters) == 320
    assert summary.averaging.rounds >= 1 and summary.averaging.rings >= max(stages)
    events = [json.loads(line) for line in (result.run / "events.jsonl").read_text().splitlines()]
    (planned,) = [event for event in events if event["kind"] == "planned"]
    assert f"{clusters} clusters of" in planned["reason"] and "as averaging.every says" in planned["reason"]
    assert result.model is not None
    trained, before = load_file(result.model), a_net().state_dict()
    assert trained.keys() == before.keys()
    assert all(torch.isfinite(trained[key]).all() and not torch.equal(trained[key], before[key]) for key in before)


def test_providers_that_the_clusters_have_no_work_for_are_refused(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"3 clusters cannot be made of 2 providers"):
        swarm.train(a_job(), providers=2, clusters=3, run=tmp_path / "run", display=False)
    for wrong in (0, "two", True):
        with pytest.raises(PlanError, match=rf"clusters is {wrong!r}: give a whole number of at least 1"):
            swarm.train(a_job(), clusters=wrong, run=tmp_path / "run", display=False)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_the_command_line_trains_several_clusters(tmp_path: Path) -> None:
    a_job_file(tmp_path)
    words = ("--providers", "2", "--clusters", "2", "--run", "run", "--set", "averaging.codec=int8")
    done = ravnest("train", "job.py", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [len(cluster["stages"]) for cluster in summary["clusters"]] == [1, 1]

"""A run keeps to its bound on staleness, and tells how many microbatches are in flight and why."""

import argparse
import itertools
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from ravnest import Pipeline
from ravnest.cli import status
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.monitor.events import read_events
from ravnest.monitor.metrics import read_metrics
from ravnest.monitor.summary import Summary
from ravnest.planner.in_flight import lr_bound as cautious_flight
from tests.e2e.jobs import CLASSES, FEATURES, a_job, batches


def test_a_bound_on_staleness_holds_at_every_stage(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    job = a_job(batches([8] * 20), epochs=7, pipeline=Pipeline(max_staleness=1, accumulate=3))
    found = swarm.train(job, providers=3, run=tmp_path / "run", display=False).summary
    [cluster] = found.clusters
    assert [stage.updates for stage in cluster.stages] == [47, 47, 47], "46 of three microbatches, and one of two"
    assert all(stage.staleness.max <= 1 and stage.staleness.p95 <= 1 for stage in cluster.stages)
    assert cluster.stages[0].staleness.max == 1, "the bound was not even reached"
    curves = [line for line in read_metrics(tmp_path / "run/metrics.jsonl") if line["kind"] == "stage"]
    assert {line["stage"] for line in curves} == {0, 1, 2}
    assert max(line["staleness_max"] for line in curves) == 1


def test_status_tells_how_many_are_in_flight_and_why(
    swarm: EmbeddedSwarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    swarm.train(a_job(batches([8] * 60), pipeline=Pipeline()), providers=2, run=run, display=False)
    events = [event for event in read_events(run / "events.jsonl") if event["kind"] == "in_flight"]
    assert events[0]["old"] is None and events[0]["new"] >= 1
    for before, after in itertools.pairwise(events):
        assert (after["old"], after["cluster"]) == (before["new"], 0) and after["reason"]
    [cluster] = Summary.read(run / "summary.json").clusters
    assert cluster.in_flight == events[-1]["new"] and cluster.in_flight_reason
    [link] = cluster.stages[0].links
    assert link.delay_seconds is not None and 0 < link.delay_seconds < 10
    status.run(argparse.Namespace(path=run, json=False))
    shown = capsys.readouterr().out
    assert f"in flight     {cluster.in_flight}: {cluster.in_flight_reason}" in shown
    assert "ms round trip" in shown
    status.run(argparse.Namespace(path=run, json=True))
    assert json.loads(capsys.readouterr().out)["clusters"][0]["in_flight"] == cluster.in_flight


def test_fewer_are_in_flight_while_the_learning_rate_is_high(
    swarm: EmbeddedSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(cautious_flight, "CAUTIOUS_STALENESS", 1)
    # Where the cores of the machine are the limit, no more are planned than while the rate is high.
    monkeypatch.setattr("ravnest.coordinator.launch.session.usable_cores", lambda: 8)
    # High for a third of the run.
    steps = partial(torch.optim.lr_scheduler.StepLR, step_size=100, gamma=0.1)
    adam = partial(torch.optim.AdamW, lr=1e-3)
    # Layers that take some milliseconds: the stages are the limit, and not the feeding of a tiny model.
    layers = [nn.Linear(FEATURES, 512), *(nn.Linear(512, 512) for _ in range(9)), nn.Linear(512, CLASSES)]
    job = a_job(batches([8] * 300), model=nn.Sequential(*layers), pipeline=Pipeline(), optimizer=adam, schedule=steps)
    swarm.train(job, providers=3, run=run, display=False)
    first, held, *more = [event for event in read_events(run / "events.jsonl") if event["kind"] == "in_flight"]
    assert first["new"] > held["new"] == 3
    assert held["reason"].endswith("no more than 3 may be in flight at the current learning rate")
    assert more[0]["old"] == 3 and more[0]["new"] == first["new"], "as planned, once the rate has fallen"
    curves = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "stage" and line["stage"] == 0]
    while_high = [line["staleness_max"] for line in curves if line["updates"] <= 100]
    later = [line["staleness_max"] for line in curves if line["updates"] > 150]
    assert max(while_high, default=0) <= 2 < max(later)


def test_a_number_that_is_set_stays(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = a_job(batches([8] * 300), pipeline=Pipeline(in_flight=5))
    found = swarm.train(job, providers=3, run=run, display=False).summary
    assert [event["new"] for event in read_events(run / "events.jsonl") if event["kind"] == "in_flight"] == [5]
    assert found.clusters[0].in_flight == 5

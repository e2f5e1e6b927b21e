"""Every version policy through real provider processes: with one in flight a plain loop, with several within bounds."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ravnest import Job, Pipeline
from ravnest.coordinator.launch import session
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.coordinator.launch.session import TrainResult
from ravnest.coordinator.plan.prepared_job import PreparedJob, prepare
from ravnest.monitor.events import read_events
from ravnest.version_policy import POLICIES
from tests.exactness.plain_loop import train_plainly, worst_difference
from tests.models import ZOO, Made

KIND = ZOO["gpt_tied"]
"""Dropout, a tied parameter that is sent on, and two microbatches to an update."""


@cache
def made() -> Made:
    return KIND.make()


@cache
def plain() -> torch.nn.Module:
    return train_plainly(KIND, made())


@cache
def prepared() -> PreparedJob:
    """Captured once for all runs."""
    return prepare(job(), 1, None, lambda phase: None)


def job(**pipeline: Any) -> Job:
    return Job(
        model=made().model,
        loss=made().loss,
        train_data=made().batches,
        optimizer=KIND.optimizer,
        schedule=KIND.schedule,
        pipeline=Pipeline(accumulate=KIND.accumulate, **pipeline),
    )


def train(swarm: EmbeddedSwarm, run: Path, monkeypatch: pytest.MonkeyPatch, **pipeline: Any) -> TrainResult:
    ours = job(**pipeline)
    found = prepared()
    monkeypatch.setattr(session, "prepare", lambda *_: PreparedJob(ours, found.captured, found.costs, found.peeked))
    return swarm.train(ours, providers=3, run=run, display=False)


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("versions", POLICIES)
def test_with_one_in_flight_every_policy_trains_as_a_plain_loop_does(
    swarm: EmbeddedSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: str, split_backward: bool
) -> None:
    result = train(swarm, tmp_path, monkeypatch, in_flight=1, versions=versions, split_backward=split_backward)
    have = copy.deepcopy(made().model)
    have.load_state_dict(load_file(result.run / "model.safetensors"))
    worst, where = worst_difference(have.state_dict(), plain().state_dict())
    assert worst <= 1e-6, f"{where} is off by {worst:.1e}"
    events = {event["kind"]: event for event in read_events(result.run / "events.jsonl")}
    assert events["planned"]["versions"] == events["versions"]["versions"] == versions
    assert events["versions"]["reason"] == f'versions "{versions}", as pipeline.versions says'
    assert events["split_backward"]["stages"] == ([1, 2] if split_backward else [])


@pytest.mark.parametrize(("versions", "in_flight", "max_stale"), [("latest", 4, 2), ("double", 2, 1)])
def test_with_several_in_flight_staleness_is_within_its_bound(
    swarm: EmbeddedSwarm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    versions: str,
    in_flight: int,
    max_stale: int,
) -> None:
    result = train(swarm, tmp_path, monkeypatch, in_flight=in_flight, versions=versions)
    assert result.summary.status == "finished"
    stages = result.summary.clusters[0].stages
    assert all(stage.updates == 10 for stage in stages)
    assert max(stage.staleness.max for stage in stages) <= max_stale
    have = load_file(result.run / "model.safetensors")
    start = made().model.state_dict()
    assert all(bool(tensor.isfinite().all()) for tensor in have.values())
    assert worst_difference({name: have[name] for name in start}, start)[0] > 1e-3, "it has learned nothing"


def test_where_nothing_is_said_everything_is_kept_and_backwards_are_split_where_stages_wait(
    swarm: EmbeddedSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = train(swarm, tmp_path, monkeypatch, in_flight=1)
    events = {event["kind"]: event for event in read_events(result.run / "events.jsonl")}
    assert events["versions"]["versions"] == "stash"
    assert events["split_backward"]["stages"] == [1, 2]
    assert "stages wait for microbatches to come back" in events["split_backward"]["reason"]

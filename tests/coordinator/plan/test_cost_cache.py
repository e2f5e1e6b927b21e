"""What a model costs is measured once in a run directory, and again where it may be another."""

from pathlib import Path

import pytest

from ravnest.coordinator.plan import prepared_job as preparing
from ravnest.coordinator.plan.prepared_job import PreparedJob, prepare
from ravnest.job import Job, Pipeline
from tests.e2e.jobs import a_job


def prepared(job: Job, kept: Path, threads: int | None = 1) -> tuple[PreparedJob, list[str]]:
    phases: list[str] = []
    return prepare(job, threads, None, phases.append, kept=kept), phases


def test_it_is_measured_once(tmp_path: Path) -> None:
    kept = tmp_path / "profile.json"
    first, phases = prepared(a_job(), kept)
    assert phases == ["capturing the model", "profiling the model"]
    again, phases = prepared(a_job(), kept)
    assert phases == ["capturing the model"]
    assert again.costs == first.costs


@pytest.mark.parametrize(
    ("pipeline", "threads"),
    [(Pipeline(), 2), (Pipeline(accumulate=2), 1), (Pipeline(precision="bfloat16"), 1), (Pipeline(compiled=True), 1)],
    ids=["threads", "accumulate", "precision", "compiled"],
)
def test_something_else_is_measured_anew(tmp_path: Path, pipeline: Pipeline, threads: int) -> None:
    kept = tmp_path / "profile.json"
    prepared(a_job(), kept)
    kept_job = a_job(pipeline=pipeline)
    _, phases = prepared(kept_job, kept, threads)
    assert "profiling the model" in phases
    _, phases = prepared(kept_job, kept, threads)
    assert "profiling the model" not in phases


@pytest.mark.parametrize("damaged", ["", "{", "[]", "{}", '{"key": 1}'])
def test_what_nobody_can_read_is_measured_anew_and_replaced(tmp_path: Path, damaged: str) -> None:
    kept = tmp_path / "profile.json"
    first, _ = prepared(a_job(), kept)
    whole = kept.read_text()
    kept.write_text(damaged if damaged != '{"key": 1}' else whole.replace('"samples"', '"simples"'))
    _, phases = prepared(a_job(), kept)
    assert "profiling the model" in phases
    again, phases = prepared(a_job(), kept)
    assert "profiling the model" not in phases and set(again.costs.nodes) == set(first.costs.nodes)


def test_a_disk_that_does_not_take_it_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = prepared(a_job(), tmp_path / "profile.json")[0].costs
    monkeypatch.setattr(preparing, "measure_costs", lambda job, captured: costs)
    assert prepared(a_job(), tmp_path / "nowhere" / "profile.json")[0].costs == costs

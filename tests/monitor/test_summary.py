"""summary.json has exactly the fields of the design page (and a few extra) and reads back the same."""

import json
from pathlib import Path

import pytest

from ravnest.errors import RunError
from ravnest.monitor.run_directory import RunPaths
from ravnest.monitor.summary import (
    AveragingSummary,
    ClusterSummary,
    Fault,
    LinkSummary,
    MicrobatchCounts,
    StageSummary,
    Staleness,
    Summary,
)

CONTRACT = {
    "": "status reason samples epochs seconds samples_per_second predicted_samples_per_second train_loss eval"
    " clusters averaging ledger faults",
    "clusters": "id samples samples_per_second stages",
    "stages": "provider stage role device parameters peak_memory_bytes busy_fraction updates staleness"
    " bytes_sent bytes_received",
    "staleness": "mean p95 max",
    "averaging": "rounds rings seconds_mean bytes skipped",
    "ledger": "fed completed replayed lost applied_twice",
    "faults": "kind provider cluster at recovered_seconds",
}
EXTRA = {
    "": {"started_at", "first_update_seconds", "updates", "model", "standstill", "check", "saved"},
    "clusters": {"in_flight", "in_flight_reason"},
    "stages": {"baseline_memory_bytes", "links"},
}


def a_summary(**changes: object) -> Summary:
    stage = StageSummary(
        provider="p1",
        stage=0,
        role="root",
        device="cpu",
        parameters=10,
        peak_memory_bytes=99,
        busy_fraction=0.5,
        updates=3,
        links=(LinkSummary(to="p2", route="relayed", connections=2, bytes_sent=5, bytes_received=6),),
        staleness=Staleness(mean=1.5, p95=2.0, max=3),
        bytes_sent=1,
        bytes_received=2,
    )
    values: dict[str, object] = {
        "status": "finished",
        "reason": "all epochs done",
        "samples": 100,
        "epochs": 2,
        "seconds": 4.0,
        "samples_per_second": 25.0,
        "train_loss": 0.5,
        "eval": {"loss": 0.4, "accuracy": 0.9},
        "clusters": (ClusterSummary(id=0, samples=100, samples_per_second=25.0, stages=(stage,)),),
        "averaging": AveragingSummary(rounds=1),
        "ledger": MicrobatchCounts(fed=5, completed=5),
        "faults": (Fault(kind="lost", provider="p2", cluster=0, at=1.0, recovered_seconds=0.5),),
    }
    return Summary(**{**values, **changes})  # type: ignore[arg-type]


def test_the_fields_are_those_of_the_design_page(tmp_path: Path) -> None:
    a_summary().write(RunPaths(tmp_path))
    record = json.loads((tmp_path / "summary.json").read_text())
    places = {
        "": record,
        "clusters": record["clusters"][0],
        "stages": record["clusters"][0]["stages"][0],
        "staleness": record["clusters"][0]["stages"][0]["staleness"],
        "averaging": record["averaging"],
        "ledger": record["ledger"],
        "faults": record["faults"][0],
    }
    for name, place in places.items():
        assert place.keys() == set(CONTRACT[name].split()) | EXTRA.get(name, set()), name


def test_a_summary_reads_back_as_it_was(tmp_path: Path) -> None:
    summary = a_summary(model="run/model.safetensors", updates=5)
    summary.write(RunPaths(tmp_path))
    assert Summary.read(tmp_path / "summary.json") == summary


def test_a_summary_of_a_later_version_is_still_read(tmp_path: Path) -> None:
    record = a_summary().to_json()
    record["colour"] = "blue"
    record["clusters"][0]["stages"][0]["wheels"] = 4
    (tmp_path / "summary.json").write_text(json.dumps(record))
    assert Summary.read(tmp_path / "summary.json") == a_summary()


def test_numbers_that_are_not_finite_are_null() -> None:
    record = a_summary(train_loss=float("nan"), eval={"loss": float("inf")}).to_json()
    assert record["train_loss"] is None and record["eval"] == {"loss": None}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"status": "finished", "reason": "", "clusters": [3]}'])
def test_what_is_no_summary_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(RunError, match="is not a summary of a run"):
        Summary.read(tmp_path / "summary.json")


def test_a_missing_summary_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot read"):
        Summary.read(tmp_path / "summary.json")

"""The run directory is a contract: other programs read it."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ravnest import Pipeline
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from tests.e2e.jobs import a_job, a_net, accuracy, batches, every_updates

FIELDS = {
    *("status", "reason", "samples", "epochs", "seconds", "samples_per_second", "predicted_samples_per_second"),
    *("train_loss", "eval", "clusters", "averaging", "ledger", "faults"),
}
FURTHER_FIELDS = {"updates", "started_at", "first_update_seconds", "model", "standstill", "check", "state"}
STAGE_FIELDS = {
    *("provider", "stage", "role", "device", "parameters", "peak_memory_bytes", "busy_fraction", "updates"),
    *("staleness", "bytes_sent", "bytes_received"),
}
FURTHER_STAGE_FIELDS = {"links", "baseline_memory_bytes"}


@pytest.fixture(scope="module")
def run(shared_swarm, tmp_path_factory: pytest.TempPathFactory) -> Path:  # type: ignore[no-untyped-def]
    """Two epochs of eight microbatches on three providers, with an evaluation after each."""
    swarm: EmbeddedSwarm = shared_swarm.healthy()
    job = a_job(
        epochs=2,
        eval_data=batches([8, 3], seed=1),
        metrics={"accuracy": accuracy},
        checkpoint=every_updates(5),
        pipeline=Pipeline(in_flight=2, record_updates=True),
    )
    return swarm.train(job, providers=3, run=tmp_path_factory.mktemp("runs") / "run", display=False).run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_summary_has_the_fields_of_the_contract(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary) == FIELDS | FURTHER_FIELDS
    assert summary["status"] == "finished" and summary["reason"] == "all epochs are done"
    assert (summary["samples"], summary["epochs"], summary["updates"]) == (128, 2.0, 16)
    assert summary["seconds"] > 0 and summary["samples_per_second"] > 0
    assert summary["predicted_samples_per_second"] > 0
    assert 0 < summary["first_update_seconds"] < summary["seconds"]
    assert set(summary["eval"]) == {"loss", "accuracy"}
    assert summary["ledger"] == {"fed": 16, "completed": 16, "replayed": 0, "lost": 0, "applied_twice": 0}
    assert set(summary["averaging"]) == {"rounds", "rings", "seconds_mean", "bytes", "skipped"}
    assert summary["faults"] == []
    [cluster] = summary["clusters"]
    assert set(cluster) == {"id", "samples", "samples_per_second", "stages", "in_flight", "in_flight_reason", "limit"}
    assert cluster["in_flight"] == 2
    assert [stage["role"] for stage in cluster["stages"]] == ["root", "stem", "leaf"]
    for number, stage in enumerate(cluster["stages"]):
        assert set(stage) == STAGE_FIELDS | FURTHER_STAGE_FIELDS
        assert (stage["stage"], stage["updates"]) == (number, 16)
        assert set(stage["staleness"]) == {"mean", "p95", "max"}
        assert 0 < stage["busy_fraction"] <= 1
        assert stage["peak_memory_bytes"] > 0 and stage["bytes_sent"] > 0 and stage["bytes_received"] > 0
    assert sum(stage["parameters"] for stage in cluster["stages"]) == sum(p.numel() for p in a_net().parameters())


def test_every_event_has_its_reason(run: Path) -> None:
    events = lines(run / "events.jsonl")
    assert all(event["kind"] and event["reason"] and event["at"] for event in events)
    kinds = [event["kind"] for event in events]
    assert kinds[0] == "started" and kinds[-1] == "finished"
    assert kinds.count("joined") >= 3
    for kind in ("captured", "planned", "in_flight", "deployed", "first_update", "epoch", "evaluated"):
        assert kind in kinds
    saved = [event["updates"] for event in events if event["kind"] == "checkpoint"]
    # One may be begun early, so that even while it is written no more than five updates can be lost.
    assert saved[-1] == 16
    assert all(0 < after - before <= 5 for before, after in itertools.pairwise([0, *saved]))


def test_the_curves_have_a_point_for_every_microbatch_and_evaluation(run: Path) -> None:
    metrics = lines(run / "metrics.jsonl")
    train = [metric for metric in metrics if metric["kind"] == "train"]
    assert [(metric["updates"], metric["samples"]) for metric in train] == [(i, 8 * i) for i in range(1, 17)]
    assert all(isinstance(metric["loss"], float) for metric in train)
    evaluations = [metric for metric in metrics if metric["kind"] == "eval"]
    assert [metric["samples"] for metric in evaluations] == [64, 128]
    assert all(0 <= metric["accuracy"] <= 1 for metric in evaluations)  # type: ignore[operator]


def test_tensorboard_reads_the_same_curves(run: Path) -> None:
    [folder] = {path.parent for path in run.rglob("events.out.tfevents.*")}
    reader = EventAccumulator(str(folder))
    reader.Reload()
    stages = {f"stage/0 {stage}/{name}" for stage in range(3) for name in ("staleness", "staleness_max")}
    assert set(reader.Tags()["scalars"]) == {"train/loss", "eval/loss", "eval/accuracy", *stages}
    written = [metric["loss"] for metric in lines(run / "metrics.jsonl") if metric["kind"] == "train"]
    assert [point.value for point in reader.Scalars("train/loss")] == pytest.approx(written)
    assert [point.step for point in reader.Scalars("eval/loss")] == [64, 128]


def test_the_model_loads_into_the_users_own_class(run: Path) -> None:
    model = a_net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(load_file(run / "model.safetensors"))
    assert all(not (before[name] == value).all() for name, value in model.state_dict().items())


def test_no_more_checkpoints_are_kept_than_asked_for(run: Path) -> None:
    saved = [event["updates"] for event in lines(run / "events.jsonl") if event["kind"] == "checkpoint"]
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == [f"{updates:010}" for updates in saved[-2:]]


def test_recorded_updates_tell_the_staleness_of_each(run: Path) -> None:
    updates = lines(run / "updates.jsonl")
    for stage in range(3):
        own = [update for update in updates if update["stage"] == stage]
        assert [update["version"] for update in own] == list(range(1, 17))
        assert [update["microbatch"] for update in own] == list(range(16))


def test_nothing_unknown_lies_in_the_run_directory(run: Path) -> None:
    known = {
        "summary.json",
        "events.jsonl",
        "metrics.jsonl",
        "updates.jsonl",
        "trace.json",
        "model.safetensors",
        "profile.json",
        "static.safetensors",
    }
    assert {path.name for path in run.iterdir()} == known | {"checkpoints", "tensorboard", "lock"}

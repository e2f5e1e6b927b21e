"""The curves land in metrics.jsonl and in TensorBoard, and TensorBoard can never cost a run."""

import json
import sys
from pathlib import Path

import pytest

from ravnest.monitor.metrics import MetricLog, read_metrics


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found: dict[str, list[tuple[int, float]]] = {}
    for path in folder.iterdir():
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_what_is_written_is_in_both_places_after_close(tmp_path: Path) -> None:
    warnings: list[str] = []
    log = MetricLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", warnings.append)
    log.write("train", samples=64, updates=1, values={"loss": 2.5})
    log.write("train", samples=128, updates=2, values={"loss": 1.5})
    log.write("eval", samples=128, updates=2, values={"loss": 1.0, "accuracy": 0.5})
    log.write("stage", samples=128, updates=2, values={"busy_fraction": 0.75}, stage=1, provider="p2")
    log.close()
    log.close()
    assert warnings == []
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [(line["kind"], line["samples"], line["updates"]) for line in lines] == [
        ("train", 64, 1),
        ("train", 128, 2),
        ("eval", 128, 2),
        ("stage", 128, 2),
    ]
    assert lines[2]["loss"] == 1.0 and lines[2]["accuracy"] == 0.5
    assert lines[3]["stage"] == 1 and lines[3]["provider"] == "p2" and lines[3]["busy_fraction"] == 0.75
    assert scalars(tmp_path / "tensorboard") == {
        "train/loss": [(64, 2.5), (128, 1.5)],
        "eval/loss": [(128, 1.0)],
        "eval/accuracy": [(128, 0.5)],
        "stage/1 p2/busy_fraction": [(128, 0.75)],
    }


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    log = MetricLog(tmp_path / "metrics.jsonl")
    log.write("train", samples=1, updates=1, values={"loss": float("nan"), "norm": float("inf")})
    log.close()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["loss"] is None and line["norm"] is None


def test_a_metric_cannot_overwrite_the_records_own_fields(tmp_path: Path) -> None:
    log = MetricLog(tmp_path / "metrics.jsonl")
    log.write("eval", samples=10, updates=1, values={"samples": 0.5})
    log.close()
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line["samples"] == 10 and line["samples_"] == 0.5


def test_without_tensorboard_there_is_a_warning_and_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    warnings: list[str] = []
    log = MetricLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", warnings.append)
    log.write("train", samples=64, updates=1, values={"loss": 2.5})
    log.close()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    (warning,) = warnings
    assert warning.startswith("no TensorBoard curves in")


def test_a_place_tensorboard_cannot_write_to_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").touch()
    warnings: list[str] = []
    log = MetricLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", warnings.append)
    log.write("train", samples=64, updates=1, values={"loss": 2.5})
    log.close()
    assert len(warnings) == 1

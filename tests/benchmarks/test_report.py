"""Every benchmark ends the same way: a table, a file that programs read, and an exit code."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.report import Target, finish

ROWS = [{"case": "a small net", "ratio": 0.5}, {"case": "a large net", "seconds": 3.25}]


def given(json_file: Path | None = None, record: bool = False) -> Namespace:
    return Namespace(quick=False, json=json_file, record=record)


def test_the_file_holds_what_the_contract_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    assert finish("overhead", given(path), ROWS, [Target("ratio", 0.5, 0.25)]) == 0
    result = json.loads(path.read_text())
    assert result["benchmark"] == "overhead" and result["commit"] and result["machine"]["cores"] >= 1
    assert result["rows"] == ROWS
    assert result["targets"] == [{"name": "ratio, at least", "value": 0.5, "target": 0.25, "met": True}]
    shown = capsys.readouterr().out
    assert "a small net" in shown and "a large net" in shown and "yes" in shown


def test_a_curve_is_in_the_file_and_not_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    finish("quality", given(path), [{"case": "a net", "curve": [[1, 2.5], [2, 1.5]]}], [])
    assert json.loads(path.read_text())["rows"][0]["curve"] == [[1, 2.5], [2, 1.5]]
    assert "curve" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "code"),
    [
        (Target("ratio", 0.25, 0.25), 0),
        (Target("ratio", 0.2, 0.25), 1),
        (Target("seconds", 12.0, 12.0, at_most=True), 0),
        (Target("seconds", 12.1, 12.0, at_most=True), 1),
    ],
)
def test_a_missed_target_is_an_exit_code_of_one(target: Target, code: int) -> None:
    assert finish("overhead", given(), ROWS, [Target("fine", 1, 0), target]) == code


def test_each_recorded_result_is_a_file_of_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "HISTORY", tmp_path)
    for _ in range(2):
        finish("overhead", given(record=True), ROWS, [Target("ratio", 0.5, 0.25)])
    texts = [path.read_text() for path in tmp_path.glob("*-overhead.md")]
    assert len(texts) == 2
    assert all("| a small net | 0.5 |" in text and "commit" in text for text in texts)

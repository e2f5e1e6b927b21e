"""The trace of a real run: what each stage did, on one axis, and the page that shows it."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ravnest import Averaging, Pipeline
from ravnest.cli.main import main
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.monitor.trace import Trace
from tests.e2e.jobs import a_job, batches

MICROBATCHES = 40


@pytest.fixture(scope="module")
def run(shared_swarm, tmp_path_factory: pytest.TempPathFactory) -> Path:  # type: ignore[no-untyped-def]
    """Two stages, all of whose microbatches are traced, with an evaluation after each of two epochs."""
    swarm: EmbeddedSwarm = shared_swarm.healthy()
    job = a_job(
        batches([8] * (MICROBATCHES // 2)),
        epochs=2,
        eval_data=batches([8, 3], seed=1),
        pipeline=Pipeline(in_flight=3, trace=2 * MICROBATCHES),
    )
    return swarm.train(job, providers=2, run=tmp_path_factory.mktemp("runs") / "run", display=False).run


def events(run: Path) -> list[dict[str, Any]]:
    record = json.loads((run / "trace.json").read_text())
    return [event for event in record["traceEvents"] if event["ph"] == "X"]


def test_no_two_pieces_of_work_of_a_row_overlap(run: Path) -> None:
    rows: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events(run):
        rows[event["pid"], event["tid"]].append(event)
    assert (0, 0) in rows and (0, 10) in rows
    for row in rows.values():
        for before, behind in pairwise(row):
            assert round(1000 * (before["ts"] + before["dur"])) <= round(1000 * behind["ts"])


def test_every_microbatch_goes_forward_then_back_and_is_applied_in_every_stage(run: Path) -> None:
    found: dict[tuple[int, int], dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in events(run):
        if event["cat"] == "compute" and event["name"] != "wait" and event["args"]["microbatch"] >= 0:
            found[event["tid"] // 10, event["args"]["microbatch"]].setdefault(event["name"], event)
    assert found.keys() == {(stage, number) for stage in (0, 1) for number in range(MICROBATCHES)}
    for kinds in found.values():
        ends = [kinds[kind]["ts"] + kinds[kind]["dur"] for kind in ("forward", "backward", "update")]
        assert ends[0] <= kinds["backward"]["ts"] + 1e-3 and ends[1] <= kinds["update"]["ts"] + 1e-3


def test_what_one_stage_puts_out_arrives_at_the_other_afterwards(run: Path) -> None:
    when: dict[tuple[int, str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for event in events(run):
        key = (event["tid"] // 10, event["name"], event["args"].get("detail", ""))
        when[key][event["args"]["microbatch"]] = event
    for sender, receiver, direction in ((0, 1, "forward"), (1, 0, "backward")):
        made, sent = when[sender, direction, ""], when[sender, "send", direction]
        arrived = when[receiver, "receive", direction]
        for number in range(MICROBATCHES):
            left = made[number]["ts"] + made[number]["dur"]
            assert left <= arrived[number]["ts"] + 1e-3
            assert left <= sent[number]["ts"] + 1e-3


def test_waits_and_evaluations_are_in_it(run: Path) -> None:
    kinds = {(event["name"], event["args"].get("detail")) for event in events(run)}
    assert ("evaluate", None) in kinds and ("wait", "nothing ready") in kinds
    leaf = [event for event in events(run) if event["tid"] == 10]
    assert {event["name"] for event in leaf} >= {"forward", "backward", "update", "wait", "evaluate"}


def test_the_report_has_the_picture(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    page = out.read_text()
    assert '<svg class="gantt"' in page and "in steady state" in page
    for what in ("stage 0: forward, microbatch", "stage 1: backward, microbatch", "stage 1: forward arrives"):
        assert what in page, what


def test_a_resumed_run_keeps_its_trace_and_a_run_without_one_says_so(
    swarm: EmbeddedSwarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    data = batches([8] * 6)
    swarm.train(a_job(data, max_updates=4), providers=2, run=path, display=False)
    swarm.train(a_job(data, max_updates=6), providers=1, run=path, resume=True, display=False)
    sessions = Trace.read(path / "trace.json").sessions
    assert [len(session) for session in sessions] == [2, 1]
    numbers = [{s.microbatch for stage in session for s in stage.spans if s.kind == "update"} for session in sessions]
    assert numbers == [{0, 1, 2, 3}, {4, 5}]
    swarm.train(a_job(data, pipeline=Pipeline(trace=0)), providers=1, run=tmp_path / "other", display=False)
    assert not (tmp_path / "other" / "trace.json").exists()
    assert main(["report", str(tmp_path / "other")]) == 0
    assert "has no trace" in capsys.readouterr().out
    assert "This run has no trace" in (tmp_path / "other" / "report.html").read_text()


def test_each_of_several_clusters_has_its_rows(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    job = a_job(batches([8] * 40), averaging=Averaging(every=64), pipeline=Pipeline())
    run = swarm.train(job, providers=4, clusters=2, run=tmp_path / "run", display=False).run
    (stages,) = Trace.read(run / "trace.json").sessions
    assert sorted((stage.cluster, stage.stage) for stage in stages) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    trained = [{s.microbatch for s in stage.spans if s.kind == "update"} for stage in stages]
    assert trained[0] == trained[1] and trained[2] == trained[3]
    assert trained[0] | trained[2] == set(range(40)) and not trained[0] & trained[2]
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").read_text().count('<svg class="gantt"') == 2

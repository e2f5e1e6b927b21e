"""What stages say of when they did what becomes one trace, whatever their clocks show and whatever else they say."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from ravnest.coordinator.report import trace_collector as module
from ravnest.coordinator.report.trace_collector import Tracing
from ravnest.monitor.trace import Trace, TraceStage
from ravnest.net.v1.control_pb2 import Report, Span
from ravnest.planner.plan import StagePlan
from tests.builders import stage_plan

GRAPH: Any = None


def plans(stages: int = 2, clusters: int = 1) -> list[StagePlan]:
    return [
        stage_plan(f"p{cluster}-{number}", number, GRAPH, role="root", cluster=cluster)
        for cluster in range(clusters)
        for number in range(stages)
    ]


def span(kind: str, microbatch: int, began: float, seconds: float = 0.01, detail: str = "") -> Span:
    return Span(kind=kind, microbatch=microbatch, began_seconds=began, seconds=seconds, detail=detail)


def of(tracing: Tracing, node: str) -> TraceStage:
    return next(stage for stage in tracing.stages() if stage.provider == node)


def an_update(number: int, began: float = 1.0) -> Span:
    return span("update", number, began + number)


@pytest.mark.parametrize(
    "bad",
    [
        span("theft", 0, 1.0),
        span("forward", 0, math.nan),
        span("forward", 0, math.inf),
        span("forward", 0, -1.0),
        span("forward", 0, 1.0, -1.0),
        span("forward", 0, 1.0, math.nan),
        span("forward", 0, 1.0, 1e9),
        span("forward", 0, 1e9),
        span("forward", 2**60, 1.0),
        span("forward", 0, 1.0, detail="limit"),
        span("wait", 0, 1.0, detail="<script>"),
        span("send", 0, 1.0, detail="sideways"),
        span("send", 0, 1.0),
    ],
)
def test_a_span_that_cannot_be_is_left_out(tmp_path: Path, bad: Span) -> None:
    tracing = Tracing(tmp_path / "trace.json", 20, plans())
    tracing.take("p0-0", Report(seconds=5.0, spans=[span("forward", 0, 1.0), bad]))
    assert [(each.kind, each.microbatch) for each in of(tracing, "p0-0").spans] == [("forward", 0)]


def test_one_who_holds_no_stage_says_nothing(tmp_path: Path) -> None:
    tracing = Tracing(tmp_path / "trace.json", 20, plans())
    tracing.take("stranger", Report(seconds=5.0, spans=[span("forward", 0, 1.0)]))
    assert not any(stage.spans for stage in tracing.stages())
    tracing.write()
    assert not (tmp_path / "trace.json").exists()


def test_no_stage_fills_the_trace_on_its_own(tmp_path: Path) -> None:
    tracing = Tracing(tmp_path / "trace.json", 20, plans())
    for _ in range(50):
        tracing.take("p0-0", Report(seconds=5.0, spans=[span("forward", 0, 1.0)] * 2000))
    assert len(of(tracing, "p0-0").spans) <= 10 * 16


def test_many_stages_share_what_a_file_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SPANS", 1000)
    tracing = Tracing(tmp_path / "trace.json", 10**6, plans(10))
    for plan in plans(10):
        tracing.take(plan.node, Report(seconds=5.0, spans=[span("forward", n, 1.0) for n in range(2000)]))
    assert sum(len(stage.spans) for stage in tracing.stages()) <= 1000


def test_the_beginning_stays_and_the_latest_window_replaces_those_before_it(tmp_path: Path) -> None:
    tracing = Tracing(tmp_path / "trace.json", 20, plans(1))

    def numbers() -> set[int]:
        return {each.microbatch for each in of(tracing, "p0-0").spans}

    for window in (range(10), range(20, 30), range(40, 50), range(80, 90)):
        tracing.take("p0-0", Report(seconds=5.0, spans=[span("update", number, 1.0) for number in window]))
        assert numbers() == set(range(10)) | set(window)
    tracing.take("p0-0", Report(seconds=5.0, spans=[span("update", number, 1.0) for number in range(160, 163)]))
    # Of the latest there is not enough yet.
    assert numbers() == set(range(10)) | set(range(80, 90))


def traffic(ahead: float, way: float = 0.05) -> tuple[list[Span], list[Span]]:
    """What two stages tell of ten microbatches; the second one's clock is so far ahead."""
    root, leaf = [], []
    for number in range(10):
        at = 1.0 + number
        root += [span("forward", number, at, 0.1), span("send", number, at + 0.1, 0.01, "forward")]
        arrives = at + 0.1 + way
        leaf += [span("receive", number, arrives + ahead, 0.001, "forward")]
        leaf += [span("forward", number, arrives + 0.001 + ahead, 0.1)]
        leaf += [span("send", number, arrives + 0.2 + ahead, 0.01, "backward")]
        root += [span("receive", number, arrives + 0.2 + way, 0.001, "backward")]
    return root, leaf


@pytest.mark.parametrize("ahead", [0.0, 3.0, 31.0, -0.4])
def test_stages_whose_clocks_differ_are_put_on_one_axis(tmp_path: Path, ahead: float) -> None:
    tracing = Tracing(tmp_path / "trace.json", 20, plans())
    root, leaf = traffic(ahead)
    tracing.take("p0-0", Report(seconds=12.0, spans=root))
    tracing.take("p0-1", Report(seconds=12.0, spans=leaf))
    sent = {s.microbatch: s.began for s in of(tracing, "p0-0").spans if s.kind == "send"}
    came = {s.microbatch: s.began for s in of(tracing, "p0-1").spans if s.kind == "receive"}
    assert [came[number] - sent[number] for number in range(10)] == pytest.approx([0.05] * 10)


def test_a_window_much_later_is_aligned_for_itself_because_clocks_drift(tmp_path: Path) -> None:
    tracing = Tracing(tmp_path / "trace.json", 20, plans())
    for first, ahead in ((0, 1.0), (20, 1.5)):
        for node, spans in zip(("p0-0", "p0-1"), traffic(ahead), strict=True):
            moved = [span(s.kind, s.microbatch + first, s.began_seconds + first, s.seconds, s.detail) for s in spans]
            tracing.take(node, Report(seconds=35.0, spans=[*moved, *(an_update(first + n) for n in range(10))]))
    sent = {s.microbatch: s.began for s in of(tracing, "p0-0").spans if s.kind == "send"}
    came = {s.microbatch: s.began for s in of(tracing, "p0-1").spans if s.kind == "receive"}
    assert len(came) == 20
    assert [came[number] - sent[number] for number in sorted(came)] == pytest.approx([0.05] * 20)


def test_what_was_traced_before_a_resume_stays_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for first in (0, 50):
        tracing = Tracing(path, 20, plans())
        for node, spans in zip(("p0-0", "p0-1"), traffic(0.0), strict=True):
            for each in spans:
                each.microbatch += first
            tracing.take(node, Report(seconds=12.0, spans=spans))
        tracing.write()
    sessions = Trace.read(path).sessions
    assert [min(s.microbatch for s in session[0].spans) for session in sessions] == [0, 50]


def test_a_damaged_trace_of_before_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('{"traceEvents": [')
    tracing = Tracing(tmp_path / "trace.json", 20, plans())
    tracing.take("p0-0", Report(seconds=5.0, spans=[span("forward", 0, 1.0)]))
    tracing.write()
    assert len(Trace.read(tmp_path / "trace.json").sessions) == 1


def test_clusters_do_not_disturb_one_another(tmp_path: Path) -> None:
    tracing = Tracing(tmp_path / "trace.json", 20, plans(2, clusters=2))
    for cluster, (node, spans) in itertools.product((0, 1), zip((0, 1), traffic(2.0), strict=True)):
        tracing.take(f"p{cluster}-{node}", Report(seconds=12.0, spans=spans))
    tracing.write()
    (session,) = Trace.read(tmp_path / "trace.json").sessions
    assert [(stage.cluster, stage.stage) for stage in session] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(len(stage.spans) >= 30 for stage in session)


def test_it_is_written_again_only_after_a_while(tmp_path: Path) -> None:
    now = 0.0
    tracing = Tracing(tmp_path / "trace.json", 20, plans(), clock=lambda: now)
    tracing.take("p0-0", Report(seconds=5.0, spans=[span("forward", 0, 1.0)]))
    assert not tracing.due
    now = 1000.0
    assert tracing.due
    tracing.write()
    assert not tracing.due

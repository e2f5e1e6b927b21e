"""trace.json is a trace that other programs open, and reads back as it was written."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.errors import RunError
from ravnest.monitor import trace as module
from ravnest.monitor.trace import Trace, TraceSpan, TraceStage, after, in_rows
from tests.monitor.pipelines import pipeline


def test_a_trace_reads_back_as_it_was_written(tmp_path: Path) -> None:
    written = Trace((tuple(pipeline(3, 10)),))
    written.write(tmp_path / "trace.json")
    read = Trace.read(tmp_path / "trace.json")
    assert [stage.provider for stage in read.sessions[0]] == ["provider-0", "provider-1", "provider-2"]
    for before, behind in zip(written.sessions[0], read.sessions[0], strict=True):
        assert replace(before, spans=()) == replace(behind, spans=())
        key = [(span.kind, span.microbatch, span.detail) for rows in in_rows(before.spans).values() for span in rows]
        assert [(span.kind, span.microbatch, span.detail) for span in behind.spans] == key
        assert sum(s.ended - s.began for s in behind.spans) == pytest.approx(
            sum(s.ended - s.began for s in before.spans)
        )


def test_events_have_what_the_format_asks_for() -> None:
    record = Trace((tuple(pipeline(2, 5)),)).to_json()
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in record["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert named[0, 0] == "stage 0 root, provider-0" and named[0, 1] == "stage 0 send forward"
    for event in record["traceEvents"]:
        assert event["ph"] in ("M", "X") and isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= -1e9 and (event["pid"], event["tid"]) in named


spans = st.builds(
    lambda began, length, kind, number: TraceSpan(kind, number, began, began + length),
    st.floats(0, 10),
    st.floats(0, 5),
    st.sampled_from(("forward", "backward", "wait")),
    st.integers(0, 9),
)


@given(st.lists(spans, max_size=30))
def test_nothing_overlaps_in_a_row_whatever_a_stage_says(said: list[TraceSpan]) -> None:
    row = in_rows(said)["compute"]
    assert all(before.ended <= behind.began for before, behind in itertools.pairwise(row))
    # To the nanosecond in the file, too.
    events = [e for e in Trace(((TraceStage(0, 0, "root", "p", tuple(said)),),)).to_json()["traceEvents"]]
    times = [(event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert all(
        round(1000 * (began + length)) <= round(1000 * then) for (began, length), (then, _) in itertools.pairwise(times)
    )


def test_what_was_sent_together_shares_its_time() -> None:
    said = [TraceSpan("send", number, 1.0, 2.0, "forward") for number in range(4)]
    row = in_rows(said)["send forward"]
    assert [(span.microbatch, span.began, span.ended) for span in row] == [
        (number, 1 + number / 4, 1.25 + number / 4) for number in range(4)
    ]
    said = [TraceSpan("send", number, 1.0 + number / 10, 2.0 + number * 1e-10, "forward") for number in range(3)]
    row = in_rows(said)["send forward"]
    assert [(span.microbatch, span.began) for span in row] == [(0, 1.0), (1, 1.1), (2, 1.2)]
    assert [span.ended for span in row] == pytest.approx([1.1, 1.2, 2.0])


def test_a_resumed_run_keeps_what_was_traced_before_and_goes_on_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    after(Trace(), pipeline(2, 10)).write(path)
    both = after(Trace.read(path), pipeline(2, 10, first=40))
    both.write(path)
    read = Trace.read(path)
    assert len(read.sessions) == 2
    ends = max(span.ended for stage in read.sessions[0] for span in stage.spans)
    assert min(span.began for stage in read.sessions[1] for span in stage.spans if span.kind != "receive") > ends
    assert {span.microbatch for span in read.sessions[1][0].spans} == set(range(40, 50))
    names = [event["args"]["name"] for event in read.to_json()["traceEvents"] if event["name"] == "process_name"]
    assert names == ["cluster 0", "cluster 0, session 2"]


def test_the_oldest_sessions_give_way_where_a_file_would_grow_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    one = pipeline(2, 10)
    size = sum(len(stage.spans) for stage in one)
    monkeypatch.setattr(module, "MAX_SPANS", 3 * size)
    trace = Trace()
    for session in range(6):
        trace = after(trace, pipeline(2, 10, first=100 * session))
    assert [session[0].spans[0].microbatch for session in trace.sessions] == [300, 400, 500]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"traceEvents":[3]}',
        '{"traceEvents":[{"ph":"X","name":"forward","pid":0,"tid":0,"ts":"now","dur":1,"args":{"microbatch":1}}]}',
        '{"traceEvents":[{"ph":"X","name":"forward","pid":0,"tid":0,"ts":0,"dur":1e308,"args":{"microbatch":1}}]}',
        '{"traceEvents":[{"ph":"X","name":"theft","pid":0,"tid":0,"ts":0,"dur":1,"args":{"microbatch":1}}]}',
        '{"traceEvents":[{"ph":"X","name":"forward","pid":0,"tid":0,"ts":0,"dur":-1,"args":{"microbatch":1}}]}',
        '{"traceEvents":[{"ph":"X","name":"forward","pid":0.5,"tid":0,"ts":0,"dur":1,"args":{"microbatch":1}}]}',
    ],
)
def test_what_is_not_a_trace_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(RunError, match=r"trace.json is not a trace of a run"):
        Trace.read(tmp_path / "trace.json")


def test_the_file_is_one_json_value(tmp_path: Path) -> None:
    Trace((tuple(pipeline(2, 3)),)).write(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["displayTimeUnit"] == "ms"

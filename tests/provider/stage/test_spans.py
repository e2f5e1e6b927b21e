"""Spans that a provider records of its stage: of the same microbatches everywhere, within limits, in order."""

import time
from typing import Any

import pytest

from ravnest.engine.telemetry.spans import WAIT_LIMIT, Span
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.provider.stage.spans import SPANS_A_REPORT, SpanRecorder


def worked(recorder: SpanRecorder, numbers: range, kind: str = "forward") -> None:
    for number in numbers:
        recorder.worked(Span(kind, number, 1.0, 2.0))


def taken(recorder: SpanRecorder) -> list[int]:
    found: list[int] = []
    while spans := recorder.take(0.0):
        found += [span.microbatch for span in spans]
    return found


class Link:
    """As much of a link as the recorder knows."""

    def __init__(self) -> None:
        self.frames_sent = 0
        self.on_written: Any = None


def test_the_beginning_is_recorded_and_windows_of_what_follows() -> None:
    recorder = SpanRecorder(20)
    worked(recorder, range(100))
    assert taken(recorder) == [*range(10), *range(20, 30), *range(40, 50), *range(80, 90)]


def test_a_resumed_run_counts_from_its_own_first_microbatch() -> None:
    recorder = SpanRecorder(20)
    worked(recorder, range(1000, 1100))
    assert taken(recorder)[:10] == list(range(1000, 1010))


def test_nothing_is_recorded_where_no_trace_is_wanted() -> None:
    recorder, link = SpanRecorder(0), Link()
    recorder.watch(link)  # type: ignore[arg-type]
    worked(recorder, range(100))
    recorder.put_out("forward", 3)
    recorder.handed_over(link, Frame(FrameKind.FORWARD, 3))  # type: ignore[arg-type]
    recorder.received(Frame(FrameKind.BACKWARD, 3), time.perf_counter())
    assert link.on_written is None and recorder.take(0.0) == []


def test_times_count_from_when_the_stage_began() -> None:
    recorder = SpanRecorder(20)
    recorder.worked(Span("wait", 0, 102.0, 102.5, WAIT_LIMIT))
    (span,) = recorder.take(100.0)
    assert (span.kind, span.began_seconds, span.seconds, span.detail) == ("wait", 2.0, 0.5, "limit")


def test_a_report_takes_a_limited_number_and_the_newest_spans_are_dropped() -> None:
    recorder = SpanRecorder(10**9, max_waiting=2 * SPANS_A_REPORT + 10)
    worked(recorder, range(10 * SPANS_A_REPORT))
    sizes = [len(recorder.take(0.0)) for _ in range(4)]
    assert sizes == [SPANS_A_REPORT, SPANS_A_REPORT, 10, 0]


def test_a_send_lasts_from_when_the_line_was_free_until_its_bytes_are_written() -> None:
    recorder, link = SpanRecorder(20), Link()
    recorder.watch(link)  # type: ignore[arg-type]
    for number in range(2):
        recorder.put_out("forward", number)
    for number in range(2):
        link.frames_sent += 1
        recorder.handed_over(link, Frame(FrameKind.FORWARD, number))  # type: ignore[arg-type]
    before = time.perf_counter()
    link.on_written([0])
    link.on_written([1])
    link.on_written([1])
    first, second = recorder.take(0.0)
    assert (first.kind, first.detail, first.microbatch) == ("send", "forward", 0)
    assert first.began_seconds < before <= first.began_seconds + first.seconds
    assert second.microbatch == 1
    assert second.began_seconds == pytest.approx(first.began_seconds + first.seconds)


def test_frames_that_are_written_together_were_sent_together() -> None:
    recorder, link = SpanRecorder(20), Link()
    recorder.watch(link)  # type: ignore[arg-type]
    link.on_written([])
    for number in range(2):
        recorder.put_out("backward", number)
        link.frames_sent += 1
        recorder.handed_over(link, Frame(FrameKind.BACKWARD, number))  # type: ignore[arg-type]
    last = time.perf_counter()
    link.on_written([0, 1])
    assert all(span.began_seconds < last <= span.began_seconds + span.seconds for span in recorder.take(0.0))


def test_an_arrival_is_recorded_with_its_direction() -> None:
    recorder = SpanRecorder(20)
    recorder.received(Frame(FrameKind.FORWARD, 0), time.perf_counter())
    recorder.received(Frame(FrameKind.BACKWARD, 0), time.perf_counter())
    assert [(span.kind, span.detail) for span in recorder.take(0.0)] == [
        ("receive", "forward"),
        ("receive", "backward"),
    ]


def test_an_evaluation_is_recorded_where_the_training_before_it_was() -> None:
    recorder = SpanRecorder(20)
    worked(recorder, range(5))
    worked(recorder, range(-1, -200, -1), "evaluate")
    worked(recorder, range(5, 15))
    worked(recorder, range(-200, -300, -1), "evaluate")
    found = taken(recorder)
    assert [number for number in found if number >= 0] == list(range(10))
    assert [number for number in found if number < 0] == list(range(-1, -51, -1))

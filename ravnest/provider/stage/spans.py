"""What a stage and its links did when, of the microbatches that are traced: the spans of a run's trace.

What is recorded waits for the next report, which takes so many of them along; nobody is woken for a span. Where more
come than reports take away, the newest are left out.
"""

import time
from collections import deque
from typing import Final

from ravnest.engine.telemetry.spans import Span
from ravnest.engine.telemetry.trace_windows import window_of, window_size
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.net.v1 import control_pb2

SPANS_A_REPORT: Final = 2000
"""Some 70 kB: a report is not to hold up what else the line to the coordinator carries."""

_MAX_WAITING: Final = 20_000
_MAX_EVALUATIONS: Final = 50
"""Microbatches of one evaluation."""
_MAX_BEING_SENT: Final = 1000

_DIRECTIONS: Final = {FrameKind.FORWARD: "forward", FrameKind.BACKWARD: "backward"}


class SpanRecorder:
    """Records spans of up to about so many microbatches; of none with 0.

    `worked` and `put_out` belong to the engine's thread, everything else to the network's loop.
    """

    def __init__(self, microbatches: int) -> None:
        self._size = window_size(microbatches)
        self._first: int | None = None
        """The number of the first microbatch of training that came: the same at every stage of a cluster."""
        self._waiting: deque[Span] = deque()
        self._put_out: dict[tuple[str, int], float] = {}
        """When the engine's thread put out what is not handed to a link yet."""
        self._links: dict[ResumableLink, _LinkSpans] = {}
        self._worked_on = -1
        self._trains_traced = False
        self._evaluating: int | None = None
        """The first microbatch of the evaluation under way, if it is traced."""

    def worked(self, span: Span) -> None:
        """The engine has done something, or waited."""
        if not self._size:
            return
        number = span.microbatch
        if number >= 0:
            if number != self._worked_on:
                self._worked_on, self._evaluating = number, None
                self._trains_traced = self._is_traced(number)
            if self._trains_traced:
                self._add(span)
        else:
            self._worked_on = number
            if self._evaluating is None and self._trains_traced:
                self._evaluating = number
            if self._is_traced(number):
                self._add(span)

    def put_out(self, direction: str, microbatch: int) -> None:
        """The engine has activations or gradients for a neighbour."""
        if self._size and self._is_traced(microbatch) and len(self._put_out) < _MAX_BEING_SENT:
            self._put_out[direction, microbatch] = time.perf_counter()

    def watch(self, link: ResumableLink) -> None:
        """Records when the link has written what is handed over to it. Before it has a connection."""
        if self._size:
            found = self._links[link] = _LinkSpans()
            link.on_written = lambda numbers: self._written(found, numbers)

    def forget(self, link: ResumableLink) -> None:
        """The link is over: what it has not written it will not write."""
        self._links.pop(link, None)

    def handed_over(self, link: ResumableLink, frame: Frame) -> None:
        """A link has taken this frame, as the last so far."""
        direction = _DIRECTIONS.get(frame.kind)
        if not self._size or direction is None:
            return
        since = self._put_out.pop((direction, frame.microbatch), None)
        found = self._links.get(link)
        if since is not None and found is not None and len(found.being_sent) < _MAX_BEING_SENT:
            found.being_sent[link.frames_sent - 1] = Span("send", frame.microbatch, since, since, direction)

    def received(self, frame: Frame, arrived: float) -> None:
        """The engine has a frame that arrived then."""
        direction = _DIRECTIONS.get(frame.kind)
        if self._size and direction is not None and self._is_traced(frame.microbatch):
            self._add(Span("receive", frame.microbatch, arrived, time.perf_counter(), direction))

    def take(self, since: float) -> list[control_pb2.Span]:
        """What was recorded since the last call, the oldest first and no more than a report should carry; seconds are
        counted from `since`."""
        taken: list[control_pb2.Span] = []
        while self._waiting and len(taken) < SPANS_A_REPORT:
            span = self._waiting.popleft()
            taken.append(
                control_pb2.Span(
                    kind=span.kind,
                    microbatch=span.microbatch,
                    began_seconds=span.began - since,
                    seconds=span.ended - span.began,
                    detail=span.detail,
                )
            )
        return taken

    def _is_traced(self, microbatch: int) -> bool:
        if microbatch < 0:
            first = self._evaluating
            return first is not None and first - _MAX_EVALUATIONS < microbatch <= first
        if self._first is None:
            self._first = microbatch
        return window_of(microbatch - self._first, self._size) is not None

    def _written(self, link: "_LinkSpans", numbers: list[int]) -> None:
        now = time.perf_counter()
        for number in numbers:
            span = link.being_sent.pop(number, None)
            if span is not None:
                # A link sends one after the other: until the one before was written, this one waited. Those that are
                # written together began together, too: one may have arrived before this end knows that it has left.
                began = min(max(span.began, link.last_written), now)
                self._add(Span(span.kind, span.microbatch, began, now, span.detail))
        link.last_written = now

    def _add(self, span: Span) -> None:
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append(span)


class _LinkSpans:
    """What a link has not written yet, by the number of its frame, and when it has written something last."""

    def __init__(self) -> None:
        self.being_sent: dict[int, Span] = {}
        self.last_written = 0.0

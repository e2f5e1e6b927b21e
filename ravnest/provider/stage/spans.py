"""Spans of a stage and its links: when they worked on which of the traced microbatches.

Spans wait for the next report, which takes a limited number of them; recording one wakes no thread. If more are
recorded than reports carry away, the newest are dropped.
"""

import time
from collections import deque
from functools import partial
from typing import Final

from ravnest.engine.telemetry.spans import Span
from ravnest.engine.telemetry.trace_windows import window_of, window_size
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.net.v1 import control_pb2

SPANS_A_REPORT: Final = 2000
"""About 70 kB, so that a report does not delay other messages to the coordinator."""

MAX_WAITING: Final = 20_000
"""Spans that wait for a report."""
_MAX_EVALUATIONS: Final = 50
"""Traced microbatches of one evaluation."""
_MAX_BEING_SENT: Final = 1000

_DIRECTIONS: Final = {FrameKind.FORWARD: "forward", FrameKind.BACKWARD: "backward"}


class SpanRecorder:
    """Records the spans of up to about this many microbatches; 0: of none.

    The engine's thread calls `worked` and `put_out`, the network's loop the other methods.
    """

    def __init__(self, microbatches: int, max_waiting: int = MAX_WAITING) -> None:
        self._size = window_size(microbatches)
        self._max_waiting = max_waiting
        self._first: int | None = None
        """The number of the first microbatch of training here, which is the same at every stage of a cluster."""
        self._waiting: deque[Span] = deque()
        self._put_out: dict[tuple[str, int], float] = {}
        """The times at which the engine's thread put out frames that no link has taken yet."""
        self._links: dict[ResumableLink, _LinkSpans] = {}
        self._worked_on = -1
        self._trains_traced = False
        self._evaluating: int | None = None
        """The first microbatch of the current evaluation, if it is traced."""

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
        """Record when the link has written its frames. Call this before it has a connection."""
        if self._size:
            found = self._links[link] = _LinkSpans()
            link.on_written = partial(self._written, found)

    def forget(self, link: ResumableLink) -> None:
        """The link is over: its unwritten frames will not be written."""
        self._links.pop(link, None)

    def handed_over(self, link: ResumableLink, frame: Frame) -> None:
        """A link has taken this frame, its newest one."""
        direction = _DIRECTIONS.get(frame.kind)
        if not self._size or direction is None:
            return
        since = self._put_out.pop((direction, frame.microbatch), None)
        found = self._links.get(link)
        if since is not None and found is not None and len(found.being_sent) < _MAX_BEING_SENT:
            found.being_sent[link.frames_sent - 1] = Span("send", frame.microbatch, since, since, direction)

    def received(self, frame: Frame, arrived: float) -> None:
        """The engine has a frame that arrived at this time."""
        direction = _DIRECTIONS.get(frame.kind)
        if self._size and direction is not None and self._is_traced(frame.microbatch):
            self._add(Span("receive", frame.microbatch, arrived, time.perf_counter(), direction))

    def take(self, since: float) -> list[control_pb2.Span]:
        """The spans since the last call, the oldest first and no more than a report carries. Their seconds are counted
        from `since`."""
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
                # A link sends one frame after the other, so this frame waited until the one before was written. Frames
                # that are written together also began together: one may have arrived before this end knows that it has
                # left.
                began = min(max(span.began, link.last_written), now)
                self._add(Span(span.kind, span.microbatch, began, now, span.detail))
        link.last_written = now

    def _add(self, span: Span) -> None:
        if len(self._waiting) < self._max_waiting:
            self._waiting.append(span)


class _LinkSpans:
    """Frames that a link has not written yet, by number, and the time of its last write."""

    def __init__(self) -> None:
        self.being_sent: dict[int, Span] = {}
        self.last_written = 0.0

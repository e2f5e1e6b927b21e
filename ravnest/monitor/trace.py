"""trace.json: timeline of every stage, in the trace event format of Perfetto and chrome://tracing.

Each cluster is a process of the format. Each of its stages has a row for computation and one for each direction in
which it sends and receives. A resumed run has separate rows for each session, one session after the other.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ravnest.errors import RunError
from ravnest.monitor.files import read_error, write_atomic
from ravnest.safe_json import read_json

BUSY_KINDS: Final = ("forward", "backward", "weights", "update", "lookup", "rows", "evaluate", "average", "save")
KINDS: Final = (*BUSY_KINDS, "wait", "send", "receive")
ROWS: Final = ("compute", "send forward", "send backward", "receive forward", "receive backward")
MAX_SPANS: Final = 200_000
"""Spans per file; a file with this many has about 25 MB."""

_SESSION_PIDS: Final = 100_000
_STAGE_TIDS: Final = 10
_PAUSE_SECONDS: Final = 1.0
"""Gap between two sessions on the axis."""
_MAX_SECONDS: Final = 1e9
_VALUES_PER_SPAN: Final = 16
_SAME_MESSAGE_SECONDS: Final = 1e-6
"""Frames whose ends are this close were sent in one message."""


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One activity of a stage or of one of its links; times in seconds on the axis of the trace."""

    kind: str
    microbatch: int
    began: float
    ended: float
    detail: str = ""
    """ "forward" or "backward" for a send or receive; the reason for a wait."""

    @property
    def row(self) -> str:
        return f"{self.kind} {self.detail}" if self.kind in ("send", "receive") else "compute"


@dataclass(frozen=True, slots=True)
class TraceStage:
    """One stage of a session."""

    cluster: int
    stage: int
    role: str
    provider: str
    spans: tuple[TraceSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """The stages of each session, oldest session first."""

    sessions: tuple[tuple[TraceStage, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The trace in the trace event format."""
        events = itertools.chain.from_iterable(
            _stage_events(number, stage) for number, stages in enumerate(self.sessions) for stage in stages
        )
        return {"displayTimeUnit": "ms", "traceEvents": list(events)}

    def write(self, path: Path) -> None:
        """Replaces the file at `path` atomically; raises RunError if the disk fails."""
        lines = ",\n".join(
            json.dumps(event, allow_nan=False, separators=(",", ":")) for event in self.to_json()["traceEvents"]
        )
        write_atomic(path, f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n')

    @classmethod
    def read(cls, path: Path) -> "Trace":
        """The trace in the file at `path`; raises RunError if it is missing or malformed."""
        try:
            return _trace(read_json(path.read_bytes(), 2 * _VALUES_PER_SPAN * MAX_SPANS))
        except OSError as error:
            raise read_error(path, error) from error
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            said = f"{type(error).__name__}: {str(error)[:80]}"
            raise RunError(
                f"{path} is not a trace of a run ({said}); remove it, and a resumed run writes a new one"
            ) from None


def after(earlier: Trace, stages: Sequence[TraceStage]) -> Trace:
    """The trace with one more session, placed after the earlier ones on the axis. The oldest sessions are dropped if
    there are more than `MAX_SPANS` spans."""
    room = MAX_SPANS - sum(len(stage.spans) for stage in stages)
    kept: list[tuple[TraceStage, ...]] = []
    for session in reversed(earlier.sessions):
        room -= sum(len(stage.spans) for stage in session)
        if room < 0:
            break
        kept.insert(0, session)
    ended = max((span.ended for session in kept for stage in session for span in stage.spans), default=None)
    begins = 0.0 if ended is None else ended + _PAUSE_SECONDS
    return Trace((*kept, tuple(_shifted(stage, begins) for stage in stages)))


def in_rows(spans: Iterable[TraceSpan]) -> dict[str, list[TraceSpan]]:
    """The spans of each row in order and without overlap.

    Frames that were sent in one message divide its time among them.
    """
    rows: dict[str, list[TraceSpan]] = {row: [] for row in ROWS}
    for (_, ended), group in itertools.groupby(sorted(spans, key=_time), key=_time):
        by_row: dict[str, list[TraceSpan]] = {}
        for span in group:
            by_row.setdefault(span.row, []).append(span)
        for name, together in by_row.items():
            row = rows[name]
            if (
                row
                and row[-1].began < together[0].began < row[-1].ended
                and abs(ended - row[-1].ended) < _SAME_MESSAGE_SECONDS
            ):
                row[-1] = replace(row[-1], ended=together[0].began)
            began = max(row[-1].ended, together[0].began) if row else together[0].began
            if ended < began or (ended == began and row and together[0].began < began):
                continue
            edges = [began + (ended - began) * index / len(together) for index in range(len(together))] + [ended]
            row += [replace(span, began=edges[i], ended=edges[i + 1]) for i, span in enumerate(together)]
    return rows


def _time(span: TraceSpan) -> tuple[float, float]:
    return span.began, span.ended


def _shifted(stage: TraceStage, seconds: float) -> TraceStage:
    if not seconds:
        return stage
    moved = (replace(span, began=span.began + seconds, ended=span.ended + seconds) for span in stage.spans)
    return replace(stage, spans=tuple(moved))


def _stage_events(session: int, stage: TraceStage) -> Iterator[dict[str, Any]]:
    pid = session * _SESSION_PIDS + stage.cluster
    if not stage.stage:
        name = f"cluster {stage.cluster}" + (f", session {session + 1}" if session else "")
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for index, (row, spans) in enumerate(in_rows(stage.spans).items()):
        tid = stage.stage * _STAGE_TIDS + index
        if not spans and index:
            continue
        place: dict[str, Any] = {"pid": pid, "tid": tid}
        said = f"stage {stage.stage} {stage.role}, {stage.provider}" if not index else f"stage {stage.stage} {row}"
        told = {"name": said, "stage": stage.stage, "role": stage.role, "provider": stage.provider}
        yield {"ph": "M", "name": "thread_name", **place, "args": told}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": tid}}
        for span in spans:
            # Both ends rounded to the nanosecond: adjacent spans must not overlap.
            began, ended = round(span.began * 1e9), round(span.ended * 1e9)
            args: dict[str, Any] = {"microbatch": span.microbatch}
            if span.detail:
                args["detail"] = span.detail
            times = {"ts": began / 1000, "dur": (ended - began) / 1000}
            yield {"ph": "X", "name": span.kind, "cat": row.split()[0], **place, **times, "args": args}


def _trace(record: Mapping[str, Any]) -> Trace:
    events = record["traceEvents"]
    stages: dict[tuple[int, int], TraceStage] = {}
    spans: dict[tuple[int, int], list[TraceSpan]] = {}
    for event in events:
        if event["ph"] not in ("M", "X") or "tid" not in event:
            continue
        place = _number(event["pid"]), _number(event["tid"]) // _STAGE_TIDS
        args = event["args"]
        if event["ph"] == "X":
            began = _seconds(event["ts"])
            kind, detail = event["name"], args.get("detail", "")
            span = TraceSpan(kind, _number(args["microbatch"]), began, began + _seconds(event["dur"]), detail)
            if kind not in KINDS or span.row not in ROWS or span.ended < span.began or not isinstance(detail, str):
                raise ValueError(f"a span of kind {str(kind)[:40]!r}")
            spans.setdefault(place, []).append(span)
        elif event["name"] == "thread_name":
            cluster = place[0] % _SESSION_PIDS
            stages[place] = TraceStage(cluster, _number(args["stage"]), str(args["role"]), str(args["provider"]))
    numbers = sorted({pid // _SESSION_PIDS for pid, _ in stages})
    return Trace(
        tuple(
            tuple(
                replace(stages[place], spans=tuple(spans.get(place, ())))
                for place in sorted(stages)
                if place[0] // _SESSION_PIDS == number
            )
            for number in numbers
        )
    )


def _number(value: object) -> int:
    if type(value) is not int or abs(value) >= 2**53:
        raise ValueError(f"{str(value)[:40]!r} is not a valid number")
    return value


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{str(value)[:40]!r} is not a time")
    seconds = float(value) / 1e6
    # NaN fails the comparison and is rejected.
    if not abs(seconds) <= _MAX_SECONDS:
        raise ValueError(f"{str(value)[:40]!r} is not a time of a run")
    return seconds

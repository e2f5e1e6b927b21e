"""Metrics of a run: one JSON line per measurement, and the same numbers for TensorBoard."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Literal

from ravnest.monitor.json_lines import JsonLines, read_lines

MetricKind = Literal["train", "eval", "stage"]

FLUSH_SECONDS: Final = 5


class MetricLog:
    """Writes metrics to `path` and, if a folder is given, to TensorBoard; thread-safe.

    - TensorBoard is slow to import, so a background thread imports it; values written before wait in a queue.
    - If TensorBoard cannot be used, `on_warning` gets one sentence and the run continues with metrics.jsonl only.
    - If the disk fails, the first `write` raises RunError; later ones do not raise.
    """

    def __init__(
        self, path: Path, tensorboard_dir: Path | None = None, on_warning: Callable[[str], None] | None = None
    ) -> None:
        self._lines = JsonLines(path)
        self._on_warning = on_warning
        self._queue: SimpleQueue[_Scalars | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if tensorboard_dir is not None:
            self._thread = threading.Thread(
                target=self._write_tensorboard,
                args=(tensorboard_dir,),
                name="ravnest-tensorboard",
                daemon=True,
            )
            self._thread.start()

    def write(
        self,
        kind: MetricKind,
        *,
        samples: int,
        updates: int,
        values: Mapping[str, float],
        **labels: str | int,
    ) -> None:
        """Records `values` as of the given number of samples and updates; `labels` say which stage they belong to.

        A value that is not finite is written as null. A name that collides with a label or a field of the record gets
        a trailing "_".
        """
        at = time.time()
        record: dict[str, object] = {
            "at": round(at, 3),
            "kind": kind,
            "samples": samples,
            "updates": updates,
            **labels,
        }
        for name, value in values.items():
            key = name
            while key in record:
                key += "_"
            record[key] = float(value)
        if self._thread is not None:
            self._queue.put(_Scalars(at, samples, _prefix(kind, labels), dict(values)))
        self._lines.append(record)

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Flushes everything to the files; may be called repeatedly.

        The wait for TensorBoard has a timeout: an interrupt during an import can leave Python's lock for that module
        held for good, and the thread would wait for it forever.
        """
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_seconds)
            self._thread = None
        self._lines.close()

    def _write_tensorboard(self, folder: Path) -> None:
        try:
            writer = _open_writer(folder)
            try:
                while (scalars := self._queue.get()) is not None:
                    writer.add_event(_tensorboard_event(scalars))
            finally:
                writer.close()
        # A failure here (an import, a full disk) must not end the run: TensorBoard is a convenience.
        except Exception as error:
            if self._on_warning is not None:
                reason = str(error) or type(error).__name__
                self._on_warning(f"no TensorBoard curves in {folder}: {reason}; metrics.jsonl has the same numbers")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl, oldest first. A truncated last line is skipped; a missing file has no lines."""
    return list(read_lines(path))


@dataclass(frozen=True)
class _Scalars:
    at: float
    step: int
    prefix: str
    values: dict[str, float]


def _prefix(kind: str, labels: Mapping[str, str | int]) -> str:
    return "/".join([kind, *([" ".join(str(value) for value in labels.values())] if labels else [])])


def _open_writer(folder: Path) -> Any:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    return EventFileWriter(str(folder), flush_secs=FLUSH_SECONDS)


def _tensorboard_event(scalars: _Scalars) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [
        Summary.Value(tag=f"{scalars.prefix}/{name}", simple_value=value) for name, value in scalars.values.items()
    ]
    return Event(wall_time=scalars.at, step=scalars.step, summary=Summary(value=values))

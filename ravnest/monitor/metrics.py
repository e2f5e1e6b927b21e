"""The curves of a run: one JSON line per sample of them, and the same numbers for TensorBoard."""

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
    """Writes samples of the curves to `path` and, if a folder is given, to TensorBoard; from any thread.

    - TensorBoard is slow to import, so a background thread does it; what is written before waits in its
      queue.
    - When TensorBoard cannot be used, `on_warning` gets one sentence and the run goes on with metrics.jsonl
      alone.
    - When the disk refuses, the first `write` raises RunError, later ones are silent.
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
        """Records `values` as they were after so many samples and updates; `labels` say whose they are.

        A value that is not finite is written as null. A name that a label or the record itself uses gets a
        "_".
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
        """Returns when everything written has reached its files; may be called again.

        TensorBoard is not waited for beyond the time: an interrupt that hits an import can leave Python's lock of that
        module taken for good, and the thread would wait for it.
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
        # Whatever goes wrong here (an import, a full disk) costs a convenience and must not cost the run.
        except Exception as error:
            if self._on_warning is not None:
                reason = str(error) or type(error).__name__
                self._on_warning(f"no TensorBoard curves in {folder}: {reason}; metrics.jsonl has the same numbers.")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl, oldest first; a torn last line is left out, no file is no lines."""
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

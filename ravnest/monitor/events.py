"""Event log of a run: joins, plans, faults, rounds and checkpoints, each with its reason."""

import time
from pathlib import Path
from typing import Any

from ravnest.monitor.json_lines import JsonLines, read_lines, strict

Event = dict[str, Any]


class EventLog:
    """Appends events to the file at `path`; thread-safe.

    If the disk fails, the first `emit` raises RunError; later ones try again without raising.
    """

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)
        self._started = time.monotonic()

    def emit(self, kind: str, reason: str, /, **fields: object) -> None:
        """Records an event and its reason; `fields` are plain values with the details.

        A field whose name collides with a field of every event (a metric may be called "reason") gets a trailing "_".
        """
        event: Event = {
            "at": round(time.time(), 3),
            "elapsed": round(time.monotonic() - self._started, 3),
            "kind": kind,
            "reason": reason,
        }
        event.update(strict({f"{name}_" if name in event else name: value for name, value in fields.items()}))
        self._lines.append(event)

    def close(self) -> None:
        self._lines.close()


def read_events(path: Path) -> list[Event]:
    """All events of a run, oldest first. A truncated last line is skipped; a missing file means no events."""
    return list(read_lines(path))

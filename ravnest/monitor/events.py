"""Event log of a run: joins, plans, faults, rounds and checkpoints, each with its reason."""

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ravnest.monitor.json_lines import JsonLines, read_lines, strict

Event = dict[str, Any]
Observer = Callable[[Event], None]

RECENT_EVENTS = 200


class EventLog:
    """Appends events to the file at `path` and calls the subscribed observers; thread-safe.

    If the disk fails, the first `emit` raises RunError after the observers were called; later events are kept in
    memory only.
    """

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._recent: deque[Event] = deque(maxlen=RECENT_EVENTS)
        self._observers: list[Observer] = []

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
        with self._lock:
            self._recent.append(event)
            observers = tuple(self._observers)
        for observer in observers:
            observer(event)
        self._lines.append(event)

    def subscribe(self, observer: Observer) -> Callable[[], None]:
        """Calls `observer` with every later event, in the thread that emits it; returns how to unsubscribe."""
        with self._lock:
            self._observers.append(observer)

        def unsubscribe() -> None:
            with self._lock:
                if observer in self._observers:
                    self._observers.remove(observer)

        return unsubscribe

    @property
    def recent(self) -> tuple[Event, ...]:
        """The most recent events of this process, oldest first."""
        with self._lock:
            return tuple(self._recent)

    def close(self) -> None:
        self._lines.close()


def read_events(path: Path) -> list[Event]:
    """All events of a run, oldest first. A truncated last line is skipped; a missing file means no events."""
    return list(read_lines(path))

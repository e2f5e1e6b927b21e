"""Display of a run: which kind this terminal gets, and what it shows before the run reports anything."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ravnest.monitor.snapshot import RunSnapshot

if TYPE_CHECKING:
    from ravnest.monitor.display import Display

_SHOW_SECONDS = 0.25


def choose_display(*, enabled: bool, plain: bool) -> "Display":
    """The display for this terminal: a live one if possible, plain lines otherwise or on request."""
    from ravnest.monitor.display import PlainDisplay, open_display

    return PlainDisplay(sys.stderr) if plain else open_display(enabled, sys.stderr)


@contextmanager
def showing(display: "Display", phase: str, title: str) -> Iterator[None]:
    """Shows a phase while this thread is busy importing torch and running the job file."""
    over, started = threading.Event(), time.perf_counter()

    def show() -> None:
        while True:
            display.show(RunSnapshot(phase=phase, title=title, elapsed_seconds=time.perf_counter() - started))
            if over.wait(_SHOW_SECONDS):
                return

    thread = threading.Thread(target=show, name="ravnest-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

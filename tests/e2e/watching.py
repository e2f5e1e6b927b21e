"""Runs of several clusters while they go on: what has happened so far, and data that does not end before it should."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from ravnest.coordinator.launch.session import TrainResult
from ravnest.monitor.events import read_events
from tests.e2e.jobs import Batch, batches

PATIENCE_SECONDS = 60.0


def kinds(run: Path) -> list[str]:
    return [event["kind"] for event in read_events(run / "events.jsonl")]


def adds_up(result: TrainResult, microbatches: int) -> bool:
    ledger = result.summary.ledger
    return (ledger.fed, ledger.completed, ledger.lost, ledger.applied_twice) == (microbatches, microbatches, 0, 0)


def wait_for(run: Path, kind: str, count: int = 1) -> None:
    """Returns when the run has told so many events of this kind."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_SECONDS / 0.05)):
        if (run / "events.jsonl").exists() and kinds(run).count(kind) >= count:
            return
        pause.wait(0.05)
    raise AssertionError(f"no {kind} within {PATIENCE_SECONDS:.0f} s; there were {kinds(run)}")


def endless(ended: threading.Event) -> Callable[[], Iterator[Batch]]:
    """Batches until the test has seen enough; the last few come after that.

    Some 200 a second: a run that waits for a timeout leaves the processor to other tests.
    """

    def data() -> Iterator[Batch]:
        while not ended.wait(0.03):
            yield from batches([8] * 8)
        yield from batches([8] * 8)

    return data

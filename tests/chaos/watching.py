"""What a run says of itself while it goes on: its summary, its events and its curve, read from the run directory."""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Summary = dict[str, Any]

LOOK_SECONDS = 0.05
"""Files tell nobody that they have grown; what is waited for here happens in other processes."""


class Lines:
    """A file of JSON lines that somebody else appends to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self.lines: list[dict[str, Any]] = []

    def look(self) -> list[dict[str, Any]]:
        """All lines so far; one that is only half written comes the next time."""
        try:
            with self._path.open("rb") as file:
                # A line torn by a killed writer is cut off when the next one opens the file.
                if os.fstat(file.fileno()).st_size < self._read_bytes:
                    raise AssertionError(f"{self._path} has lost lines that were there before")
                file.seek(self._read_bytes)
                data = file.read()
        except FileNotFoundError:
            return self.lines
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        self.lines += [json.loads(line) for line in whole.splitlines()]
        return self.lines


@dataclass(frozen=True)
class Mark:
    """A moment in the run: what came after it can be asked for."""

    events: int
    steps: int
    at: float
    completed: int
    """By the last summary, which may be some seconds old."""


class Watchdog:
    """Looks at one run directory."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._events = Lines(run / "events.jsonl")
        self._metrics = Lines(run / "metrics.jsonl")
        self._pause = threading.Event()

    def summary(self, since: float = 0.0) -> Summary:
        """The summary as it was written last, at most a few seconds ago; empty where that was before `since`."""
        try:
            with (self._run / "summary.json").open() as file:
                if os.fstat(file.fileno()).st_mtime <= since:
                    return {}
                found = json.load(file)
        except FileNotFoundError:
            return {}
        assert isinstance(found, dict)
        return found

    def events(self, since: Mark | None = None) -> list[Event]:
        return self._events.look()[0 if since is None else since.events :]

    def steps(self, since: Mark | None = None) -> list[dict[str, Any]]:
        """The points of the training curve: a microbatch each, with the time (`at`) at which it was reported."""
        points = [line for line in self._metrics.look() if line["kind"] == "train"]
        return points[0 if since is None else since.steps :]

    def stage_steps(self, since: Mark) -> list[dict[str, Any]]:
        """The points of the stages' own curves: each says that a stage of a cluster has applied updates."""
        return [line for line in self._metrics.look() if line["kind"] == "stage" and line["at"] > since.at]

    def evaluations(self) -> dict[int, float]:
        """The loss of each evaluation, by how many samples had been trained on."""
        return {line["samples"]: line["loss"] for line in self._metrics.look() if line["kind"] == "eval"}

    def completed(self) -> int:
        return int(self.summary().get("ledger", {}).get("completed", 0))

    def mark(self) -> Mark:
        return Mark(len(self._events.look()), len(self.steps()), time.time(), self.completed())

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Whether it came to that within so many seconds."""
        deadline = time.monotonic() + seconds
        while not until():
            if time.monotonic() > deadline:
                return False
            self._pause.wait(LOOK_SECONDS)
        return True

"""Observer of a run: reads its summary, its events and its curve from the run directory while it runs."""

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
"""Polling interval: other processes write the files, and a file gives no notice when it grows."""


class Lines:
    """A file of JSON lines to which another process appends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self.lines: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """All complete lines so far."""
        try:
            with self._path.open("rb") as file:
                # The next writer cuts off an incomplete line of a killed one, which was not read here.
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
    """A moment in the run, from which on events and steps can be read."""

    events: int
    steps: int
    at: float
    completed: int
    """Number of completed microbatches by the last summary, which may be some seconds old."""


class RunObserver:
    """Observer of one run directory."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._events = Lines(run / "events.jsonl")
        self._metrics = Lines(run / "metrics.jsonl")
        self._pause = threading.Event()

    def summary(self, since: float = 0.0) -> Summary:
        """The latest summary, at most a few seconds old; empty if it was written before `since`."""
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
        return self._events.read()[0 if since is None else since.events :]

    def steps(self, since: Mark | None = None) -> list[dict[str, Any]]:
        """The points of the training curve: one per microbatch, with the time (`at`) of its report."""
        points = [line for line in self._metrics.read() if line["kind"] == "train"]
        return points[0 if since is None else since.steps :]

    def stage_steps(self, since: Mark) -> list[dict[str, Any]]:
        """The points of the stages' own curves: each shows that a stage of a cluster has applied updates."""
        return [line for line in self._metrics.read() if line["kind"] == "stage" and line["at"] > since.at]

    def evaluations(self) -> dict[int, float]:
        """The loss of each evaluation, by the number of samples trained on before it."""
        return {line["samples"]: line["loss"] for line in self._metrics.read() if line["kind"] == "eval"}

    def completed(self) -> int:
        return int(self.summary().get("ledger", {}).get("completed", 0))

    def mark(self) -> Mark:
        return Mark(len(self._events.read()), len(self.steps()), time.time(), self.completed())

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Whether the condition became true within this time."""
        deadline = time.monotonic() + seconds
        while not until():
            if time.monotonic() > deadline:
                return False
            self._pause.wait(LOOK_SECONDS)
        return True

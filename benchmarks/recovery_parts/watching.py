"""Observation of a running run through its directory: a recovery as seen from outside."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LOOK_SECONDS = 0.05
"""Interval between two looks at the files, which have no notification."""

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recovery:
    """Recovery from the kill of one machine, in seconds; a part that was not reported is None."""

    role: str
    way: str
    """failover: a standby took over the stage; reformed: the model was re-partitioned over the remaining machines."""
    whole: float
    """From the kill to the first update of the restored stage in the run directory."""
    detect: float | None
    """From the last message of the machine until the coordinator declared it lost."""
    decide: float | None
    fetch: float | None
    resume: float | None
    told: float | None
    """The whole recovery, as the run itself reported it."""
    replayed: int
    source: str


class RunObserver:
    """Observer of one run directory."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._events = _Lines(run / "events.jsonl")
        self._metrics = _Lines(run / "metrics.jsonl")
        self._pause = threading.Event()

    def events(self, since: float = 0.0, *kinds: str) -> list[Line]:
        """The events of these kinds after a wall-clock time."""
        return [line for line in self._events.look() if line["at"] > since and (not kinds or line["kind"] in kinds)]

    def updates(self, since: float) -> list[Line]:
        """The reports of new updates of stages."""
        return [line for line in self._metrics.look() if line["kind"] == "stage" and line["at"] > since]

    def metrics(self) -> list[Line]:
        """All lines of the curves so far."""
        return list(self._metrics.look())

    def stages(self) -> list[Line]:
        """The stages of the only cluster in the latest summary."""
        try:
            summary = json.loads((self._run / "summary.json").read_text())
        except FileNotFoundError:
            return []
        return summary["clusters"][0]["stages"] if summary.get("clusters") else []

    def wait(self, until: Callable[[], object], seconds: float, what: str, check: Callable[[], None]) -> None:
        """Wait until the condition holds; TimeoutError after the timeout. `check` may raise if it cannot hold."""
        deadline = time.monotonic() + seconds
        while not until():
            check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {seconds:.0f} s")
            self._pause.wait(_LOOK_SECONDS)

    def recovery(self, role: str, stage: int, killed_at: float) -> Recovery | None:
        """The recovery of a stage whose machine was killed at that time; None until it trains again."""
        ends = self.events(killed_at, "failover", "reformed")
        begins = self.events(killed_at, "failover_begun", "reform_begun")
        if not ends or not begins:
            return None
        end, begun = ends[-1], begins[0]
        restored, since = {stage}, begun["at"]
        if end["kind"] == "reformed":
            # Reports from before the recovery belong to the old stages.
            restored = {line["stage"] for line in self.stages()}
            since = max([since, *(event["at"] for event in self.events(since, "deployed") if event["at"] <= end["at"])])
        first: dict[int, float] = {}
        for line in self.updates(since):
            first.setdefault(line["stage"], line["at"])
        if not restored or not restored <= first.keys():
            return None
        whole = max(first[each] for each in restored) - killed_at
        return Recovery(
            role=role,
            way=end["kind"],
            whole=whole,
            # If the run does not report it, the time seen from outside.
            detect=end.get("detect_seconds", begun["at"] - killed_at),
            decide=end.get("decide_seconds"),
            fetch=end.get("fetch_seconds"),
            # After a re-partition, the run reports the time until all microbatches were fed again.
            resume=killed_at + whole - since if end["kind"] == "reformed" else end.get("resume_seconds"),
            told=end.get("seconds"),
            replayed=end.get("replayed", 0),
            source=begun.get("source", ""),
        )


class _Lines:
    """A file of JSON lines that another process appends to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self._lines: list[Line] = []

    def look(self) -> list[Line]:
        """All complete lines so far; a partly written one comes the next time."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                data = file.read()
        except FileNotFoundError:
            return self._lines
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        self._lines += [json.loads(line) for line in whole.splitlines()]
        return self._lines

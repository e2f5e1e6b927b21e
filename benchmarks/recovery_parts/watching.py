"""What a run tells while it goes on, as anybody can read it from its directory: a recovery as seen from outside."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LOOK_SECONDS = 0.05
"""Files tell nobody that they have grown."""

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recovery:
    """One machine killed, until what it held trains again. Seconds; a part that was not told is None."""

    role: str
    way: str
    """failover: another took the stage; reformed: the model was divided among those that were left."""
    whole: float
    """From the kill to the first update of the restored stage that anybody could read of."""
    detect: float | None
    """From the last that was heard of the machine until it was known that it is gone."""
    decide: float | None
    fetch: float | None
    resume: float | None
    told: float | None
    """The whole as the run itself told it."""
    replayed: int
    source: str


class Watchdog:
    """Looks at one run directory."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._events = _Lines(run / "events.jsonl")
        self._metrics = _Lines(run / "metrics.jsonl")
        self._pause = threading.Event()

    def events(self, since: float = 0.0, *kinds: str) -> list[Line]:
        """Those of these kinds after a moment, by the clock on the wall."""
        return [line for line in self._events.look() if line["at"] > since and (not kinds or line["kind"] in kinds)]

    def updates(self, since: float) -> list[Line]:
        """When stages told that they had more updates than before."""
        return [line for line in self._metrics.look() if line["kind"] == "stage" and line["at"] > since]

    def stages(self) -> list[Line]:
        """The stages of the only cluster, as the summary had them last."""
        try:
            summary = json.loads((self._run / "summary.json").read_text())
        except FileNotFoundError:
            return []
        return summary["clusters"][0]["stages"] if summary.get("clusters") else []

    def wait(self, until: Callable[[], object], seconds: float, what: str, check: Callable[[], None]) -> None:
        """Returns when it has come to that; TimeoutError when it does not in time. `check` may raise why it cannot."""
        deadline = time.monotonic() + seconds
        while not until():
            check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} has not come within {seconds:.0f} s")
            self._pause.wait(_LOOK_SECONDS)

    def recovery(self, role: str, stage: int, killed_at: float) -> Recovery | None:
        """What has become of a stage whose machine was killed then; None while it does not train again."""
        ends = self.events(killed_at, "failover", "reformed")
        begins = self.events(killed_at, "failover_begun", "reform_begun")
        if not ends or not begins:
            return None
        end, begun = ends[-1], begins[0]
        restored, since = {stage}, begun["at"]
        if end["kind"] == "reformed":
            # What stages of before told in the meantime is not of those that there are now.
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
            # Where the run does not tell it, as it can be seen from outside.
            detect=end.get("detect_seconds", begun["at"] - killed_at),
            decide=end.get("decide_seconds"),
            fetch=end.get("fetch_seconds"),
            # Of those that were formed anew, it is told until all was fed again.
            resume=killed_at + whole - since if end["kind"] == "reformed" else end.get("resume_seconds"),
            told=end.get("seconds"),
            replayed=end.get("replayed", 0),
            source=begun.get("source", ""),
        )


class _Lines:
    """A file of JSON lines that somebody else appends to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self._lines: list[Line] = []

    def look(self) -> list[Line]:
        """All lines so far; one that is only half written comes the next time."""
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

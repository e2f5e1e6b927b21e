"""Runs of an embedded swarm that a test disturbs while they go on: who holds which stage, and what the run has told."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ravnest import Pipeline
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.coordinator.launch.session import TrainResult
from ravnest.coordinator.run.timeouts import Timeouts
from ravnest.monitor.events import Event, read_events
from tests.e2e.jobs import Batch, Net, a_job, a_net, batches, samples
from tests.swarms.embedded import kill

PATIENCE_SECONDS = 120.0
"""How long anything may take on a busy machine."""
POOL = batches([8] * 100)
"""What a disturbed run trains on, again and again in this order."""
HELD_OUT = samples(200, seed=7)
MIN_BATCHES = 400
"""Of a disturbed run: on a busy machine all that is done to it may be over while its loss still falls fast, and is far
from that of any other run."""
RATE = 0.05
TIMEOUTS = Timeouts(replica_event_seconds=0.0)
"""Every replica is an event."""


class Watched:
    """One run while it goes on: who holds what, and what it tells."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._seen = 0

    @property
    def events(self) -> list[Event]:
        path = self._run / "events.jsonl"
        return read_events(path) if path.exists() else []

    def stages(self, cluster: int = 0) -> list[str]:
        """Who holds the stages of a cluster, from root to leaf."""
        found: list[str] = []
        for event in self.events:
            if event["kind"] == "planned":
                found = [stage["provider"] for stage in event["stages"] if stage["cluster"] == cluster]
            elif event["kind"] == "failover" and event["cluster"] == cluster:
                for stage, taker in zip(event["stages"], event["takers"], strict=True):
                    found[stage] = taker
        return found

    def warm(self) -> dict[str, int | None]:
        """Of each provider that has stood by, the stage that it was last kept warm for."""
        return {event["provider"]: event["for_stage"] for event in self.events if event["kind"] == "standby"}

    def wait(self, kind: str, **values: Any) -> Event:
        """The next event of this kind, and with these values, after the one that was waited for before."""
        deadline, pause = time.monotonic() + PATIENCE_SECONDS, threading.Event()
        while True:
            events = self.events
            for number, event in enumerate(events[self._seen :], start=self._seen):
                if event["kind"] == kind and values.items() <= event.items():
                    self._seen = number + 1
                    return event
            told = [(event["kind"], event["reason"]) for event in events[self._seen :] if event["kind"] != kind][:30]
            assert not told or told[-1][0] not in ("failed", "finished", "stopped"), f"no {kind} {values}, but {told}"
            assert time.monotonic() < deadline, f"no {kind} {values} within {PATIENCE_SECONDS:.0f} s, but {told}"
            pause.wait(0.02)

    def seen(self, kind: str) -> Event:
        """The first event of this kind, whenever it was told."""
        return Watched(self._run).wait(kind)

    def from_now_on(self) -> None:
        """What was told until now is not waited for any more."""
        self._seen = len(self.events)


class Disturbed(Watched):
    """The same of an embedded swarm, as a test looks at it from a thread of its own."""

    def __init__(self, swarm: EmbeddedSwarm, run: Path) -> None:
        super().__init__(run)
        self.swarm = swarm

    def kill(self, *names: str) -> None:
        kill(self.swarm, *names)


class Endless:
    """Batches of the pool, at least some of them, until the test has seen enough."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(itertools.cycle(POOL)):
            # Beyond those, 100 a second: a run that waits for a timeout leaves the processor to other tests.
            if number >= MIN_BATCHES and self.ended.wait(0.01):
                return
            yield batch


def disturbed(
    swarm: EmbeddedSwarm,
    run: Path,
    disturb: Callable[[Disturbed], None],
    *,
    providers: int,
    clusters: int = 1,
    resume: bool = False,
    walked: Callable[[Endless], Any] = lambda data: data,
    **changes: Any,
) -> TrainResult:
    """Trains until all has been done that `disturb` does to the run; what went wrong there is raised here.

    `walked` makes the train_data of the job, `changes` are other arguments of it.
    """
    failures: list[BaseException] = []
    data = Endless()
    settings: dict[str, Any] = {
        "eval_data": [HELD_OUT],
        "optimizer": partial(torch.optim.SGD, lr=RATE),
        "pipeline": Pipeline(in_flight=1, record_updates=True),
        **changes,
    }

    def do() -> None:
        try:
            disturb(Disturbed(swarm, run))
        except BaseException as error:
            failures.append(error)
        finally:
            data.ended.set()

    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    try:
        job = a_job(walked(data), **settings)
        return swarm.train(
            job, providers=providers, clusters=clusters, run=run, resume=resume, display=False, timeouts=TIMEOUTS
        )
    finally:
        data.ended.set()
        thread.join(PATIENCE_SECONDS)
        if failures:
            raise failures[0]


def plain(microbatches: int, accumulate: int = 1) -> Net:
    """What a loop of plain PyTorch makes of so many batches of the pool."""
    model = a_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for number, (features, labels) in enumerate(itertools.islice(itertools.cycle(POOL), microbatches), start=1):
        (F.cross_entropy(model(features), labels) / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def loss_of(model: Net) -> float:
    """On what is held out."""
    features, labels = HELD_OUT
    with torch.no_grad():
        return float(F.cross_entropy(model(features), labels))

"""The whole embedded run, requester and providers at once, is killed at random moments, and continued each time.

The moments are drawn over the whole of its life: while it starts, while it trains and writes one checkpoint after
another, while it ends. Some checkpoints are damaged besides. RAVNEST_KILLS says how many times it is killed,
RAVNEST_KILLS_SEED with which moments (`make kills`: 20 of them, another seed each time).
"""

import json
import os
import random
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import psutil
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from ravnest.coordinator.checkpoints.reader import CheckpointInfo, checkpoint_folders, newest_good
from ravnest.coordinator.checkpoints.store import CheckpointStore
from ravnest.monitor.events import Event, read_events
from ravnest.monitor.metrics import read_metrics
from ravnest.monitor.summary import Summary
from tests.e2e.command import Running
from tests.e2e.jobs import a_job_file

KILLS = int(os.environ.get("RAVNEST_KILLS", "6"))
SEED = int(os.environ.get("RAVNEST_KILLS_SEED", "7"))

EVERY = 5
"""Updates between two checkpoints: the run hardly does anything but write them."""
BATCH = 8
PEEKED = 2
"""Batches that are looked at to capture the model on."""
PATIENCE_SECONDS = 240.0
"""How long a life may take to get anywhere on a busy machine."""
MORE_UPDATES = 40
"""Of a life that is to be ended while it comes to its own end, and of the last."""

# Every batch that is handed out is told at once: what a run was given is known however it ends.
TOLD = """
class Told:
    def __iter__(self):
        with open(HERE / "given", "wb", buffering=0) as given:
            for batch in batches:
                given.write(b".")
                yield batch


generator = torch.Generator().manual_seed(1)
batches = [(torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(50)]
torch.manual_seed(2)
"""


def a_long_job(folder: Path) -> Path:
    return a_job_file(
        folder,
        before=TOLD,
        data="Told()",
        model="nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))",
        epochs="1_000_000",
        pipeline="ravnest.Pipeline(in_flight=1)",
        checkpoint=f"ravnest.Checkpoint(every_updates={EVERY}, every_seconds=None)",
    )


def plain(updates: int) -> dict[str, torch.Tensor]:
    """The parameters of that job after so many updates in a row, by a loop of plain PyTorch."""
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(50)]
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in islice(cycle(batches), updates):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


@dataclass(frozen=True)
class Moment:
    """When a life is ended: so long after it was given so many batches to train on (None: after it began)."""

    batches: int | None
    seconds: float
    ends: bool = False
    """Whether no more is left to do then: the moment is in the midst of what comes last, or just after it."""


def moments(count: int, seed: int) -> Iterator[Moment]:
    chance = random.Random(seed)
    for number in range(count):
        if number % 6 == 1:
            yield Moment(None, chance.uniform(0.0, 8.0))
        elif number % 6 == 4:
            yield Moment(MORE_UPDATES, chance.uniform(0.0, 0.3), ends=True)
        else:
            yield Moment(chance.randrange(1, 150), chance.uniform(0.0, 0.05))


@dataclass(frozen=True)
class Standing:
    """What is on the disk of a run."""

    run: Path
    saved: CheckpointInfo | None

    @classmethod
    def of(cls, run: Path) -> "Standing":
        return cls(run, newest_good(run / "checkpoints")[0])

    @property
    def updates(self) -> int:
        return 0 if self.saved is None else self.saved.updates

    @property
    def position(self) -> int:
        return 0 if self.saved is None else self.saved.position


def events_of(run: Path, kind: str) -> list[Event]:
    return [event for event in read_events(run / "events.jsonl") if event["kind"] == kind]


class Given:
    """How many batches the life of now has been handed, through a pipe that the job writes to."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        # For writing too: then it has no end when a life has.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self.count = 0

    def start_over(self) -> None:
        self.look()
        self.count = 0

    def look(self) -> None:
        with suppress(BlockingIOError):
            while chunk := os.read(self._descriptor, 65536):
                self.count += len(chunk)

    def until(self, count: int, ended: int) -> bool:
        """Waits for so many; False when the process of the descriptor `ended` has ended before."""
        while self.count < count:
            ready, _, _ = select.select([self._descriptor, ended], [], [], PATIENCE_SECONDS)
            assert ready, f"only {self.count} of {count} batches were handed out"
            self.look()
            if ended in ready:
                return False
        return True

    def close(self) -> None:
        os.close(self._descriptor)


def killed(words: list[str], moment: Moment, passed_over: int, given: Given, folder: Path) -> bool:
    """Runs the command until the moment; whether it was still at work then. Nothing of it is left afterwards."""
    given.start_over()
    with Running(*words, folder=folder, warm=True) as running:
        ended = os.pidfd_open(running.process.pid)
        try:
            in_time = moment.batches is None or given.until(PEEKED + passed_over + moment.batches, ended)
        finally:
            os.close(ended)
        running.family()
        with suppress(subprocess.TimeoutExpired):
            running.process.wait(moment.seconds)
            in_time = False
        if in_time:
            # All at once: one that sees another's end must not put anything in order.
            running.process.send_signal(signal.SIGSTOP)
            for process in running.family():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            running.process.kill()
            running.process.wait()
        given.look()
        return in_time


def damage(checkpoint: Path, chance: random.Random) -> str:
    """What a bad disk makes of it: bytes that are missing, or others; which file was hit."""
    path = chance.choice(sorted(checkpoint.iterdir()))
    content = bytearray(path.read_bytes())
    if chance.random() < 0.5:
        content = content[: chance.randrange(len(content))]
    else:
        content[chance.randrange(len(content))] ^= 0x55
    path.write_bytes(content)
    return path.name


@dataclass
class Course:
    """A run that is killed again and again: where it stands, and what has been seen of it."""

    folder: Path
    given: Given
    chance: random.Random
    standing: Standing
    damaged: str = ""
    """The checkpoint that is to be refused by the next life."""
    torn: int = 0
    """Kills in the midst of a checkpoint."""
    max_lost: int = 0

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def live(self, moment: Moment) -> None:
        """One life, from where the one before has saved; checks that it began there and what it leaves."""
        before, run = self.standing, self.run
        words = ["train", "job.py", "--providers", "2", "--run", "run", "--no-display"]
        words += ["--resume"] if (run / "checkpoints").is_dir() else []
        words += ["--set", f"max_updates={before.updates + MORE_UPDATES}"] if moment.ends else []
        starts, refusals = len(events_of(run, "started")), len(events_of(run, "checkpoint_damaged"))
        was_killed = killed(words, moment, before.position, self.given, self.folder)
        started = [event["updates"] for event in events_of(run, "started")[starts:]]
        refused = [event["checkpoint"] for event in events_of(run, "checkpoint_damaged")[refusals:]]
        if moment.batches is not None:
            assert started == [before.updates]
        if started:
            assert started == [before.updates] and refused == [self.damaged] * bool(self.damaged)
            self.damaged = ""
        self.standing = after = Standing.of(run)
        self.torn += any((run / "checkpoints").glob(".pending-*"))
        # One more may have been taken from the data, and wait to be fed.
        fed = before.updates + max(0, self.given.count - PEEKED - before.position - 1)
        self.max_lost = max(self.max_lost, fed - after.updates)
        assert fed - after.updates <= EVERY
        assert seen_updates(run) - after.updates <= EVERY
        assert after.updates >= before.updates
        if not was_killed:
            assert moment.ends and Summary.read(run / "summary.json").status == "finished"
            assert after.updates == before.updates + MORE_UPDATES

    def damage(self) -> None:
        """Spoils the newest checkpoint, where there is one before it: the run is to go on from that."""
        newest = self.standing.saved
        if newest is not None and len(checkpoint_folders(newest.folder.parent)) > 1:
            damage(newest.folder, self.chance)
            self.damaged, self.standing = newest.folder.name, Standing.of(self.run)
            assert self.standing.saved is not None and self.standing.updates < newest.updates


@pytest.mark.timeout(2 * PATIENCE_SECONDS + 60 * KILLS)
def test_a_run_killed_at_random_moments_goes_on_each_time_and_loses_an_interval_at_most(tmp_path: Path) -> None:
    a_long_job(tmp_path)
    given, run = Given(tmp_path / "given"), tmp_path / "run"
    course = Course(tmp_path, given, random.Random(SEED + 1), Standing.of(run))
    for number, moment in enumerate(moments(KILLS, SEED)):
        # Shown when the test fails.
        stands = f"{course.standing.updates} updates saved, damaged: {course.damaged or 'none'}"
        print(f"RAVNEST_KILLS_SEED={SEED}, kill {number}, {moment}, {stands}")
        course.live(moment)
        if number % 3 == 2 and not course.damaged:
            course.damage()
    last = course.standing.updates + MORE_UPDATES
    words = ["train", "job.py", "--providers", "3", "--run", "run", "--resume", "--set", f"max_updates={last}"]
    with Running(*words, "--no-display", folder=tmp_path, warm=True) as running:
        running.patience_seconds = PATIENCE_SECONDS
        said = running.to_the_end()
        assert running.process.returncode == 0, said
    given.close()
    summary = Summary.read(run / "summary.json")
    assert (summary.status, summary.samples, summary.updates) == ("finished", BATCH * last, last)
    ledger = summary.ledger
    assert (ledger.fed, ledger.completed, ledger.lost, ledger.applied_twice) == (last, last, 0, 0)
    # Each batch was applied once, in its turn, however often the run was killed.
    expected, trained = plain(last), load_file(run / "model.safetensors")
    assert expected.keys() == trained.keys()
    worst = max(float((expected[name] - trained[name]).abs().max()) for name in expected)
    assert worst <= 1e-4, f"the model differs by {worst} from one trained without a break"
    print(
        f"{KILLS} kills, {course.torn} in the midst of a checkpoint; {last} updates, at most {course.max_lost} of "
        f"them lost at once with a checkpoint every {EVERY}; the model differs by {worst:.1e} from a plain loop's"
    )


def seen_updates(run: Path) -> int:
    """How many the run itself said last that it had come to."""
    curve = [line["updates"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]
    return curve[-1] if curve else 0


def test_what_a_kill_leaves_half_written_is_never_taken_for_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    half = folder / ".pending-12"
    half.mkdir(parents=True)
    (half / "part-0.safetensors").write_bytes(b"half")
    (half / "checkpoint.json").write_text(json.dumps({"format": 1, "updates": 12}))
    assert newest_good(folder) == (None, [])
    assert CheckpointStore(folder, keep=2).latest() is None
    assert list(folder.iterdir()) == []

"""A run of the embedded swarm that trains for as long as it is told, and is measured from outside while it does."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import psutil

from ravnest.errors import RunError
from ravnest.monitor.summary import Summary
from tests.soak.growth import Growth, Limit, growth

# Everything a run does over and over: many small updates, a checkpoint every few seconds, epochs that end with an
# evaluation, and with several clusters rounds as well. It is ended from outside.
JOB: Final = """\
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import ravnest

generator = torch.Generator().manual_seed(0)
batches = [(torch.randn(16, 32, generator=generator), torch.randint(8, (16,), generator=generator)) for _ in range(200)]
torch.manual_seed(0)


def data():
    for batch in batches:
        time.sleep({pause})
        yield batch


job = ravnest.Job(
    model=nn.Sequential(
        nn.Linear(32, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)
    ),
    loss=F.cross_entropy,
    train_data=data,
    eval_data=batches[:20],
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    epochs=1_000_000_000,
    checkpoint=ravnest.Checkpoint(every_seconds=3.0),
)
"""

_START_SECONDS: Final = 240.0
_END_SECONDS: Final = 30.0
_LOOKS: Final = 400
"""How often a long run is looked at; a short one is, every half second."""


# A microbatch of the job and its activations are about 50 KiB; over the hundred updates a second of a slow machine, one
# that is kept each time is 5 MiB a second. What a good run shows is some tenths of one MiB, in a minute as in an hour.
MEMORY_LIMIT: Final = Limit(4.0, "the ups and downs of allocators, while checkpoints and summaries are written")
FILES_LIMIT: Final = Limit(2.5, "a file that is being written, or a connection that is being replaced, at that moment")
THREADS_LIMIT: Final = Limit(2.5, "a pool's thread that happened not to be needed before")


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at one process."""

    seconds: float
    memory_mib: float
    files: int
    threads: int


class Soak:
    """What was seen of a run: every process by its name, and how many updates there were when."""

    def __init__(self) -> None:
        self.processes: dict[str, list[Sample]] = defaultdict(list)
        self.updates: list[tuple[float, int]] = []

    def look(self, name: str, process: psutil.Process, seconds: float) -> None:
        """Notes what the process has; one that has ended has nothing."""
        with suppress(psutil.NoSuchProcess), process.oneshot():
            # What is its own: pages that it shares with others come and go as the system likes.
            memory = process.memory_full_info().uss / 2**20
            self.processes[name].append(Sample(seconds, memory, process.num_fds(), process.num_threads()))

    def growths(self) -> Iterator[Growth]:
        for name, samples in self.processes.items():
            yield growth(name, "memory in MiB", [(s.seconds, s.memory_mib) for s in samples], MEMORY_LIMIT)
            yield growth(name, "open files", [(s.seconds, s.files) for s in samples], FILES_LIMIT)
            yield growth(name, "threads", [(s.seconds, s.threads) for s in samples], THREADS_LIMIT)

    def slowest_third(self) -> float:
        """Of the rate of updates over the whole run, that of its slowest third: what stands still does not grow."""
        begin, end = self.updates[0], self.updates[-1]
        whole = (end[1] - begin[1]) / (end[0] - begin[0])
        rates = []
        for third in range(3):
            low, high = (begin[0] + (end[0] - begin[0]) * part / 3 for part in (third, third + 1))
            within = [point for point in self.updates if low <= point[0] <= high]
            if len(within) < 2:
                return 0.0
            rates.append((within[-1][1] - within[0][1]) / (within[-1][0] - within[0][0]))
        return min(rates) / whole if whole else 0.0

    def to_json(self) -> dict[str, object]:
        samples = {name: [asdict(sample) for sample in seen] for name, seen in self.processes.items()}
        return {"processes": samples, "updates": self.updates}


def soak(
    folder: Path,
    minutes: float,
    providers: int = 2,
    clusters: int = 1,
    say: Callable[[str], None] = print,
    max_a_second: float = math.inf,
) -> Soak:
    """Trains in `folder` for so long, with so many batches a second at most, and looks at all processes meanwhile;
    RuntimeError when the run ends before."""
    (folder / "job.py").write_text(JOB.format(pause=1 / max_a_second))
    seconds = 60 * minutes
    every, tell_every = max(0.5, seconds / _LOOKS), max(60.0, seconds / 20)
    seen, told = Soak(), time.monotonic()
    with _running(folder, providers, clusters) as process:
        _first_update(folder, process)
        named = _named(process)
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < seconds:
            for name, each in named.items():
                seen.look(name, each, elapsed)
            seen.updates.append((elapsed, Summary.read(folder / "run/summary.json").updates))
            if time.monotonic() - told > tell_every:
                told = time.monotonic()
                say(f"{elapsed / 60:.0f} min, {seen.updates[-1][1]:,} updates: {_in_words(seen)}")
            _passes(process, every, folder)
        process.send_signal(signal.SIGTERM)
        process.wait(_END_SECONDS)
    summary = Summary.read(folder / "run/summary.json")
    if summary.status != "stopped":
        raise RuntimeError(f"the run did not end in good order: {summary.status}, {summary.reason}")
    return seen


@contextmanager
def _running(folder: Path, providers: int, clusters: int) -> "Iterator[subprocess.Popen[bytes]]":
    command = [sys.executable, "-m", "ravnest", "train", "job.py", "--run", "run", "--no-display"]
    command += ["--providers", str(providers), "--clusters", str(clusters)]
    with open(folder / "said", "wb") as said:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
    try:
        yield process
    finally:
        # Providers end with the pipe to their coordinator.
        process.kill()
        process.wait()


def _passes(process: "subprocess.Popen[bytes]", seconds: float, folder: Path) -> None:
    """Returns after so long; RuntimeError when the run has ended before."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        raise RuntimeError(f"the run has ended with exit code {process.returncode}: {_said(folder)}")


def _first_update(folder: Path, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        with suppress(RunError):
            if Summary.read(folder / "run/summary.json").updates:
                return
        _passes(process, 0.25, folder)
    raise RuntimeError(f"there was no update within {_START_SECONDS:.0f} s: {_said(folder)}")


def _named(process: "subprocess.Popen[bytes]") -> dict[str, psutil.Process]:
    """The run's processes: the coordinator, and the providers by their names."""
    coordinator = psutil.Process(process.pid)
    named = {"coordinator": coordinator}
    for child in coordinator.children(recursive=True):
        words = child.cmdline()
        if "--embedded" in words:
            named[words[words.index("--name") + 1]] = child
    return dict(sorted(named.items()))


def _in_words(seen: Soak) -> str:
    last = {name: samples[-1] for name, samples in seen.processes.items()}
    return ", ".join(f"{name} {s.memory_mib:.1f} MiB {s.files} files {s.threads} threads" for name, s in last.items())


def _said(folder: Path) -> str:
    return (folder / "said").read_text(errors="replace")[-1000:]


def write(seen: Soak, path: Path) -> None:
    """Keeps every look, for whoever wants to see the curves."""
    path.write_text(json.dumps(seen.to_json()) + "\n")

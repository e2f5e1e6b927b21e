"""Isolated trials: processes forked from one that has loaded torch, each with many cases.

A child writes its current case and node into memory that it shares with its parent. If the child dies or hangs, the
parent knows the case and continues after it with another child.
"""

import contextlib
import gc
import json
import mmap
import os
import resource
import select
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.fuzz.graphs.cases import Case
from tests.fuzz.graphs.memory import GuardedMemory
from tests.fuzz.graphs.trial import Found, run

CASE_SECONDS: Final = 20.0
BATCH: Final = 1000
_PLACE: Final = struct.Struct("qqd")


@dataclass
class Failure:
    """A graph that broke a rule."""

    case: Case
    reason: str
    node: int
    """Number of the current node; -1 in the backward."""

    def __str__(self) -> str:
        operator = "the backward" if self.node < 0 else self.case.nodes[self.node]["op"]
        return f"graph {self.case.number}: {self.reason} at {operator} ({', '.join(self.case.operators())})"


@dataclass
class Tally:
    """Totals of all cases."""

    graphs: int = 0
    ran: Counter[str] = field(default_factory=Counter)
    """Number of graphs in which each operator ran."""
    ended: Counter[str] = field(default_factory=Counter)
    """Number of graphs by the exception that ended them."""
    backwards: int = 0
    failures: list[Failure] = field(default_factory=list)


def trials(
    cases: Callable[[int], Case],
    numbers: Sequence[int],
    memory: GuardedMemory | None,
    on_failure: Callable[[Failure], None] = lambda failure: None,
    until: float = float("inf"),
    seconds: float = CASE_SECONDS,
) -> Tally:
    """Run these cases one after the other; stops early at `until` (of time.monotonic)."""
    tally = Tally()
    place = 0
    # Frozen objects are not scanned by the garbage collector of a child, and so their memory is not copied.
    gc.freeze()
    while place < len(numbers) and time.monotonic() < until:
        batch = numbers[place : place + BATCH]
        done, failure = _batch(cases, batch, memory, tally, seconds)
        tally.graphs += done
        place += done
        if failure is not None:
            tally.failures.append(failure)
            on_failure(failure)
    return tally


def _batch(
    cases: Callable[[int], Case], numbers: Sequence[int], memory: GuardedMemory | None, tally: Tally, seconds: float
) -> tuple[int, Failure | None]:
    """The number of completed cases, and the failure that ended them early."""
    shared = mmap.mmap(-1, _PLACE.size)
    shared.write(_PLACE.pack(0, 0, time.monotonic()))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(cases, numbers, memory, shared, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as results:
        text, hung = _results(results.fileno(), child, shared, seconds)
    _, status = os.waitpid(child, 0)
    lines = text.decode(errors="replace").split("\n")
    done = 0
    for line in lines[:-1]:
        found = Found(**json.loads(line))
        done += 1
        tally.backwards += found.went_back
        tally.ended[found.ended.partition(":")[0]] += 1
        tally.ran.update(set(found.ran))
        if found.wrong:
            # The case may have damaged the memory of its process, so the next case gets a new process.
            return done, Failure(cases(numbers[done - 1]), found.wrong, int(_PLACE.unpack(shared[:])[1]))
    if done == len(numbers):
        return done, None
    _, node, _ = _PLACE.unpack(shared[:])
    reason = f"hung for {seconds:.0f} s" if hung else _ended_by(status)
    return done + 1, Failure(cases(numbers[done]), reason, int(node))


def _ended_by(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"died of {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended its process with {os.waitstatus_to_exitcode(status)}"


def _results(descriptor: int, child: int, shared: mmap.mmap, seconds: float) -> tuple[bytes, bool]:
    """The output of the child until its end, and whether it had to be killed."""
    text, hung = b"", False
    while True:
        ready, _, _ = select.select([descriptor], [], [], 1.0)
        if ready:
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                return text, hung
            text += chunk
        elif time.monotonic() - _PLACE.unpack(shared[:])[2] > seconds:
            hung = True
            os.kill(child, signal.SIGKILL)


def _child(
    cases: Callable[[int], Case],
    numbers: Sequence[int],
    memory: GuardedMemory | None,
    shared: mmap.mmap,
    writing: int,
) -> None:
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with _quiet():
            for place, number in enumerate(numbers):

                def tell(node: int, place: int = place) -> None:
                    shared[:] = _PLACE.pack(place, node, time.monotonic())

                tell(0)
                found = run(cases(number), memory, tell)
                os.write(writing, json.dumps(vars(found)).encode() + b"\n")
                if found.wrong:
                    break
        code = 0
    finally:
        os._exit(code)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warnings, of which hostile arguments cause many."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    if "RAVNEST_FUZZ_LOUD" not in os.environ:
        os.dup2(null, 2)
    yield

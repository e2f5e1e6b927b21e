"""Simulated pace of another machine: a wait after each piece of work makes it take as long as on that machine.

Used to try out swarms of unequal machines, and long pipelines, on one machine. The wait takes no CPU time, and results
are sent after it, as on a machine that is really slower.
"""

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch

from ravnest.engine.speed.device_speed import wait_for
from ravnest.graph.clock import work_clock

MAX_LATE_SECONDS: Final = 0.1
_REMEMBERED: Final = 64


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Simulated time of a forward, and of a backward with its update, at any stage."""

    forward: float
    backward: float

    def __post_init__(self) -> None:
        assert all(0 < each < math.inf for each in (self.forward, self.backward)), f"no stage can take {self}"

    def of_kind(self, kind: str, split_backward: bool = False) -> float:
        """The simulated time of this kind of work; 0 for a kind whose time is not simulated.

        With a split backward, the gradients for the stage before and the weight gradients take half of it each.
        """
        seconds = {"forward": self.forward, "evaluate": self.forward, "backward": self.backward}
        if split_backward:
            seconds |= {"backward": self.backward / 2, "weights": self.backward / 2}
        return seconds.get(kind, 0.0)


@dataclass(frozen=True, slots=True)
class Pretence:
    """Machine to simulate: one that is `slower` times as slow, or one on which every stage takes these `seconds`."""

    slower: float = 1.0
    seconds: StageSeconds | None = None

    def __post_init__(self) -> None:
        assert 1 <= self.slower < math.inf, f"no machine can be {self.slower} times slower"

    @property
    def stage_seconds(self) -> float:
        """Simulated time of a forward and a backward together; 0 if it depends on the stage."""
        return 0.0 if self.seconds is None else self.seconds.forward + self.seconds.backward

    @property
    def in_words(self) -> str:
        """The simulation in words, for users; empty if nothing is simulated."""
        if self.seconds is not None:
            forward, backward = 1e3 * self.seconds.forward, 1e3 * self.seconds.backward
            return (
                f"it computes as a machine on which any stage takes {forward:g} ms forward and {backward:g} ms backward"
            )
        return f"it computes as a machine that is {self.slower:g} times slower than it is" if self.slower > 1 else ""


NO_PRETENCE: Final = Pretence()


class Pace:
    """Makes each piece of one thread's work take as long as on the simulated machine."""

    def __init__(
        self,
        pretence: Pretence = NO_PRETENCE,
        device: torch.device | str = "cpu",
        split_backward: bool = False,
        *,
        sleep: Callable[[float], object] | None = None,
        max_late_seconds: float = MAX_LATE_SECONDS,
    ) -> None:
        """`sleep` replaces the wait that `end` interrupts. A wait is shortened by the delay with which the thread
        returned from earlier waits, by at most `max_late_seconds`."""
        self.overruns = 0
        """Number of pieces of work that took longer than the simulated time."""
        self._slower = pretence.slower
        self._seconds = pretence.seconds
        self._split_backward = split_backward
        self._device = torch.device(device)
        self._ended = threading.Event()
        self._sleep = sleep or self._ended.wait
        self._max_late_seconds = max_late_seconds
        self._late_seconds = 0.0
        self._past: dict[str, deque[float]] = {}

    @contextlib.contextmanager
    def work(self, kind: str) -> Iterator[None]:
        """Context of a piece of work; unless it fails, waits afterwards for the rest of its simulated time.

        On a CPU with one computing thread, the thread's CPU time counts: a real slower machine would not share its CPU.
        """
        if self._seconds is not None:
            began = time.perf_counter()
            yield
            if wanted := self._seconds.of_kind(kind, self._split_backward):
                wait_for(self._device)
                self.overruns += time.perf_counter() - began > wanted
                self.wait_until(began + wanted)
            elif kind == "update":
                # Part of the simulated backward, whose gradients have been sent already: shorten the next wait.
                self._late_seconds = min(self._late_seconds + time.perf_counter() - began, self._max_late_seconds)
            return
        if self._slower == 1.0:
            yield
            return
        clock = work_clock() if self._device.type == "cpu" else time.perf_counter
        began, began_work = time.perf_counter(), clock()
        yield
        wait_for(self._device)
        self.wait_until(began + self._slower * self._usual(kind, clock() - began_work))

    def end(self) -> None:
        """Ends the current wait and skips all later ones. May be called from any thread."""
        self._ended.set()

    def _usual(self, kind: str, seconds: float) -> float:
        """The usual time of such work without interruptions.

        Interrupts count as the thread's CPU time, and on a machine that simulates several providers they are due to the
        others too. Without this correction the simulation would multiply them.
        """
        past = self._past.setdefault(kind, deque(maxlen=_REMEMBERED))
        past.append(seconds)
        similar = sorted(each for each in past if seconds / 2 <= each <= 2 * seconds)
        return min(seconds, similar[len(similar) // 4])

    def wait_until(self, moment: float) -> None:
        # The operating system wakes a thread slightly late each time; shorten the next wait by this delay.
        moment -= self._late_seconds
        left = moment - time.perf_counter()
        if left > 0:
            self._sleep(left)
        self._late_seconds = min(max(0.0, time.perf_counter() - moment), self._max_late_seconds)

"""Computing as another machine would: each piece of work is followed by a wait that makes it as long as it would be
there.

For trying out swarms of unequal machines, and long pipelines, on one machine. Waiting takes no processor time, and
whatever comes out of a piece of work leaves after the wait, as it would on a machine that really is slower.
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
    """How long a forward takes, and a backward with the update that follows it, whatever the stage."""

    forward: float
    backward: float

    def __post_init__(self) -> None:
        assert all(0 < each < math.inf for each in (self.forward, self.backward)), f"no stage can take {self}"

    def of(self, kind: str, split_backward: bool = False) -> float:
        """Of a piece of work of some kind; 0 for kinds that take what they take.

        Where a backward is split, the gradients for the stage before and those for its own weights take half each.
        """
        seconds = {"forward": self.forward, "evaluate": self.forward, "backward": self.backward}
        if split_backward:
            seconds |= {"backward": self.backward / 2, "weights": self.backward / 2}
        return seconds.get(kind, 0.0)


@dataclass(frozen=True, slots=True)
class Pretence:
    """What a machine pretends to be: so many times slower than it is, or one on which every stage takes so long."""

    slower: float = 1.0
    seconds: StageSeconds | None = None

    def __post_init__(self) -> None:
        assert 1 <= self.slower < math.inf, f"nothing can be {self.slower} times slower"

    @property
    def stage_seconds(self) -> float:
        """Of a forward and a backward, whatever the stage; 0 where that depends on it."""
        return 0.0 if self.seconds is None else self.seconds.forward + self.seconds.backward

    @property
    def in_words(self) -> str:
        """For those who look at the machine; nothing where it does not pretend."""
        if self.seconds is not None:
            forward, backward = 1e3 * self.seconds.forward, 1e3 * self.seconds.backward
            return (
                f"it computes as a machine on which any stage takes {forward:g} ms forward and {backward:g} ms backward"
            )
        return f"it computes as a machine that is {self.slower:g} times slower than it is" if self.slower > 1 else ""


NO_PRETENCE: Final = Pretence()


class Pace:
    """Makes the pieces of one thread's work as long as they would be on the machine that is pretended."""

    def __init__(
        self,
        pretence: Pretence = NO_PRETENCE,
        device: torch.device | str = "cpu",
        split_backward: bool = False,
        *,
        sleep: Callable[[float], object] | None = None,
        max_late_seconds: float = MAX_LATE_SECONDS,
    ) -> None:
        """`sleep` replaces the wait that `end` interrupts. A wait is shortened by how late the thread came back from
        earlier ones, by `max_late_seconds` at most."""
        self.overruns = 0
        """Pieces of work that took longer than `seconds` says, and so were not as long as they should be."""
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
        """A piece of work of some kind. After it, unless it failed, waits as long as that machine would still work.

        On a processor with one thread, what counts is the time that the thread got of it: a slower machine of one's own
        would not have been shared with others.
        """
        if self._seconds is not None:
            began = time.perf_counter()
            yield
            if wanted := self._seconds.of(kind, self._split_backward):
                wait_for(self._device)
                self.overruns += time.perf_counter() - began > wanted
                self.wait_until(began + wanted)
            elif kind == "update":
                # A part of what a backward is to take: the gradients have left by then, and the next wait is shorter.
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
        """Ends the wait under way, and all later ones before they begin. From any thread."""
        self._ended.set()

    def _usual(self, kind: str, seconds: float) -> float:
        """What such work takes when nothing comes in between.

        Interrupts that are served meanwhile count as this thread's time, and on a machine that plays several they are
        the others' too: they would be made so many times longer.
        """
        past = self._past.setdefault(kind, deque(maxlen=_REMEMBERED))
        past.append(seconds)
        alike = sorted(each for each in past if seconds / 2 <= each <= 2 * seconds)
        return min(seconds, alike[len(alike) // 4])

    def wait_until(self, moment: float) -> None:
        # A thread is woken a moment too late each time, or gets the processor late: the next wait is so much shorter.
        moment -= self._late_seconds
        left = moment - time.perf_counter()
        if left > 0:
            self._sleep(left)
        self._late_seconds = min(max(0.0, time.perf_counter() - moment), self._max_late_seconds)

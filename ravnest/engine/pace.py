"""Computing as a slower machine would: each piece of work is followed by a wait that makes it that much longer.

For trying out swarms of unequal machines on one machine. Waiting takes no processor time, and whatever comes out of a
piece of work leaves after the wait, as it would on a machine that really is slower.
"""

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

import torch

from ravnest.engine.speed import wait_for
from ravnest.graph.clock import work_clock

_MOST_LATE_SECONDS: Final = 0.1
_REMEMBERED: Final = 64


class Pace:
    """Makes one thread's work `slower` times as long; 1 leaves it as it is."""

    def __init__(self, slower: float = 1.0, device: torch.device | str = "cpu") -> None:
        assert 1 <= slower < math.inf, f"nothing can be {slower} times slower"
        self.slower = slower
        self._device = torch.device(device)
        self._ended = threading.Event()
        self._late_seconds = 0.0
        self._past: dict[str, deque[float]] = {}

    @contextlib.contextmanager
    def work(self, kind: str) -> Iterator[None]:
        """A piece of work of some kind. After it, unless it failed, waits as long as a slower machine would still work.

        On a processor with one thread, what counts is the time that the thread got of it: a slower machine of one's own
        would not have been shared with others.
        """
        if self.slower == 1.0:
            yield
            return
        clock = work_clock() if self._device.type == "cpu" else time.perf_counter
        began, began_work = time.perf_counter(), clock()
        yield
        wait_for(self._device)
        self._wait_until(began + self.slower * self._usual(kind, clock() - began_work))

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

    def _wait_until(self, moment: float) -> None:
        # A thread is woken a moment too late each time, or gets the processor late: the next wait is so much shorter.
        moment -= self._late_seconds
        left = moment - time.perf_counter()
        if left > 0:
            self._ended.wait(left)
        self._late_seconds = min(max(0.0, time.perf_counter() - moment), _MOST_LATE_SECONDS)

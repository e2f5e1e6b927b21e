"""Computing as a slower machine would: each piece of work is followed by a wait that makes it that much longer.

For trying out swarms of unequal machines on one machine. Waiting takes no processor time, and whatever comes out of a
piece of work leaves after the wait, as it would on a machine that really is slower.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator

import torch

from ravnest.engine.speed import wait_for
from ravnest.graph.clock import work_clock


class Pace:
    """Makes one thread's work `slower` times as long; 1 leaves it as it is."""

    def __init__(self, slower: float = 1.0, device: torch.device | str = "cpu") -> None:
        assert 1 <= slower < math.inf, f"nothing can be {slower} times slower"
        self.slower = slower
        self._device = torch.device(device)
        self._ended = threading.Event()
        self._waited_too_long_seconds = 0.0

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """A piece of work: after it, waits for as long as a slower machine would still be at it. Not after an error.

        On a processor with one thread, what counts is the time that the thread got of it: what others took would not
        have been more on a slower machine.
        """
        if self.slower == 1.0:
            yield
            return
        clock = self._clock()
        began = clock()
        yield
        wait_for(self._device)
        self._wait((self.slower - 1.0) * (clock() - began))

    def end(self) -> None:
        """Ends the wait under way, and all later ones before they begin. From any thread."""
        self._ended.set()

    def _wait(self, seconds: float) -> None:
        # A thread is woken a moment too late each time; the next wait is so much shorter.
        wanted = seconds - self._waited_too_long_seconds
        began = time.perf_counter()
        if wanted > 0:
            self._ended.wait(wanted)
        self._waited_too_long_seconds = time.perf_counter() - began - wanted

    def _clock(self) -> Callable[[], float]:
        return work_clock() if self._device.type == "cpu" else time.perf_counter

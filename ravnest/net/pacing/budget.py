"""State budget of a process: transfers of state wait here for their turn on the line.

Two conditions hold for a turn. On average state keeps to `state_rate`. And the line is free: no foreground bytes wait
to be written, and by the line's rate everything that was sent before has left, so that queues in the kernel and the
modem stay short and an activation waits for one small piece at most. State that was held up for a moment catches up
within its average. However busy the line is, state keeps its floor.

While nothing of the foreground passes for a while, nothing can be delayed, and whatever is waiting waits for the state:
the budget then does not hold. A turn that is cancelled takes nothing. A line whose rate is not known is treated as a
slow one until transfers show its rate. One budget serves event loops and threads at the same time.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final

from ravnest.net.pacing.foreground import RecentRate
from ravnest.net.pacing.line_rate import UplinkRate
from ravnest.net.pacing.state_rate import (
    DEFAULT_SETTINGS,
    PRIORITIES,
    PacingSettings,
    StateKind,
    piece_bytes,
    state_rate,
)

_CATCH_UP_SECONDS: Final = 1.0
"""State that was held up may catch up with this much of its average."""
IDLE_SECONDS: Final = 10.0
"""Without a frame of a stage for this time, the machine does not train at present."""
_LOOK_SECONDS: Final = 1.0
"""A waiting transfer looks again after this time: the foreground's average fades meanwhile."""
_MIN_DELIVERY_SECONDS: Final = 1e-3
_SOON_SECONDS: Final = 1e-4
"""A shorter wait is none: timers are no finer."""
_LONGEST_BACKLOG_SECONDS: Final = 0.5
"""Limit of the foreground that the line is believed to be still busy with: the line may be faster than was measured."""


class StateBudget:
    """The budget of one process. Any thread may call every method; `turn` needs a running event loop."""

    def __init__(
        self,
        settings: PacingSettings = DEFAULT_SETTINGS,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_limited: bool = True,
    ) -> None:
        """Without `is_limited` every turn comes at once: all machines of the swarm are this one."""
        self._settings = settings
        self._clock = clock
        self._is_limited = is_limited
        self._lock = threading.Lock()
        self._line = UplinkRate()
        self._recent = RecentRate(clock)
        self._waiting: list[Ticket] = []
        self._number = 0
        self._queued_bytes = 0
        self._credit_bytes = 0.0
        self._credited_at = self._free_at = self._floor_at = clock()
        self._share = 1.0
        self._worked_at = -math.inf
        self._is_lifted = False
        self.control = _Traffic(self, is_work=False)
        """Counts control messages: they are foreground, and are sent whether the machine trains or not."""
        self.nearby = _Traffic(self, is_nearby=True)
        """Counts the foreground towards machines on the same network, which does not pass the uplink."""

    @classmethod
    def unlimited(cls) -> "StateBudget":
        """A budget that holds nothing back."""
        return cls(is_limited=False)

    @property
    def line_bytes_per_second(self) -> float:
        """Rate of the line that state is paced by; infinite without limits."""
        with self._lock:
            return self._line.bytes_per_second if self._is_limited else math.inf

    @property
    def piece_bytes(self) -> int:
        """Size in which to send state: a turn for more would make an activation wait."""
        return piece_bytes(self.line_bytes_per_second, self._settings)

    def rate(self, kind: StateKind = "replica") -> tuple[float, str]:
        """Bytes per second that state of this kind may take at present, and why."""
        with self._lock:
            rate, reason = self._rate(kind)
            return rate, f"{reason} ({self._line.reason})"

    async def turn(
        self, size_bytes: int, kind: StateKind, *, urgent: bool = False, max_bytes_per_second: float = 0.0
    ) -> None:
        """Return when these bytes may be sent. Urgent ones at once: a cluster stands still until they are there.

        `max_bytes_per_second` is for one turn by itself; for a whole transfer use `transfer`.
        """
        await self.transfer(kind, urgent=urgent, max_bytes_per_second=max_bytes_per_second).turn(size_bytes)

    def wait_turn(
        self, size_bytes: int, kind: StateKind, *, urgent: bool = False, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """The same for a thread. Returns early once `is_over`."""
        self.transfer(kind, urgent=urgent).wait_turn(size_bytes, is_over)

    def transfer(self, kind: StateKind, *, urgent: bool = False, max_bytes_per_second: float = 0.0) -> "PacedTransfer":
        """A transfer that takes turns. `max_bytes_per_second` protects the line of its receiver; 0: no such limit."""
        return PacedTransfer(self, kind, urgent=urgent, max_bytes_per_second=max_bytes_per_second)

    def measured(self, bytes_per_second: float, *, is_nearby: bool = False) -> None:
        """The uplink was measured on some connection; `is_nearby`: to a machine on the same network."""
        with self._lock:
            self._line.measured(bytes_per_second, is_nearby=is_nearby)
            first = self._first()
        _wake(first)

    def limit(self, bytes_per_second: float) -> None:
        """The user allows no more than this, for state and foreground together."""
        with self._lock:
            self._line.limit(bytes_per_second)

    def reduce(self, share: float) -> None:
        """Let state take only this share of its rate, from 0 to 1, unless it is lifted: the month's data runs out."""
        with self._lock:
            self._share = min(1.0, max(0.0, share))

    def lift(self) -> None:
        """Let state take all that the foreground leaves from now on: this machine leaves, and hands its state over.

        The data that this takes is kept in reserve, so a reduced share does not hold any more."""
        with self._lock:
            self._is_lifted = True
            first = self._first()
        _wake(first)

    def observed(self, size_bytes: int, busy_seconds: float) -> None:
        """A burst of state was confirmed after this time, round trip excluded."""
        with self._lock:
            self._line.observed(size_bytes, busy_seconds)

    def queued(self, size_bytes: int) -> None:
        """These bytes of the foreground wait to be written."""
        with self._lock:
            self._queued_bytes += size_bytes

    def written(self, size_bytes: int, *, is_work: bool = True, is_nearby: bool = False) -> None:
        """A connection has taken these bytes of the foreground; `is_work`: of a stage that trains."""
        with self._lock:
            self._queued_bytes -= size_bytes
            now, line = self._clock(), self._line.bytes_per_second
            self._worked_at = now if is_work else self._worked_at
            if not (is_nearby and self._line.leads_outside):
                self._recent.add(size_bytes)
                self._free_at = min(max(now, self._free_at) + size_bytes / line, now + _LONGEST_BACKLOG_SECONDS)
            first = self._first() if self._queued_bytes <= 0 else None
        _wake(first)

    def delivered(self, size_bytes: int, seconds: float, *, is_nearby: bool = False) -> None:
        """A large frame of the foreground was confirmed after this time: the line is at least so fast."""
        with self._lock:
            self._line.proved(size_bytes / max(seconds, _MIN_DELIVERY_SECONDS), is_nearby=is_nearby)

    def dropped(self, size_bytes: int) -> None:
        """A connection broke before it took these bytes of the foreground."""
        with self._lock:
            self._queued_bytes -= size_bytes
            first = self._first() if self._queued_bytes <= 0 else None
        _wake(first)

    def join(self, kind: StateKind, size_bytes: int, wake: Callable[[], None]) -> "Ticket":
        """Queue up for a turn; `wake` is called, on any thread, when it is worth an attempt."""
        with self._lock:
            self._number += 1
            ticket = Ticket(PRIORITIES[kind], self._number, kind, size_bytes, self._clock(), wake)
            self._waiting.append(ticket)
        return ticket

    def attempt(self, ticket: "Ticket") -> float:
        """0 if the turn has come, otherwise the time after which to try again; infinite: when woken."""
        with self._lock:
            if self._first() is not ticket:
                # A ticket overtakes those of a higher priority when it has waited for long.
                patience_seconds = self._patience_seconds(ticket)
                return max(patience_seconds, _SOON_SECONDS) if patience_seconds > 0 else math.inf
            now = self._clock()
            wait_seconds = self._wait_seconds(ticket, now)
            if wait_seconds > _SOON_SECONDS:
                return min(wait_seconds, _LOOK_SECONDS)
            line = self._line.bytes_per_second
            self._credit_bytes -= ticket.size_bytes
            self._free_at = max(now, self._free_at) + ticket.size_bytes / (self._settings.left_share * line)
            self._floor_at = now + self._floor_seconds(ticket.size_bytes)
            return 0.0

    def leave(self, ticket: "Ticket") -> None:
        """The turn was taken or given up: the next one may come."""
        with self._lock:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            first = self._first()
        _wake(first)

    def took_at_once(self, size_bytes: int) -> None:
        """Urgent bytes were sent without a turn: other state waits until the line has taken them."""
        with self._lock:
            now = self._clock()
            free_at = max(now, self._free_at) + size_bytes / self._line.bytes_per_second
            self._free_at = min(free_at, now + _LONGEST_BACKLOG_SECONDS)

    @property
    def is_limited(self) -> bool:
        return self._is_limited

    @property
    def learns(self) -> bool:
        """Whether the line's rate is to be learned from transfers."""
        return self._is_limited and not self._line.is_measured

    @property
    def now(self) -> float:
        return self._clock()

    def _first(self) -> "Ticket | None":
        """The ticket whose turn is next: those that have waited for long, then by priority."""
        return min(self._waiting, key=self._place, default=None)

    def _place(self, ticket: "Ticket") -> tuple[bool, float, int]:
        is_patient = self._patience_seconds(ticket) > 0
        return is_patient, ticket.priority if is_patient else ticket.began_at, ticket.number

    def _patience_seconds(self, ticket: "Ticket") -> float:
        """Time until a ticket has waited longer than its share of the line would take."""
        share = self._settings.transfer_share * self._line.bytes_per_second
        return max(0.0, ticket.began_at + ticket.size_bytes / share - self._clock())

    def _rate(self, kind: StateKind) -> tuple[float, str]:
        line = self._line.bytes_per_second
        trains = self._clock() - self._worked_at < IDLE_SECONDS
        has_budget = trains and kind != "round" and not self._is_lifted
        rate, reason = state_rate(line, self._recent.bytes_per_second, self._settings, has_budget=has_budget)
        if self._share < 1.0 and not self._is_lifted:
            floor = self._settings.floor_share * line
            return max(floor, rate * self._share), f"{reason}, reduced to {self._share:.0%}"
        return rate, reason

    def _wait_seconds(self, ticket: "Ticket", now: float) -> float:
        rate, _ = self._rate(ticket.kind)
        credit = self._credit_bytes + rate * (now - self._credited_at)
        self._credit_bytes = min(credit, rate * _CATCH_UP_SECONDS)
        self._credited_at = now
        budget_seconds = max(0.0, -self._credit_bytes) / rate
        line_seconds = math.inf if self._queued_bytes > 0 else max(0.0, self._free_at - now)
        floor_at = max(self._floor_at, ticket.began_at + self._floor_seconds(ticket.size_bytes))
        return min(max(budget_seconds, line_seconds), max(0.0, floor_at - now))

    def _floor_seconds(self, size_bytes: int) -> float:
        """Time in which these bytes go through however busy the line is."""
        return size_bytes / (self._settings.floor_share * self._line.bytes_per_second)


class PacedTransfer:
    """Turns of one transfer, which also keeps to a limit of its own."""

    def __init__(
        self, budget: StateBudget, kind: StateKind, *, urgent: bool = False, max_bytes_per_second: float = 0.0
    ) -> None:
        self._budget = budget
        self._kind = kind
        self._urgent = urgent
        usable = math.isfinite(max_bytes_per_second) and max_bytes_per_second > 0
        self._max_bytes_per_second = max_bytes_per_second if usable else math.inf
        self._due_at = budget.now

    def hurry(self) -> None:
        """The rest is urgent: a cluster stands still until it is there. Any thread may call this."""
        self._urgent = True

    @property
    def piece_bytes(self) -> int:
        """Size in which to send, see StateBudget.piece_bytes."""
        budget = self._budget
        slowest = min(budget.line_bytes_per_second, self._max_bytes_per_second)
        return DEFAULT_SETTINGS.max_piece_bytes if self._urgent else piece_bytes(slowest)

    @property
    def learns(self) -> bool:
        """Whether the line's rate is not known, so that answers to each piece would show it."""
        return self._budget.learns and not self._urgent

    def observed(self, size_bytes: int, busy_seconds: float) -> None:
        """See StateBudget.observed."""
        self._budget.observed(size_bytes, busy_seconds)

    async def pieces(self, data: bytes) -> AsyncIterator[bytes]:
        """The bytes in pieces of the size that the line takes, each when its turn has come."""
        start = 0
        while start < len(data):
            piece = data[start : start + self.piece_bytes]
            await self.turn(len(piece))
            yield piece
            start += len(piece)

    async def turn(self, size_bytes: int) -> None:
        """Return when these bytes may be sent."""
        if self._passes(size_bytes):
            return
        own_seconds = self._own_seconds(size_bytes)
        if own_seconds > 0:
            await asyncio.sleep(own_seconds)
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            # The loop may be over while another thread still sends.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(woken.set)

        ticket = self._budget.join(self._kind, size_bytes, wake)
        try:
            while (seconds := self._budget.attempt(ticket)) > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds if math.isfinite(seconds) else None):
                        await woken.wait()
                woken.clear()
        finally:
            self._budget.leave(ticket)

    def wait_turn(self, size_bytes: int, is_over: Callable[[], bool] = lambda: False) -> None:
        """The same for a thread. Returns early once `is_over`, which is looked at from time to time."""
        if self._passes(size_bytes):
            return
        woken = threading.Event()
        own_seconds = self._own_seconds(size_bytes)
        while own_seconds > 0 and not is_over():
            woken.wait(min(own_seconds, _LOOK_SECONDS))
            own_seconds -= _LOOK_SECONDS
        ticket = self._budget.join(self._kind, size_bytes, woken.set)
        try:
            while (seconds := self._budget.attempt(ticket)) > 0 and not is_over():
                woken.wait(min(seconds, _LOOK_SECONDS))
                woken.clear()
        finally:
            self._budget.leave(ticket)

    def _passes(self, size_bytes: int) -> bool:
        if not self._budget.is_limited:
            return True
        if self._urgent:
            self._budget.took_at_once(size_bytes)
        return self._urgent

    def _own_seconds(self, size_bytes: int) -> float:
        """Time until the transfer's own limit allows the next piece."""
        now = self._budget.now
        wait_seconds = max(0.0, self._due_at - now)
        self._due_at = max(self._due_at, now) + size_bytes / self._max_bytes_per_second
        return wait_seconds


class _Traffic:
    """Foreground of some connections, for the budget of their process."""

    def __init__(self, budget: StateBudget, *, is_work: bool = True, is_nearby: bool = False) -> None:
        self._budget = budget
        self._is_work = is_work
        self._is_nearby = is_nearby

    def queued(self, size_bytes: int) -> None:
        self._budget.queued(size_bytes)

    def written(self, size_bytes: int) -> None:
        self._budget.written(size_bytes, is_work=self._is_work, is_nearby=self._is_nearby)

    def delivered(self, size_bytes: int, seconds: float) -> None:
        # Control messages go to machines everywhere, and say nothing about one line.
        self._budget.delivered(size_bytes, seconds, is_nearby=self._is_nearby or not self._is_work)

    def dropped(self, size_bytes: int) -> None:
        self._budget.dropped(size_bytes)


@dataclass(eq=False)
class Ticket:
    """A transfer that waits for its turn."""

    priority: int
    number: int
    kind: StateKind
    size_bytes: int
    began_at: float
    wake: Callable[[], None] = field(repr=False)


def _wake(ticket: Ticket | None) -> None:
    if ticket is not None:
        ticket.wake()

"""Control of the microbatches in flight in one cluster, from the counts that its stages report one by one."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ravnest.planner.in_flight.decision import FlightDecision, decide_flight, when_planned
from ravnest.planner.in_flight.measures import FlightMeasures

MIN_MICROBATCHES: Final = 4
MIN_SECONDS: Final = 1.0
WINDOW_MICROBATCHES: Final = 96
WINDOW_SECONDS: Final = 4.0
"""Minimum length of a window, in both units; older counts are forgotten."""
_CHANGED: Final = 0.02
"""Relative difference between the halves of a window, beyond the error of counting whole microbatches, from which on
the second half is taken alone."""


@dataclass(frozen=True, slots=True)
class StageCounts:
    """Counts of a stage up to a moment of its own clock."""

    seconds: float
    forwards: int
    forward_seconds: float
    backwards: int
    backward_seconds: float
    """With the updates that follow them."""
    flight_seconds: float = 0.0
    """Sum over microbatches of the time between forward and backward."""
    delay_seconds: float = 0.0
    """Recent delay of the link to the next stage."""


def _has_changed(history: Sequence[StageCounts]) -> bool:
    """Whether a cluster has become slower or faster within the window of a stage."""
    first, middle, last = history[0], history[len(history) // 2], history[-1]
    before, after = middle.backwards - first.backwards, last.backwards - middle.backwards
    if min(before, after) < MIN_MICROBATCHES:
        return False
    then, now = (middle.seconds - first.seconds) / before, (last.seconds - middle.seconds) / after
    return abs(now - then) > (_CHANGED + 1 / before + 1 / after) * max(now, then)


class FlightControl:
    """Control of one cluster. `take` may be called whenever a stage reports, in any order of the stages."""

    def __init__(
        self,
        stages: int,
        limit: int,
        most: int,
        line_seconds: float = 0.0,
        *,
        looks_up: bool = False,
        cores_in_use: float = 0.0,
    ) -> None:
        """`most` may ever be in flight. `line_seconds` is the planned period if a line is the limit, else 0. With
        `looks_up`, microbatches begin and end at the leaf, which has a link to the root. `cores_in_use`: how many
        stages the cores of shared hosts can run at once, if the plan expects these to be the limit, else 0."""
        self.limit = limit
        self.reason = ""
        self.period_seconds = 0.0
        """Recent time from one microbatch to the next; 0 until it is known."""
        self.is_starved = False
        """Whether the root is fed more slowly than it could work."""
        self._most = most
        self._allowed: int | None = None
        self.wanted = limit
        """The limit if the learning rate allowed any number."""
        self._memory = when_planned(line_seconds)
        self._has_decided = False
        self._settled: int | None = None
        """Microbatches of the root after which the current limit shows in the counts; None until it is known."""
        self._done = 0
        """Microbatches of the root."""
        self._counts: list[deque[StageCounts]] = [deque() for _ in range(stages)]
        self._cores_in_use = cores_in_use
        self._links = stages if looks_up else stages - 1
        self._ends = stages - 1 if looks_up else 0
        """The stage where microbatches begin and end."""

    def hold(self, most: int) -> bool:
        """Caps the limit for good; returns whether that lowers it."""
        self._most = max(1, most)
        self.wanted = min(self.wanted, self._most)
        if self.limit <= self._most:
            return False
        self.limit = self._most
        self.restart()
        return True

    def allow(self, most: int) -> bool:
        """Caps the limit for the time being; returns whether that changes it.

        The cap says nothing about this cluster: when it rises, the limit returns to its earlier value.
        """
        self._allowed, before = max(1, most), self.limit
        self.limit = min(self.wanted, self._allowed)
        if self.limit == before:
            return False
        self._memory = replace(self._memory, trial=None)
        self.restart()
        return True

    @property
    def is_held(self) -> bool:
        """Whether the temporary cap keeps the limit down."""
        return self._allowed is not None and self._allowed <= self.limit < self._most

    def restart(self) -> None:
        """Forgets all counts: training stood still, or will, so that they do not show its rate."""
        self._settled = None
        for counts in self._counts:
            counts.clear()

    def take(self, stage: int, counts: StageCounts) -> FlightDecision | None:
        """Takes a stage's counts; returns a decision if the limit is to change."""
        if not self._has_decided:
            self._note_delay(stage, counts.delay_seconds)
        if not stage:
            if counts.backwards < self._done:
                # The root has started to count from zero.
                self.restart()
            self._done = counts.backwards
            if self._settled is None:
                self._settled = counts.backwards + self.limit + 1
            if counts.backwards < self._settled:
                return None
        if self._settled is None or (stage and not self._counts[0]):
            # The microbatches in flight started with another limit.
            return None
        history = self._counts[stage]
        if history and counts.backwards < history[-1].backwards:
            history.clear()
        history.append(counts)
        self._forget(history)
        while not stage and _has_changed(history):
            for each in self._counts:
                for _ in range(len(each) // 2):
                    each.popleft()
        seen = None if stage else self._measures()
        if seen is None:
            return None
        self._has_decided = True
        self.period_seconds, self.is_starved = seen.period_seconds, seen.is_starved
        most = self._most if self._allowed is None else min(self._most, self._allowed)
        decided = decide_flight(seen, self._memory, most)
        self._memory, self.reason = decided.memory, decided.reason
        if decided.forgets_counts:
            self._counts = [deque(list(each)[-1:]) for each in self._counts]
        if decided.limit == self.limit:
            return None
        self.restart()
        # The new limit shows once all microbatches in flight have come back.
        self._settled = counts.backwards + max(self.limit, decided.limit) + 1
        self.limit = self.wanted = decided.limit
        return decided

    def _note_delay(self, stage: int, seconds: float) -> None:
        """Keeps the shortest delay of a link from the start: the first microbatches on a line wait for no other."""
        known = list(self._memory.delays or [math.inf] * self._links)
        if stage < len(known) and seconds > 0:
            known[stage] = min(known[stage], seconds)
            self._memory = replace(self._memory, delays=tuple(known))

    def _forget(self, history: deque[StageCounts]) -> None:
        window = max(WINDOW_MICROBATCHES, 4 * self.limit)
        while len(history) > 2:
            last, second = history[-1], history[1]
            if last.backwards - second.backwards < window or last.seconds - second.seconds < WINDOW_SECONDS:
                break
            history.popleft()

    def _measures(self) -> FlightMeasures | None:
        """Measures of the window over all stages; None if it is too short."""
        seconds, periods = [], []
        for history in self._counts:
            if len(history) < 2:
                return None
            first, last = history[0], history[-1]
            done, took = last.backwards - first.backwards, last.seconds - first.seconds
            begun = last.forwards - first.forwards
            if begun < 1 or done < max(MIN_MICROBATCHES, self.limit) or took < MIN_SECONDS:
                return None
            forward = max(0.0, last.forward_seconds - first.forward_seconds) / begun
            seconds.append(forward + max(0.0, last.backward_seconds - first.backward_seconds) / done)
            periods.append((done, took))
        delays = tuple(history[-1].delay_seconds for history in self._counts[: self._links])
        first, last = self._counts[self._ends][0], self._counts[self._ends][-1]
        together = sum(done for done, _ in periods)
        return FlightMeasures(
            limit=self.limit,
            seconds=tuple(seconds),
            delays=delays,
            period_seconds=sum(took for _, took in periods) / together,
            flying=(last.flight_seconds - first.flight_seconds) / (last.seconds - first.seconds),
            microbatches=min(done for done, _ in periods),
            at_seconds=self._counts[0][-1].seconds,
            cores_in_use=self._cores_in_use,
        )

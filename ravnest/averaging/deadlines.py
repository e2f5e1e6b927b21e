"""Deadlines of a round: for members to join, to catch up and to reduce, learned from the rounds before.

A deadline follows the slowest of the recent rounds at once and forgets it slowly. When it cut members off, either it
was too short or they are dead: it doubles, and shrinks again with rounds that end in time. A deadline is a value
that yields the next one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

_MAX_SECONDS: Final = 1800.0
_MARGIN: Final = 3.0
"""A deadline is this many times the usual time, because a deadline that is too short costs a round and one that is too
long costs only time."""
_SHRINK: Final = 0.9


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """The shortest deadlines of a run."""

    min_joining_seconds: float = 5.0
    min_reducing_seconds: float = 10.0


DEFAULT_LIMITS: Final = RoundLimits()


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """The course of one phase of a round."""

    seconds: float
    """The time until the last of the members that made the deadline."""
    cut_off: int = 0
    """The number of members that missed it."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time to wait for one phase of a round."""

    usual_seconds: float
    min_seconds: float

    @classmethod
    def expecting(cls, seconds: float, min_seconds: float) -> Self:
        """The deadline of a phase that is expected to take this long."""
        return cls(min(seconds, _MAX_SECONDS / _MARGIN), min_seconds)

    @property
    def seconds(self) -> float:
        return min(max(_MARGIN * self.usual_seconds, self.min_seconds), _MAX_SECONDS)

    def after(self, took: PhaseTime) -> "Deadline":
        """The deadline for the next round."""
        usual = 2 * self.seconds / _MARGIN if took.cut_off else _SHRINK * self.usual_seconds
        return self.expecting(max(usual, took.seconds), self.min_seconds)


class Deadlines:
    """The deadlines of a run, round after round."""

    def __init__(
        self,
        join_estimate_seconds: float,
        catch_up_estimate_seconds: float,
        reduce_estimate_seconds: float,
        limits: RoundLimits = DEFAULT_LIMITS,
    ) -> None:
        """`join_estimate_seconds`: the expected time from the announcement of a round until all members have joined;
        `catch_up_estimate_seconds`: the expected time to send the anchor to an owner that is behind;
        `reduce_estimate_seconds`: the expected time of a reduce, from the bandwidth between the members."""
        self.joining = Deadline.expecting(join_estimate_seconds, limits.min_joining_seconds)
        self.catching_up = Deadline.expecting(catch_up_estimate_seconds, limits.min_reducing_seconds)
        self.reducing = Deadline.expecting(reduce_estimate_seconds, limits.min_reducing_seconds)

    def learn(
        self,
        joins: Iterable[PhaseTime | None],
        catch_ups: Iterable[PhaseTime | None],
        reduces: Iterable[PhaseTime | None],
    ) -> None:
        """Adapt to one round, given its phases on all rings; None for a ring that did not reach the phase."""
        joined, caught_up, reduced = _slowest(joins), _slowest(catch_ups), _slowest(reduces)
        if joined is not None:
            self.joining = self.joining.after(joined)
        if caught_up is not None:
            self.catching_up = self.catching_up.after(caught_up)
        if reduced is not None:
            self.reducing = self.reducing.after(reduced)


def _slowest(took: Iterable[PhaseTime | None]) -> PhaseTime | None:
    known = [each for each in took if each is not None]
    if not known:
        return None
    return PhaseTime(max(each.seconds for each in known), max(each.cut_off for each in known))

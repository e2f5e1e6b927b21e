"""How long a round waits: for members to join, and for a reduce to end. Learned from the rounds before.

A deadline follows the longest of recent times at once and forgets it slowly; where it cut members off it was too short,
or they are dead: it doubles, and shrinks again with rounds that end in time. Pure functions; every deadline says why.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_MARGIN: Final = 3.0
"""A deadline is this many times what is usual: one that is cut off costs a round, one that is waited for only time."""
_SHRINK: Final = 0.9
_SHORTEST_JOINING_SECONDS: Final = 5.0
_SHORTEST_REDUCING_SECONDS: Final = 10.0
_LONGEST_SECONDS: Final = 1800.0


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """How one round went, in one of its parts."""

    seconds: float
    """Until the last of those who made it."""
    cut_off: int = 0
    """How many did not make it in time."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """How long to wait, and why."""

    seconds: float
    reason: str
    usual_seconds: float
    shortest_seconds: float


class Deadlines:
    """The deadlines of a run, round after round."""

    def __init__(self, join_estimate_seconds: float, reduce_estimate_seconds: float) -> None:
        self.joining = joining(join_estimate_seconds)
        self.reducing = reducing(reduce_estimate_seconds)

    def learn(self, joins: Iterable[PhaseTime | None], reduces: Iterable[PhaseTime | None]) -> None:
        """How one round went on all its rings; None where one did not come so far."""
        joined, reduced = _slowest(joins), _slowest(reduces)
        if joined is not None:
            self.joining = after(self.joining, joined)
        if reduced is not None:
            self.reducing = after(self.reducing, reduced)


def joining(estimate_seconds: float) -> Deadline:
    """For the first round: how long after its announcement all members are expected to have joined, at a guess."""
    return _deadline(estimate_seconds, f"{estimate_seconds:.3g} s were expected", _SHORTEST_JOINING_SECONDS)


def reducing(estimate_seconds: float) -> Deadline:
    """For the first reduce, from what the lines of the ring are expected to carry."""
    return _deadline(estimate_seconds, f"{estimate_seconds:.3g} s were expected", _SHORTEST_REDUCING_SECONDS)


def after(deadline: Deadline, took: PhaseTime) -> Deadline:
    """The deadline of the next round."""
    if took.cut_off:
        usual = max(2 * deadline.seconds / _MARGIN, took.seconds)
        return _deadline(
            usual, f"{took.cut_off} did not make it within {deadline.seconds:.3g} s", deadline.shortest_seconds
        )
    kept = _SHRINK * deadline.usual_seconds
    if took.seconds >= kept:
        return _deadline(took.seconds, f"it took {took.seconds:.3g} s", deadline.shortest_seconds)
    return _deadline(
        kept, f"it took {took.seconds:.3g} s, but {deadline.usual_seconds:.3g} s before", deadline.shortest_seconds
    )


def _slowest(took: Iterable[PhaseTime | None]) -> PhaseTime | None:
    known = [each for each in took if each is not None]
    if not known:
        return None
    return PhaseTime(max(each.seconds for each in known), max(each.cut_off for each in known))


def _deadline(usual: float, why: str, shortest: float) -> Deadline:
    seconds = min(max(_MARGIN * usual, shortest), _LONGEST_SECONDS)
    if seconds > _MARGIN * usual:
        rule = f"{shortest:g} s at least"
    elif seconds < _MARGIN * usual:
        rule = f"{_LONGEST_SECONDS:g} s at most"
    else:
        rule = f"{_MARGIN:g} times {usual:.3g} s"
    return Deadline(seconds, f"{rule}; {why}", min(usual, _LONGEST_SECONDS / _MARGIN), shortest)

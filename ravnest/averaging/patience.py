"""Patience of a round: how long a ring waits for a late owner, as a pure function of what waiting costs.

A round that waits delays the progress of the other owners. A round that does not wait leaves out the progress of the
late owner until the next round, and that owner then needs the others' anchor first. The cheaper of the two is done.
The progress of a late owner stays in its parameters, and its weight grows with it, so that after some rounds even an
owner that is always late is waited for.
"""

from dataclasses import dataclass
from typing import Final

MIN_GRACE_SECONDS: Final = 1.0
"""Shortest wait: rounds of a small model on one machine are milliseconds apart, and any process pauses for longer."""


@dataclass(frozen=True, slots=True)
class Patience:
    """The costs of leaving an owner out of a round."""

    interval_seconds: float
    """Time from one round to the next, for which its samples wait."""
    catch_up_seconds: float = 0.0
    """Time that it takes to get the others' anchor before its next round."""

    def grace(self, late: int, joined: int, members: int) -> "Grace | None":
        """The time to wait for owners with `late` samples that no round contains yet, once `members` owners with
        `joined` samples are there; None if these are no quorum.

        A quorum has most of the samples, and two members at least: fewer have nothing to average.
        """
        if members < 2 or joined <= late:
            return None
        pays_seconds = (self.interval_seconds + self.catch_up_seconds) * late / joined
        seconds = max(MIN_GRACE_SECONDS, pays_seconds)
        return Grace(
            seconds,
            f"waiting {seconds:.3g} s longer would delay the {joined} samples of the others by as much as leaving it "
            f"out delays its {late}",
        )

    def gives_up(self, late: int, joined: int, members: int, remaining_seconds: float, again_seconds: float) -> str:
        """The reason not to wait for an owner that holds a reduce up; empty if waiting is cheaper.

        `joined` and `members` are those without it; `remaining_seconds` is how long the reduce still takes with it, and
        `again_seconds` how long another one takes without it.
        """
        grace = self.grace(late, joined, members)
        if grace is None or remaining_seconds <= again_seconds + grace.seconds:
            return ""
        return (
            f"with it the reduce would take {remaining_seconds:.3g} s more, without it {again_seconds:.3g} s; "
            f"{grace.reason}"
        )


@dataclass(frozen=True, slots=True)
class Grace:
    """The time to wait for the rest after a quorum is there."""

    seconds: float
    reason: str

"""Interval between the rounds of a deployment: as planned, then corrected by what rounds were measured to take."""

import statistics
from collections import deque
from typing import Final

from ravnest.averaging.patience import Patience
from ravnest.coordinator.averaging.rounds import Emit, MeasuredRound
from ravnest.planner.averaging import Interval, RoundBasis
from ravnest.units import duration

FIRST_ROUNDS: Final = 3
"""Measured rounds before the prediction is corrected: the first one also opens the lines."""
_REMEMBERED: Final = 9
TOLERANCE: Final = 0.25
"""A correction is told if the times differ by more than this share."""


class RoundInterval:
    """The interval that holds now.

    The median of the latest rounds replaces the predicted time of a round. The user is told once, and again only if
    that time changes as much as it did then.
    """

    def __init__(self, basis: RoundBasis, emit: Emit) -> None:
        self.now: Interval = basis.interval()
        self._basis = basis
        self._emit = emit
        self._told_seconds = basis.time.seconds
        self._measured: deque[MeasuredRound] = deque(maxlen=_REMEMBERED)

    @property
    def patience(self) -> Patience:
        """The costs of leaving an owner out of a round."""
        return Patience(self.now.seconds, self._basis.time.catch_up_seconds)

    def learn(self, measured: MeasuredRound) -> None:
        """Correct the interval by another round."""
        self._measured.append(measured)
        if len(self._measured) < FIRST_ROUNDS:
            return
        joining = statistics.median(each.joining_seconds for each in self._measured)
        rest = statistics.median(each.seconds - each.joining_seconds for each in self._measured)
        self.now = self._basis.interval((joining, rest))
        usual, before = joining + rest, self._told_seconds
        if abs(usual - before) > TOLERANCE * max(before, 1.0):
            self._told_seconds = usual
            reason = f"rounds take {duration(usual)} instead of {duration(before)}: {self.now.reason}"
            self._emit("rounds_corrected", reason, seconds=usual, samples=self.now.samples)

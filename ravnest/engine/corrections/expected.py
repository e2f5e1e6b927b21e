"""Expected staleness of a stage's next update: a running mean of the measured staleness."""

from typing import Final

_NEW_WEIGHT: Final = 0.2
"""Weight of the newest update. Staleness settles within as many updates as there are microbatches in flight."""
_MIN_MEAN: Final = 0.05
"""A smaller mean counts as 0: at the leaf, or after the number in flight has fallen to one."""


class ExpectedStaleness:
    """Exactly 0 while no update was stale."""

    def __init__(self) -> None:
        self._mean = 0.0

    @property
    def value(self) -> float:
        return self._mean if self._mean >= _MIN_MEAN else 0.0

    def add(self, staleness: float) -> None:
        self._mean += _NEW_WEIGHT * (staleness - self._mean)

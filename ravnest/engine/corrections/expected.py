"""How stale the updates of a stage are at present: a running mean of what was measured."""

from typing import Final

_SHARE: Final = 0.2
"""Of the newest update. A pipeline fills within as many updates as are in flight, and then hardly changes."""
_NONE: Final = 0.05
"""A mean below this is none: the last stage of a pipeline, or one microbatch in flight after there were more."""


class ExpectedStaleness:
    """0 exactly as long as nothing was stale."""

    def __init__(self) -> None:
        self._mean = 0.0

    @property
    def value(self) -> float:
        return self._mean if self._mean >= _NONE else 0.0

    def measured(self, staleness: float) -> None:
        self._mean += _SHARE * (staleness - self._mean)

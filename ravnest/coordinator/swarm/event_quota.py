"""Rate limit for events, so that one provider cannot flood the log."""

from typing import Final

_BURST: Final = 50.0
_PER_SECOND: Final = 0.5


class EventQuota:
    """Token bucket for one source of events: a burst of 50, then one event every two seconds.

    The caller reads the clock.
    """

    def __init__(self) -> None:
        self._left = _BURST
        self._since: float | None = None

    def take(self, now: float) -> bool:
        """Whether the source may cause an event now."""
        passed = 0.0 if self._since is None else max(0.0, now - self._since)
        left = min(_BURST, self._left + _PER_SECOND * passed)
        may = left >= 1.0
        self._left, self._since = left - may, now
        return may

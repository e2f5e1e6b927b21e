"""How many events one provider may cause by what it says: a log that somebody else can fill is nobody's log."""

from typing import Final

_BURST: Final = 50.0
_A_SECOND: Final = 0.5


class EventShare:
    """Of all providers of a run. Times are of one clock, which the caller reads."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}
        """Of each, how many it had left, and when that was."""

    def take(self, node_id: str, now: float) -> bool:
        """Whether this provider may cause an event now: many at once, and one every two seconds in the long run."""
        left, since = self._left.get(node_id, (_BURST, now))
        left = min(_BURST, left + _A_SECOND * max(0.0, now - since))
        may = left >= 1.0
        self._left[node_id] = left - may, now
        return may

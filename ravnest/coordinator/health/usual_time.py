"""Usual time of a link or a stage, learned from its own measurements."""

from typing import Final

LEARNING: Final = 3
"""Measurements until the usual time is known."""
_RISE: Final = 1 / 32
_FALL: Final = 1 / 2
"""Weight of a measurement above and below the usual time: a busy machine makes a link or stage look slower, nothing
makes it look faster."""


class UsualTime:
    """Starts with the smallest of the first measurements, because connections and caches are cold then."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._count = 0

    @property
    def is_known(self) -> bool:
        return self._count >= LEARNING

    def take(self, seconds: float) -> None:
        """Takes one more measurement. The caller leaves out slow ones once the usual time is known."""
        self._count += 1
        if self._count == 1:
            self.seconds = seconds
        elif self._count <= LEARNING:
            self.seconds = min(self.seconds, seconds)
        else:
            self.seconds += (_RISE if seconds > self.seconds else _FALL) * (seconds - self.seconds)

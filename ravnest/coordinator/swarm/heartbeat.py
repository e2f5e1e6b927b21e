"""Heartbeats: how often a provider says something, and how long it may say nothing over the connection it has."""

from dataclasses import dataclass
from typing import Final

HEARTBEAT_SECONDS: Final = 1.0
"""A provider says something at least this often."""

PATIENCE_SECONDS: Final = 30.0
"""How long a provider may be without a connection where nothing is won by giving it up."""
SILENCE_SECONDS: Final = 60.0
"""The same for one that is connected and says nothing, over a fast line."""

_BUFFERED_BYTES: Final = 2 << 20
"""What is usually on its way out of a machine before a word gets its turn. State that is uploaded is no reason for
more: it is heard itself."""
_MAX_BUFFERED_BYTES: Final = 16 << 20
"""The same at its worst, for the end of a stay in a swarm that no run watches."""
_MAX_LINE_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Uplink:
    """A provider's connection to the coordinator; zeros where nobody measured it."""

    round_trip_seconds: float = 0.0
    up_bytes_per_second: float = 0.0

    @property
    def waiting_seconds(self) -> float:
        """How long a word may wait behind what else is being sent."""
        if self.up_bytes_per_second <= 0:
            return 0.0
        return min(_MAX_LINE_SECONDS, _BUFFERED_BYTES / self.up_bytes_per_second)

    @property
    def max_waiting_seconds(self) -> float:
        """The same at its worst."""
        return _MAX_BUFFERED_BYTES / self.up_bytes_per_second if self.up_bytes_per_second > 0 else 0.0


UNMEASURED_UPLINK: Final = Uplink()

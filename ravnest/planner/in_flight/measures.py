"""What a cluster did while it had the same number of microbatches in flight, and how much that tells."""

from dataclasses import dataclass
from typing import Final

BUSY: Final = 0.985
"""A stage that works for such a share of the time does not wait for microbatches."""

IDLE: Final = 0.975
"""One that works less than that does."""


@dataclass(frozen=True, slots=True)
class FlightMeasures:
    """What a cluster did in a window of time in which it had the same number in flight."""

    limit: int
    seconds: tuple[float, ...]
    """Of each stage, what it computed for one microbatch."""
    delays: tuple[float, ...]
    """Of each link, what a microbatch spent on the way there and back, of late, if it hardly waited for the line."""
    period_seconds: float
    """From one microbatch to the next."""
    flying: float
    """How many were between forward and backward at the root, on average."""
    microbatches: int
    """In the window."""
    at_seconds: float = 0.0
    """The end of the window, on the root's clock."""

    @property
    def slowest_seconds(self) -> float:
        """More than nothing, whatever stages say."""
        return max(1e-6, *self.seconds)

    @property
    def busy(self) -> float:
        """Of the slowest stage, the share of the time that it worked."""
        return min(1.0, self.slowest_seconds / self.period_seconds)

    @property
    def noise(self) -> float:
        """By which share rates of this window may be wrong: half a microbatch, and more where they come in bursts, all
        that are in flight one behind the other and then none for a while."""
        return max(0.5, (1 - self.busy) * self.limit / 4) / self.microbatches

    @property
    def is_full(self) -> bool:
        """Whether it tells small differences."""
        return self.microbatches >= max(24, 2 * self.limit)

    @property
    def is_long(self) -> bool:
        """Whether it is as clear as it gets."""
        return self.microbatches >= max(60, 3 * self.limit)

    @property
    def is_idle(self) -> bool:
        """Whether the slowest stage clearly waits at times."""
        return self.busy < IDLE - self.noise

    @property
    def is_busy(self) -> bool:
        """Whether it clearly does not."""
        return self.is_full and self.busy >= BUSY - self.noise

    @property
    def is_starved(self) -> bool:
        """Whether the root often had fewer in flight than it might: it is not fed as fast as it could go on."""
        root = min(1.0, self.seconds[0] / self.period_seconds)
        return self.flying < 0.9 * (self.limit - root) - 0.3

    def way_seconds(self, delays: tuple[float, ...]) -> float:
        """What a microbatch takes through all stages and back when it waits nowhere."""
        return sum(self.seconds) + sum(delays)

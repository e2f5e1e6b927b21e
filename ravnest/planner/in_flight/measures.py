"""Measures of a cluster in a window with a constant number of microbatches in flight, and their precision."""

from dataclasses import dataclass
from typing import Final

BUSY: Final = 0.985
"""Share of the time from which on a stage counts as never waiting for microbatches."""

IDLE: Final = 0.975
"""Share of the time below which a stage counts as waiting."""


@dataclass(frozen=True, slots=True)
class FlightMeasures:
    """Measures of a cluster in one window."""

    limit: int
    seconds: tuple[float, ...]
    """Computation of each stage for one microbatch."""
    delays: tuple[float, ...]
    """Recent delay of each link, both ways, with hardly any queueing."""
    period_seconds: float
    """Time from one microbatch to the next."""
    flying: float
    """Average number between their beginning and their end at the stage where they begin."""
    microbatches: int
    """Number in the window."""
    at_seconds: float = 0.0
    """The end of the window, on the root's clock."""
    cores_in_use: float = 0.0
    """How many stages the cores of shared hosts can run at once, if the plan expects these to be the limit; else 0."""

    @property
    def slowest_seconds(self) -> float:
        """Time of the slowest stage, or of the shared cores for all stages; above 0 even if stages report nonsense."""
        shared = sum(self.seconds) / self.cores_in_use if self.cores_in_use else 0.0
        return max(1e-6, shared, *self.seconds)

    @property
    def busy(self) -> float:
        """Share of the time that the slowest stage worked, or that all shared cores did."""
        return min(1.0, self.slowest_seconds / self.period_seconds)

    @property
    def noise(self) -> float:
        """Relative error of a rate in this window: half a microbatch, and more if they come in bursts of all that are
        in flight."""
        return max(0.5, (1 - self.busy) * self.limit / 4) / self.microbatches

    @property
    def is_full(self) -> bool:
        """Whether the window is long enough to show small differences."""
        return self.microbatches >= max(24, 2 * self.limit)

    @property
    def is_long(self) -> bool:
        """Whether a longer window would show no more."""
        return self.microbatches >= max(60, 3 * self.limit)

    @property
    def is_idle(self) -> bool:
        """Whether the slowest stage clearly waits part of the time."""
        return self.busy < IDLE - self.noise

    @property
    def is_busy(self) -> bool:
        """Whether the slowest stage clearly never waits."""
        return self.is_full and self.busy >= BUSY - self.noise

    @property
    def is_starved(self) -> bool:
        """Whether the root often had fewer in flight than allowed: it is fed more slowly than it could work."""
        root = min(1.0, self.seconds[0] / self.period_seconds)
        return self.flying < 0.9 * (self.limit - root) - 0.3

    def way_seconds(self, delays: tuple[float, ...]) -> float:
        """Round trip of a microbatch that waits nowhere."""
        return sum(self.seconds) + sum(delays)

"""What a provider does when its memory is nearly exhausted: fewer microbatches in flight, recomputing, then a stop.

Each step is given time to show. What was asked for is taken back when there has been plenty for a while, and the while
grows each time it turns out to have been too short.
"""

from dataclasses import dataclass
from typing import Final, Literal

from ravnest.units import byte_size, counted

TIGHT_BYTES: Final = 128 << 20
TIGHT_USED_SHARE: Final = 0.10
TIGHT_LENT_SHARE: Final = 1 / 30
"""Memory is short when less is left than the larger of the first two, and no more than this part of what is lent."""
EASY: Final = 2.0
"""Times what is short, there is plenty."""
CRITICAL: Final = 0.25
"""Times what is short, nothing may be left for the next microbatch."""
SETTLE_SECONDS: Final = 3.0
EASY_SECONDS: Final = 60.0

Relief = Literal["fewer", "recompute", "stop", "eased"]


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """How a stage stands with its memory at a moment."""

    used_bytes: int
    """By the stage."""
    free_bytes: int
    """On the device, or in the group of processes that it belongs to."""
    lent_bytes: int
    """What the owner of the machine lets a stage have."""
    process_bytes: int = 0
    """What of the used memory is no stage's: torch itself, the network's buffers."""

    @property
    def left_bytes(self) -> int:
        """What the stage may still take."""
        return max(0, min(self.free_bytes, self.lent_bytes + self.process_bytes - self.used_bytes))

    @property
    def short_bytes(self) -> float:
        """With less than this, memory is nearly exhausted."""
        return min(max(TIGHT_BYTES, TIGHT_USED_SHARE * self.used_bytes), TIGHT_LENT_SHARE * self.lent_bytes)

    @property
    def words(self) -> str:
        return (
            f"the stage holds {byte_size(self.used_bytes)} of {byte_size(self.lent_bytes)} that are lent, and "
            f"{byte_size(self.left_bytes)} are left"
        )


@dataclass(frozen=True, slots=True)
class ReliefStep:
    """What is to be done, and why."""

    kind: Relief
    in_flight: int
    """As many at most from now on, for `fewer`; 0: no bound of this stage's."""
    reason: str


class MemoryStrain:
    """Of one stage. `look` is called now and then; the times are seconds of any clock that only goes forward."""

    def __init__(self, recomputes: bool) -> None:
        """`recomputes`: whether the stage keeps no activations anyway, or cannot let them go."""
        self._recomputes = recomputes
        self._bound = 0
        self._acted_at: float | None = None
        self._easy_since: float | None = None
        self._critical_since: float | None = None
        self._easy_seconds = EASY_SECONDS
        self._was_eased = False

    def look(self, reading: MemoryReading, flying: int, now: float) -> ReliefStep | None:
        """The next step, if one is due. `flying` is how many microbatches the stage had something of at once, at most
        since the last look."""
        left, short = reading.left_bytes, reading.short_bytes
        if left >= short:
            self._critical_since = None
            return self._ease(reading, now)
        self._easy_since = None
        if left >= CRITICAL * short:
            self._critical_since = None
        elif self._critical_since is None:
            self._critical_since = now
        if self._acted_at is not None and now - self._acted_at < SETTLE_SECONDS:
            return None
        allowed = min(flying, self._bound) if self._bound else flying
        if allowed > 1:
            return self._fewer(reading, allowed, now)
        if not self._recomputes:
            self._recomputes, self._acted_at = True, now
            return ReliefStep(
                "recompute", self._bound, f"{reading.words}: activations are computed again instead of being kept"
            )
        if self._critical_since is not None and now - self._critical_since >= SETTLE_SECONDS:
            return ReliefStep(
                "stop",
                self._bound,
                f"memory is exhausted: {reading.words}, with {counted(flying, 'microbatch', 'microbatches')} in "
                f"flight and no activations kept; at least {byte_size(short - left)} more are needed: lend more "
                "with --memory, or end other programs",
            )
        return None

    def _fewer(self, reading: MemoryReading, flying: int, now: float) -> ReliefStep:
        if self._was_eased:
            self._easy_seconds *= 2
            self._was_eased = False
        self._bound, self._acted_at = max(1, flying - max(1, flying // 3)), now
        bound = counted(self._bound, "microbatch", "microbatches")
        return ReliefStep("fewer", self._bound, f"{reading.words} with {flying} in flight: at most {bound} instead")

    def _ease(self, reading: MemoryReading, now: float) -> ReliefStep | None:
        if not self._bound or reading.left_bytes < EASY * reading.short_bytes:
            self._easy_since = None
            return None
        if self._easy_since is None:
            self._easy_since = now
        if now - self._easy_since < self._easy_seconds:
            return None
        self._bound, self._easy_since, self._was_eased = 0, None, True
        return ReliefStep("eased", 0, f"{reading.words}, for {self._easy_seconds:.0f} s: as many in flight as is best")

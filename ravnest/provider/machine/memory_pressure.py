"""Relief of memory pressure on a provider: fewer microbatches in flight, then recomputation, then a stop of the stage.

Each step gets time to take effect. The limit on microbatches is lifted after memory was plentiful for a while, and that
while doubles each time the limit was lifted too early.
"""

from dataclasses import dataclass
from typing import Final, Literal

from ravnest.units import byte_size, counted

TIGHT_BYTES: Final = 128 << 20
TIGHT_USED_SHARE: Final = 0.10
TIGHT_LENT_SHARE: Final = 1 / 30
"""Memory is short when less is left than the larger of the first two limits, and less than this share of the lent
memory."""
EASY: Final = 2.0
"""Memory is plentiful above this multiple of the shortage limit."""
CRITICAL: Final = 0.25
"""Below this fraction of the shortage limit, the next microbatch may not fit."""
SETTLE_SECONDS: Final = 3.0
EASY_SECONDS: Final = 60.0

Relief = Literal["fewer", "recompute", "stop", "eased"]


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """The memory of a stage at one moment."""

    used_bytes: int
    """Used by the stage."""
    free_bytes: int
    """Free on the device, or in the limits of the process group."""
    lent_bytes: int
    """The memory that the owner of the machine lends to a stage."""
    process_bytes: int = 0
    """The part of the used memory that is torch itself and network buffers."""

    @property
    def left_bytes(self) -> int:
        """The memory that the stage may still use."""
        return max(0, min(self.free_bytes, self.lent_bytes + self.process_bytes - self.used_bytes))

    @property
    def short_bytes(self) -> float:
        """Shortage limit: memory is nearly exhausted if less is left."""
        return min(max(TIGHT_BYTES, TIGHT_USED_SHARE * self.used_bytes), TIGHT_LENT_SHARE * self.lent_bytes)

    @property
    def words(self) -> str:
        return (
            f"the stage holds {byte_size(self.used_bytes)} of {byte_size(self.lent_bytes)} that are lent, and "
            f"{byte_size(self.left_bytes)} are left"
        )


@dataclass(frozen=True, slots=True)
class ReliefStep:
    """A step to take, and the reason."""

    kind: Relief
    in_flight: int
    """The new maximum, for `fewer`; 0: no limit by this stage."""
    reason: str


class MemoryStrain:
    """Decides on the steps of one stage. `look` is called now and then, with seconds of any monotonic clock."""

    def __init__(self, recomputes: bool) -> None:
        """`recomputes`: the stage keeps no activations already, or cannot recompute them."""
        self._recomputes = recomputes
        self._bound = 0
        self._acted_at: float | None = None
        self._easy_since: float | None = None
        self._critical_since: float | None = None
        self._easy_seconds = EASY_SECONDS
        self._was_eased = False

    def look(self, reading: MemoryReading, flying: int, now: float) -> ReliefStep | None:
        """The next step, if one is due. `flying` is the maximum number of microbatches that the stage held at once
        since the last call."""
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
        return ReliefStep(
            "eased",
            0,
            f"{reading.words}, for {self._easy_seconds:.0f} s: the limit on microbatches in flight is lifted",
        )

"""Observed limits of providers: their memory and speed as they report them, corrected after a stage did not fit or was
much slower than before."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ravnest.coordinator.swarm.members import Member
from ravnest.units import byte_size

EVIDENT_SHARE: Final = 0.8
"""After an out-of-memory failure, the provider is assumed to hold this share of that stage."""

SLOW_HALF_SECONDS: Final = 600.0
"""Half-life of an observed slowness: other work on the machine may be over."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """The memory assumed for a provider from now on, and why the provider loses its stage."""

    memory_bytes: int
    reason: str


def evident_memory(believed_bytes: int, stage_bytes: float) -> int:
    """The memory of a provider that was assumed to have `believed_bytes` and failed with a stage of this size."""
    return max(0, min(believed_bytes, int(EVIDENT_SHARE * stage_bytes)))


class ObservedLimits:
    """Observed limits of one run's providers; they outlive a stay, as the provider would report the same again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._most: dict[str, int] = {}
        self._slow: dict[str, tuple[float, float]] = {}
        """Slowdown of each provider against its report, and when it was observed."""
        self._clock = clock

    def memory_bytes(self, member: Member) -> int:
        """Memory available for a stage of this provider."""
        most = self._most.get(member.node_id)
        said = member.machine.memory_bytes
        return said if most is None else min(said, most)

    def note_failure(self, member: Member, stage_memory_bytes: float, why: str = "") -> Eviction:
        """Records that a stage of this planned size was too large for this provider, which gets none as large again."""
        before = self.memory_bytes(member)
        now = self._most[member.node_id] = evident_memory(before, stage_memory_bytes)
        said = member.machine.memory_bytes
        reason = (
            f"{member.node_id} reported {byte_size(said)} of memory, and does not have enough for a stage of "
            f"{byte_size(stage_memory_bytes)}{f' ({why})' if why else ''}: it gets none that takes more than "
            f"{byte_size(now)} in this run"
        )
        return Eviction(now, reason)

    def slowness(self, node_id: str) -> float:
        """The assumed slowdown of a provider against its report."""
        factor, at = self._slow.get(node_id, (1.0, 0.0))
        return max(1.0, factor * math.exp2((at - self._clock()) / SLOW_HALF_SECONDS))

    def note_slow(self, node_id: str, factor: float) -> None:
        """Records the slowdown of a provider when its stage went to another one."""
        self._slow[node_id] = max(1.0, factor), self._clock()

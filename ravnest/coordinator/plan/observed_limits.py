"""How much memory providers are believed to have, and how fast they are: what they say, until a stage that should have
fitted did not, or was much slower than before."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ravnest.coordinator.swarm.members import Member
from ravnest.units import byte_size

EVIDENT_SHARE: Final = 0.8
"""Of a stage that did not fit, what the provider is believed to hold: the next one is to fit for certain."""

SLOW_HALF_SECONDS: Final = 600.0
"""After which half as much is left of how slow a provider was: whatever it did besides may be over."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """What is believed of a provider from now on, and why it loses its stage."""

    memory_bytes: int
    reason: str


def evident_memory(believed_bytes: int, stage_bytes: float) -> int:
    """What a provider evidently can hold that was believed to hold so much, and failed with a stage of this size."""
    return max(0, min(believed_bytes, int(EVIDENT_SHARE * stage_bytes)))


class ObservedLimits:
    """Of one run. What was learned of a provider stays when it leaves and comes back: it says the same again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._most: dict[str, int] = {}
        self._slow: dict[str, tuple[float, float]] = {}
        """How many times slower than it says each was, and when."""
        self._clock = clock

    def memory_bytes(self, member: Member) -> int:
        """What a stage of this provider may take."""
        most = self._most.get(member.node_id)
        said = member.machine.memory_bytes
        return said if most is None else min(said, most)

    def note_failure(self, member: Member, stage_memory_bytes: float, why: str = "") -> Eviction:
        """A stage that was planned to take so much was too large for this provider: it gets none as large again."""
        before = self.memory_bytes(member)
        now = self._most[member.node_id] = evident_memory(before, stage_memory_bytes)
        said = member.machine.memory_bytes
        reason = (
            f"{member.node_id} said that it lends {byte_size(said)}, and has not enough for a stage of "
            f"{byte_size(stage_memory_bytes)}{f' ({why})' if why else ''}: it gets none that takes more than "
            f"{byte_size(now)} in this run"
        )
        return Eviction(now, reason)

    def slowness(self, node_id: str) -> float:
        """How many times slower than it says a provider is believed to be."""
        factor, at = self._slow.get(node_id, (1.0, 0.0))
        return max(1.0, factor * math.exp2((at - self._clock()) / SLOW_HALF_SECONDS))

    def note_slow(self, node_id: str, factor: float) -> None:
        """A provider was so many times slower than usual when its stage went to another."""
        self._slow[node_id] = max(1.0, factor), self._clock()

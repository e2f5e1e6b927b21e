"""Rate limit for new nodes: how fast one invite, and one address, may bring new identities into a swarm.

A machine that joins asks for one identity and keeps it. A program that asks for hundreds with one invite gets them no
faster than this, and the requester has the time to see them and to end the invite. Joins beyond the rate wait in the
coordinator, so that a hundred machines behind one router that start at the same moment are all let in without being
told to come again; only what would wait for too long is refused. A node that has joined before never waits.
"""

from dataclasses import dataclass
from typing import Final

_MAX_KNOWN: Final = 4096


@dataclass(frozen=True, slots=True)
class Rate:
    """How many may come at once; after that, one at each interval."""

    burst: int = 32
    interval_seconds: float = 0.25
    max_wait_seconds: float = 40.0
    """Less than the caller waits for an answer (`connection.JOIN_TIMEOUT_SECONDS`)."""


class JoinPace:
    """Counts by invite and by address. Times are of one clock, which the caller reads."""

    def __init__(self, rate: Rate | None = None) -> None:
        self._rate = rate or Rate()
        self._free_at: dict[str, float] = {}
        """By invite or address, when the next one would be let in if none had been saved up."""

    def take(self, invite: str, address: str, now: float) -> tuple[float | None, str]:
        """How many seconds this new node waits before it is let in, None: it is refused; and why."""
        rate = self._rate
        saved_up = now - (rate.burst - 1) * rate.interval_seconds
        due = {name: max(self._free_at.get(name, saved_up), saved_up) for name in (invite, address)}
        slowest = max(due, key=lambda name: due[name])
        wait = max(0.0, due[slowest] - now)
        per_second = 1 / rate.interval_seconds
        if wait > rate.max_wait_seconds:
            return None, (
                f"too many new machines join with {slowest} at once: {per_second:g} a second are let in, and "
                f"{rate.max_wait_seconds:g} s of them wait already; try again in a minute"
            )
        for name in due:
            self._free_at[name] = due[name] + rate.interval_seconds
        if len(self._free_at) > _MAX_KNOWN:
            self._free_at = {name: at for name, at in self._free_at.items() if at > saved_up}
        return wait, f"{per_second:g} new machines a second are let in with {slowest}" if wait else ""

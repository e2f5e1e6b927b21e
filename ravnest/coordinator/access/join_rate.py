"""Rate limit for new nodes, per invite and per address.

A machine asks for one identity and keeps it. A program that asks for hundreds with one invite gets them no faster than
this, so that the requester has time to notice and to revoke the invite. Joins beyond the rate wait in the coordinator:
a hundred machines behind one router that start together are all admitted without a retry. A join that would wait too
long is refused. A node that has joined before never waits.
"""

from dataclasses import dataclass
from typing import Final

_MAX_KNOWN: Final = 4096


@dataclass(frozen=True, slots=True)
class Rate:
    """Size of a burst, and the interval of the joins after it."""

    burst: int = 32
    interval_seconds: float = 0.25
    max_wait_seconds: float = 40.0
    """Less than the caller's timeout (`connection.JOIN_TIMEOUT_SECONDS`)."""


DEFAULT_RATE: Final = Rate()


class JoinPace:
    """Token buckets by invite and by address. The caller reads the clock."""

    def __init__(self, rate: Rate = DEFAULT_RATE) -> None:
        self._rate = rate
        self._free_at: dict[str, float] = {}
        """By invite or address: when its next join would be due without a burst."""

    def __len__(self) -> int:
        """The number of invites and addresses that are remembered."""
        return len(self._free_at)

    def take(self, invite: str, address: str, now: float) -> tuple[float | None, str]:
        """The seconds that this new node waits before it is admitted, None if it is refused; and why."""
        rate = self._rate
        saved_up = now - (rate.burst - 1) * rate.interval_seconds
        due = {name: max(self._free_at.get(name, saved_up), saved_up) for name in (invite, address)}
        slowest = max(due, key=lambda name: due[name])
        wait = max(0.0, due[slowest] - now)
        per_second = 1 / rate.interval_seconds
        if wait > rate.max_wait_seconds:
            return None, (
                f"too many new machines join with {slowest} at once: {per_second:g} a second are admitted, and the "
                f"queue is longer than {rate.max_wait_seconds:g} s; try again in a minute"
            )
        for name in due:
            self._free_at[name] = due[name] + rate.interval_seconds
        if len(self._free_at) > _MAX_KNOWN:
            self._free_at = {name: at for name, at in self._free_at.items() if at > saved_up}
        return wait, f"{per_second:g} new machines a second are admitted with {slowest}" if wait else ""

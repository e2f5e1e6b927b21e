"""Presence of one provider: the stays, losses and departures from which its reliability is estimated.

The counts outlive a stay and a run. Where the swarm has a store, they are kept there every few seconds, so that a
coordinator that is started again knows them too; see `membership_log.remember`.
"""

from dataclasses import dataclass, replace

from ravnest.planner.reliability import NEVER_SEEN, Attendance


@dataclass
class Presence:
    """Stays of one provider up to now. Times are those of the clock `time.monotonic`."""

    ended: Attendance = NEVER_SEEN
    """All counts, with the connected time of the stays that have ended."""
    session: str = ""
    """The present stay; empty where there is none."""
    since: float = 0.0
    """When the present stay began."""

    def begin(self, session: str, now: float) -> None:
        """The provider has joined; nothing changes where this stay is known."""
        if session != self.session:
            ended = self.attendance(now)
            self.ended = replace(ended, stays=ended.stays + 1)
            self.session, self.since = session, now

    def note_interruption(self) -> None:
        """The provider's connection broke."""
        self.ended = replace(self.ended, interruptions=self.ended.interruptions + 1)

    def note_loss(self, now: float, *, is_back: bool = False) -> None:
        """A stay has ended without notice. One that `is_back` has begun another stay since."""
        self.ended = replace(self.ended, losses=self.ended.losses + 1)
        if not is_back:
            self._end(now)

    def note_departure(self, now: float) -> None:
        """The provider has ended its stay in order."""
        self.ended = replace(self.ended, departures=self.ended.departures + 1)
        self._end(now)

    def attendance(self, now: float) -> Attendance:
        """All that was seen of the provider."""
        present = now - self.since if self.session else 0.0
        return replace(self.ended, connected_seconds=self.ended.connected_seconds + present)

    def _end(self, now: float) -> None:
        self.ended, self.session = self.attendance(now), ""

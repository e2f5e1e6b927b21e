"""Presence of one provider: the sessions, losses and departures from which its reliability is estimated.

The counts outlive a session and a run. A swarm with a store saves them every few seconds, so that a restarted
coordinator knows them; see `membership_log.remember`.
"""

from dataclasses import dataclass, replace

from ravnest.planner.reliability import NEVER_SEEN, Attendance


@dataclass
class Presence:
    """Counts of one provider up to now. Times are of the clock `time.monotonic`."""

    ended: Attendance = NEVER_SEEN
    """All counts, with the connected time of the sessions that have ended."""
    session: str = ""
    """The present session; empty without one."""
    since: float = 0.0
    """When the present session began."""

    def begin(self, session: str, now: float) -> None:
        """The provider has joined; nothing changes if this session is known."""
        if session != self.session:
            ended = self.attendance(now)
            self.ended = replace(ended, stays=ended.stays + 1)
            self.session, self.since = session, now

    def note_interruption(self) -> None:
        """The provider's connection broke."""
        self.ended = replace(self.ended, interruptions=self.ended.interruptions + 1)

    def note_loss(self, now: float, *, is_back: bool = False) -> None:
        """A session has ended without notice. A provider that `is_back` has begun another session since."""
        self.ended = replace(self.ended, losses=self.ended.losses + 1)
        if not is_back:
            self._end(now)

    def note_departure(self, now: float) -> None:
        """The provider has ended its session in order."""
        self.ended = replace(self.ended, departures=self.ended.departures + 1)
        self._end(now)

    def attendance(self, now: float) -> Attendance:
        """The counts up to now."""
        present = now - self.since if self.session else 0.0
        return replace(self.ended, connected_seconds=self.ended.connected_seconds + present)

    def _end(self, now: float) -> None:
        self.ended, self.session = self.attendance(now), ""

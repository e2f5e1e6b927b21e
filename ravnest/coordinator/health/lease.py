"""Failure detector for one provider: each has a lease that every sign of life renews.

This is the only place that judges how long a provider may be silent. A provider is first suspected, then lost. It is
lost early only where that helps: where it blocks its cluster and another provider can replace it. How early depends on
how regularly it was heard before, on its uplink, and on the cost of its replacement. A provider that no other can
replace is kept for as long as a router takes to restart.

Pure functions and values; all times are from one monotonic clock, which the caller reads.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Literal, NamedTuple

from ravnest.coordinator.swarm.heartbeat import HEARTBEAT_SECONDS, RECONNECT_SECONDS

LATE_SECONDS: Final = 1.0
"""A watchdog that runs this much later than planned was itself stopped, and has missed what was sent meanwhile."""
RETURN_SECONDS: Final = 10.0
"""Time for providers to reconnect to a coordinator that was stopped or cut off: they retry with a backoff."""

SILENCE_SECONDS: Final = 60.0
"""Timeout for a connected provider that sends nothing, or that holds a stage and does not report."""
BROKEN_SECONDS: Final = {"standby": 1.0, "reform": 8.0, "none": RECONNECT_SECONDS}
"""Timeout for a provider that blocks its cluster and has no connection, by its replacement. To redeploy the run takes
longer than most routers take to restart."""
SILENT_SECONDS: Final = {"standby": 3.0, "reform": 15.0, "none": SILENCE_SECONDS}
"""Timeout for a provider that is connected and sends nothing; longer for one that was heard less regularly."""

_SUSPECT_SILENT_SECONDS: Final = 2.0
_SUSPECT_BROKEN_SECONDS: Final = 0.3
_COMPLAINT_FACTOR: Final = 0.6
"""Factor of the timeouts where a neighbour has lost its connection to the provider too: then the coordinator's own line
is not the cause."""
_BUILDING_FACTOR: Final = 2.0
"""Factor of the timeout for a provider that builds a stage, which may delay its heartbeats."""
_RECONNECT_ROUND_TRIPS: Final = 6
"""Round trips of a new connection: TCP, TLS, HTTP/2, the call and the counts of its link."""
_DEVIATIONS: Final = 4.0
_MAX_GAP_SECONDS: Final = 10.0
_MIN_PAUSE_SECONDS: Final = 0.05
_BUFFERED_BYTES: Final = 2 << 20
"""Bytes that usually wait in a machine's send buffers before a heartbeat. State that is uploaded does not count: the
coordinator hears it."""
_MAX_BUFFERED_SECONDS: Final = 20.0
"""Limit of the time for that: 2 MB take 16 s at 1 Mbit/s."""
_MAX_LATE_SECONDS: Final = 5.0
"""The same on top of the longest timeouts, which cover most of it."""

Replacement = Literal["standby", "reform", "none"]
"""Replacement of a provider: a standby that is ready, a redeployment without it, or none."""


class State(Enum):
    WELL = "well"
    SUSPECTED = "suspected"
    LOST = "lost"


class LeaseVerdict(NamedTuple):
    """Judgement of one provider."""

    state: State
    reason: str
    look_again_seconds: float
    """Time until the verdict may change, if nothing more is heard."""


@dataclass(frozen=True, slots=True)
class Uplink:
    """A provider's connection to the coordinator; zeros where it was not measured."""

    round_trip_seconds: float = 0.0
    up_bytes_per_second: float = 0.0

    @property
    def queue_seconds(self) -> float:
        """Time that a heartbeat may wait behind other bytes."""
        if self.up_bytes_per_second <= 0:
            return 0.0
        return min(_MAX_BUFFERED_SECONDS, _BUFFERED_BYTES / self.up_bytes_per_second)


UNMEASURED_UPLINK: Final = Uplink()


@dataclass(frozen=True, slots=True)
class Gaps:
    """Times between two signs of life of a provider: moving averages of the gap and of its deviation."""

    mean_seconds: float = HEARTBEAT_SECONDS
    deviation_seconds: float = 0.25 * HEARTBEAT_SECONDS

    def after(self, gap_seconds: float) -> "Gaps":
        """The averages with one more gap."""
        gap = min(gap_seconds, _MAX_GAP_SECONDS)
        off = abs(gap - self.mean_seconds)
        return Gaps(
            self.mean_seconds + (gap - self.mean_seconds) / 8,
            self.deviation_seconds + (off - self.deviation_seconds) / 4,
        )

    @property
    def expected_seconds(self) -> float:
        """Time within which the provider is heard again, nearly always."""
        return max(HEARTBEAT_SECONDS, self.mean_seconds) + _DEVIATIONS * self.deviation_seconds


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that is known of a provider at one moment."""

    silent_seconds: float
    """Time since it was last heard."""
    broken_seconds: float | None = None
    """Time without a connection; None while it has one."""
    gaps: Gaps = Gaps()
    uplink: Uplink = UNMEASURED_UPLINK
    blocks: bool = False
    """Whether others wait for it: it holds a stage of a cluster in which something is in flight."""
    replacement: Replacement = "none"
    complaints: tuple[str, ...] = ()
    """Other providers that report that their connection to it is down."""
    refuses: bool = False
    """Whether its machine answers and refuses connections to its address: its process has ended."""
    building: bool = False
    """Whether it was given a stage and has not reported on it yet."""
    spared_seconds: float = 0.0
    """Time for which it is not lost, whatever else is known."""
    unreported_seconds: float = 0.0
    """Time since the last report of a provider that holds a stage; 0 for one without a stage."""


def judge(evidence: Evidence) -> LeaseVerdict:
    """Whether the provider is well, suspected or lost, why, and when to look again."""
    timeouts = _Timeouts.of(evidence)
    words = _Reasons(evidence)
    broken, silent = evidence.broken_seconds, evidence.silent_seconds
    if evidence.spared_seconds <= 0:
        if broken is not None and broken >= timeouts.broken:
            return LeaseVerdict(State.LOST, f"{words.broken}, {words.why_now}", 0.0)
        if silent >= timeouts.silent:
            return LeaseVerdict(State.LOST, f"{words.silent}, {words.why_now}", 0.0)
        if evidence.unreported_seconds >= timeouts.unreported:
            return LeaseVerdict(State.LOST, words.unreported, 0.0)
    left = timeouts.left(evidence)
    again = max(_MIN_PAUSE_SECONDS, evidence.spared_seconds, left)
    lost_in = f"timeout in {max(evidence.spared_seconds, left):.1f} s"
    if broken is not None and broken >= timeouts.suspect_broken:
        return LeaseVerdict(State.SUSPECTED, f"{words.broken}; {lost_in}", again)
    if silent >= timeouts.suspect_silent:
        return LeaseVerdict(State.SUSPECTED, f"{words.silent}; {lost_in}", again)
    soon = max(_MIN_PAUSE_SECONDS, min(again, timeouts.left_until_suspected(evidence)))
    return LeaseVerdict(State.WELL, "it was heard", soon)


@dataclass(frozen=True, slots=True)
class _Timeouts:
    """Timeouts of one provider, in seconds."""

    suspect_broken: float
    suspect_silent: float
    broken: float
    silent: float
    unreported: float

    @classmethod
    def of(cls, evidence: Evidence) -> "_Timeouts":
        queue_seconds = evidence.uplink.queue_seconds
        reconnecting = _RECONNECT_ROUND_TRIPS * evidence.uplink.round_trip_seconds
        usual = evidence.gaps.expected_seconds + queue_seconds
        suspect_broken = _SUSPECT_BROKEN_SECONDS + reconnecting
        suspect_silent = max(_SUSPECT_SILENT_SECONDS, usual)
        longest = SILENT_SECONDS["none"] + min(_MAX_LATE_SECONDS, queue_seconds)
        replacement = evidence.replacement if evidence.blocks else "none"
        if replacement == "none":
            return cls(suspect_broken, suspect_silent, BROKEN_SECONDS["none"] + reconnecting, longest, longest)
        factor = _COMPLAINT_FACTOR if evidence.complaints else 1.0
        broken = max(suspect_broken, factor * (BROKEN_SECONDS[replacement] + reconnecting))
        more = SILENT_SECONDS[replacement] - SILENT_SECONDS["standby"]
        silent = factor * max(SILENT_SECONDS[replacement], usual + HEARTBEAT_SECONDS + more)
        silent = max(suspect_silent, silent * (_BUILDING_FACTOR if evidence.building else 1.0))
        return cls(suspect_broken, suspect_silent, suspect_broken if evidence.refuses else broken, silent, longest)

    def left(self, evidence: Evidence) -> float:
        """Time until the provider is lost."""
        left = min(self.silent - evidence.silent_seconds, self.unreported - evidence.unreported_seconds)
        return left if evidence.broken_seconds is None else min(left, self.broken - evidence.broken_seconds)

    def left_until_suspected(self, evidence: Evidence) -> float:
        left = self.suspect_silent - evidence.silent_seconds
        return left if evidence.broken_seconds is None else min(left, self.suspect_broken - evidence.broken_seconds)


class _Reasons:
    """The parts of a reason."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence

    @property
    def broken(self) -> str:
        ended = ", and its address refuses connections" if self._evidence.refuses else ""
        return f"no connection for {self._evidence.broken_seconds:.1f} s{ended}"

    @property
    def silent(self) -> str:
        usual = self._evidence.gaps.mean_seconds
        return f"nothing received for {self._evidence.silent_seconds:.1f} s (usually every {usual:.1f} s)"

    @property
    def unreported(self) -> str:
        return f"it holds a stage and has not reported for {self._evidence.unreported_seconds:.0f} s"

    @property
    def why_now(self) -> str:
        """Why the coordinator does not wait any longer."""
        evidence = self._evidence
        if not evidence.blocks:
            return "which is the longest timeout"
        no_connection = f", has no connection with {' and '.join(evidence.complaints)} either"
        blocks = f"it blocks its cluster{no_connection if evidence.complaints else ''}"
        return {
            "standby": f"{blocks}, and a standby is ready",
            "reform": f"{blocks}, and the others can go on without it",
            "none": f"{blocks}, and this is the longest timeout, though no other provider can replace it",
        }[evidence.replacement]


@dataclass(frozen=True, slots=True)
class Lease:
    """The times at which a provider was last heard."""

    heard_at: float
    """When the provider was last heard, or the lease was renewed."""
    gaps: Gaps = Gaps()
    broken_at: float | None = None
    """Since when it has no connection; None while it has one."""
    spared_until: float = 0.0
    reported_at: float = 0.0
    """When the provider last sent a control message, or the lease was renewed."""

    def seen(self, last_received_at: float, broken_at: float | None, reported_at: float = 0.0) -> "Lease":
        """The lease with the present state of the provider's links: when they last received anything, since when one
        of them is down, and when the last control message came."""
        if broken_at is not None:
            # No provider could reconnect while the coordinator itself was stopped.
            broken_at = max(broken_at, self.heard_at if self.broken_at is None else self.broken_at)
        lease = replace(self, broken_at=broken_at, reported_at=max(self.reported_at, reported_at))
        if last_received_at <= self.heard_at:
            return lease
        gaps = self.gaps.after(last_received_at - self.heard_at)
        return replace(lease, heard_at=last_received_at, gaps=gaps)

    def renewed(self, now: float, spared_seconds: float) -> "Lease":
        """A lease that begins now: earlier silence does not count."""
        return replace(
            self,
            heard_at=max(now, self.heard_at),
            broken_at=None if self.broken_at is None else now,
            spared_until=max(self.spared_until, now + spared_seconds),
            reported_at=max(now, self.reported_at),
        )

    def silent_seconds(self, now: float) -> float:
        return max(0.0, now - self.heard_at)

    def broken_seconds(self, now: float) -> float | None:
        return None if self.broken_at is None else max(0.0, now - self.broken_at)

    def spared_seconds(self, now: float) -> float:
        return max(0.0, self.spared_until - now)

    def unreported_seconds(self, now: float) -> float:
        return max(0.0, now - self.reported_at)


def late_by(due: float, now: float) -> float:
    """How long the caller was stopped that meant to look at `due`; 0 where it looks in time, or nearly."""
    late = now - due
    return late if late > LATE_SECONDS else 0.0


def after_a_stop(lease: Lease, late_seconds: float, now: float) -> Lease:
    """The lease after the coordinator was itself stopped for this long: it begins again, and providers that noticed the
    stop and disconnected have time to reconnect."""
    return lease.renewed(now, min(RETURN_SECONDS, late_seconds))

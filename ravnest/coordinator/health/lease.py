"""How long a provider is waited for: each has a lease that what it says renews, and a judgement of when it has run out.

A provider that is not heard is a suspicion, not yet a loss. It is given up early only where that helps: where it
holds others up, and somebody can take its place. How early follows from how regularly it spoke before, from its line,
and from how much is to be done without it. Where nobody could take its place it is waited for as long as anybody would
wait for a router that is being restarted.

Pure functions and values: every time is of one monotonic clock, which the caller reads.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Literal, NamedTuple

from ravnest.coordinator.swarm.heartbeat import (
    HEARTBEAT_SECONDS,
    PATIENCE_SECONDS,
    SILENCE_SECONDS,
    UNMEASURED_UPLINK,
    Uplink,
)

LATE_SECONDS: Final = 1.0
"""Whoever looks so much later than it meant to was itself stopped, and has not heard what was said meanwhile."""
RETURN_SECONDS: Final = 10.0
"""How long providers may take to find a coordinator again that was stopped or cut off: they try with pauses."""

BROKEN_SECONDS: Final = {"standby": 1.0, "reform": 8.0, "none": PATIENCE_SECONDS}
"""How long one that holds others up may be without a connection, by who can take its place. Forming the run anew takes
longer than most routers are away."""
SILENT_SECONDS: Final = {"standby": 3.0, "reform": 15.0, "none": SILENCE_SECONDS}
"""How long it may be connected and say nothing; longer for one whose words come less regularly."""
STILL_SECONDS: Final = {"standby": 10.0, "reform": 20.0, "none": 120.0}
"""How long it may report and do nothing of what waits for it; longer where work takes longer."""

_DOUBT_SILENT_SECONDS: Final = 2.0
_DOUBT_BROKEN_SECONDS: Final = 0.3
_COMPLAINT: Final = 0.6
"""What is left of the time where a neighbour has lost its connection to it too: the line here is not the reason."""
_BUILDING: Final = 2.0
"""One that builds a stage may be too busy to speak."""
_DIALLING_TRIPS: Final = 6
"""Round trips that a new connection takes: TCP, TLS, HTTP/2, the call and the counts of its link."""
_DEVIATIONS: Final = 4.0
_MAX_GAP_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 0.05

Replacement = Literal["standby", "reform", "none"]
"""Who can take a provider's place: a standby that is ready, the rest of the swarm if it is formed anew, or nobody."""


class State(Enum):
    WELL = "well"
    SUSPECTED = "suspected"
    LOST = "lost"


class Verdict(NamedTuple):
    state: State
    reason: str
    look_again_seconds: float
    """When the verdict may be another, if nothing is heard until then."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """How far apart a provider's words usually come: the mean, and how far they usually are from it."""

    mean_seconds: float = HEARTBEAT_SECONDS
    deviation_seconds: float = 0.25 * HEARTBEAT_SECONDS

    def after(self, gap_seconds: float) -> "Gaps":
        """With one more: each weighs less than the one after it."""
        gap = min(gap_seconds, _MAX_GAP_SECONDS)
        off = abs(gap - self.mean_seconds)
        return Gaps(
            self.mean_seconds + (gap - self.mean_seconds) / 8,
            self.deviation_seconds + (off - self.deviation_seconds) / 4,
        )

    @property
    def expected_seconds(self) -> float:
        """By when the next word has come, nearly always."""
        return max(HEARTBEAT_SECONDS, self.mean_seconds) + _DEVIATIONS * self.deviation_seconds


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a provider at one moment."""

    silent_seconds: float
    """Since it was last heard."""
    broken_seconds: float | None = None
    """Since it has no connection; None while it has one."""
    gaps: Gaps = Gaps()
    uplink: Uplink = UNMEASURED_UPLINK
    blocks: bool = False
    """Whether others wait for it: it holds a stage of a cluster in which something is under way."""
    replacement: Replacement = "none"
    complaints: tuple[str, ...] = ()
    """Who else says that its connection to it is down."""
    refuses: bool = False
    """Whether its machine is there and nobody listens any more where it did: its process has ended."""
    building: bool = False
    """Whether it was given a stage and has not said that it is there."""
    spared_seconds: float = 0.0
    """For so long it is not given up, whatever else is known."""


def judge(evidence: Evidence) -> Verdict:
    """Whether the provider is well, suspected or lost, why, and when to look again."""
    seen = _LeaseLimits(evidence)
    if evidence.spared_seconds <= 0:
        if evidence.broken_seconds is not None and evidence.broken_seconds >= seen.broken_limit:
            return Verdict(State.LOST, f"there has been no connection {seen.for_broken}, {seen.why_now}", 0.0)
        if evidence.silent_seconds >= seen.silent_limit:
            return Verdict(State.LOST, f"it has said nothing {seen.for_silent}, {seen.why_now}", 0.0)
    again = max(_LOOK_SECONDS, evidence.spared_seconds, seen.until_lost)
    if evidence.broken_seconds is not None and evidence.broken_seconds >= seen.broken_doubt:
        return Verdict(State.SUSPECTED, f"there is no connection {seen.for_broken}; {seen.waits}", again)
    if evidence.silent_seconds >= seen.silent_doubt:
        return Verdict(State.SUSPECTED, f"it has said nothing {seen.for_silent}; {seen.waits}", again)
    return Verdict(State.WELL, "it was heard", max(_LOOK_SECONDS, min(again, seen.until_doubt)))


class _LeaseLimits:
    """What follows from the evidence."""

    def __init__(self, evidence: Evidence) -> None:
        gaps, uplink = evidence.gaps, evidence.uplink
        replacement = evidence.replacement if evidence.blocks else "none"
        dialling = _DIALLING_TRIPS * uplink.round_trip_seconds
        usual = gaps.expected_seconds + uplink.waiting_seconds
        self._evidence = evidence
        self.broken_doubt = _DOUBT_BROKEN_SECONDS + dialling
        self.silent_doubt = max(_DOUBT_SILENT_SECONDS, usual)
        broken, silent = BROKEN_SECONDS[replacement] + dialling, SILENT_SECONDS[replacement]
        if replacement == "none":
            silent += uplink.waiting_seconds
        else:
            share = _COMPLAINT if evidence.complaints else 1.0
            more = SILENT_SECONDS[replacement] - SILENT_SECONDS["standby"]
            silent = share * max(silent, usual + HEARTBEAT_SECONDS + more) * (_BUILDING if evidence.building else 1.0)
            broken = self.broken_doubt if evidence.refuses else max(self.broken_doubt, share * broken)
            silent = max(self.silent_doubt, silent)
        self.broken_limit, self.silent_limit = broken, silent

    @property
    def until_lost(self) -> float:
        left = [self.silent_limit - self._evidence.silent_seconds]
        if self._evidence.broken_seconds is not None:
            left.append(self.broken_limit - self._evidence.broken_seconds)
        return min(left)

    @property
    def until_doubt(self) -> float:
        left = [self.silent_doubt - self._evidence.silent_seconds]
        if self._evidence.broken_seconds is not None:
            left.append(self.broken_doubt - self._evidence.broken_seconds)
        return min(left)

    @property
    def for_broken(self) -> str:
        ended = ", and nobody listens any more where it did" if self._evidence.refuses else ""
        return f"for {self._evidence.broken_seconds:.1f} s{ended}"

    @property
    def for_silent(self) -> str:
        usual = self._evidence.gaps.mean_seconds
        return f"for {self._evidence.silent_seconds:.1f} s, where every {usual:.1f} s is usual"

    @property
    def why_now(self) -> str:
        """Why it is not waited for any longer."""
        evidence = self._evidence
        if not evidence.blocks:
            return "which is longer than anybody is waited for"
        others = (
            f" and has no connection with {' and '.join(evidence.complaints)} either" if evidence.complaints else ""
        )
        return {
            "standby": f"it holds others up{others}, and a standby is ready",
            "reform": f"it holds others up{others}, and the others can go on without it",
            "none": f"it holds others up{others}, and nobody can take its place, but that is longer than is waited",
        }[evidence.replacement]

    @property
    def waits(self) -> str:
        """How long it is waited for."""
        return f"it is waited for {max(self._evidence.spared_seconds, self.until_lost):.1f} s more"


@dataclass(frozen=True, slots=True)
class Lease:
    """When a provider was last heard, and what that renews."""

    heard_at: float
    """It, or the coordinator, was well then."""
    gaps: Gaps = Gaps()
    broken_at: float | None = None
    spared_until: float = 0.0

    def seen(self, last_received_at: float, broken_at: float | None) -> "Lease":
        """As its links tell it now: when they last received something, and since when one of them is down."""
        if broken_at is not None:
            # While the coordinator itself was stopped, nobody could come back.
            broken_at = max(broken_at, self.heard_at if self.broken_at is None else self.broken_at)
        lease = replace(self, broken_at=broken_at)
        if last_received_at <= self.heard_at:
            return lease
        gaps = self.gaps.after(last_received_at - self.heard_at)
        return replace(lease, heard_at=last_received_at, gaps=gaps)

    def renewed(self, now: float, spared_seconds: float) -> "Lease":
        """It begins anew: what was not heard until now is not held against it."""
        broken_at = None if self.broken_at is None else now
        until = max(self.spared_until, now + spared_seconds)
        return replace(self, heard_at=max(now, self.heard_at), broken_at=broken_at, spared_until=until)

    def silent_seconds(self, now: float) -> float:
        return max(0.0, now - self.heard_at)

    def broken_seconds(self, now: float) -> float | None:
        return None if self.broken_at is None else max(0.0, now - self.broken_at)

    def spared_seconds(self, now: float) -> float:
        return max(0.0, self.spared_until - now)


def late_by(due: float, now: float) -> float:
    """By how much whoever meant to look at `due` was stopped; 0 where it looked in time, or nearly."""
    late = now - due
    return late if late > LATE_SECONDS else 0.0


def after_a_stop(lease: Lease, late_seconds: float, now: float) -> Lease:
    """The lease for one who looks again after it was itself stopped for so long.

    Everybody is as well as at the last look until it turns out otherwise, and whoever has noticed the stop and hung up
    has time to come back.
    """
    return lease.renewed(now, min(RETURN_SECONDS, late_seconds))

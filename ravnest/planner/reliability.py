"""Reliability of a machine: how likely it is there when it is needed, estimated from what a swarm saw of it.

The estimate compares the time that the machine was connected with the time that its losses, departures and
interruptions cost a run. A machine that was never seen counts as fully reliable, and a prior keeps a single loss from
deciding: the figure falls below `MIN_EXPECTED_ABSENT` short of 1 only after a second loss, or a loss early on. It rises
again while the machine stays connected. docs/planning.md gives the formula.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ravnest.units import counted

PRIOR_SECONDS: Final = 7200.0
"""Connected time that every machine is credited with before anything is known of it."""

LOSS_SECONDS: Final = 600.0
"""Missing time counted for each loss, whether the machine returns at once or not: its stage has gone to another one,
and by the horizon of a change (`HORIZON_SECONDS` in planner/recovery/worth_it.py) it does not get the stage back."""

DEPARTURE_SECONDS: Final = 120.0
"""Missing time counted for each departure in order: the stage is handed over before, so that little is lost."""

INTERRUPTION_SECONDS: Final = 60.0
"""Missing time counted for each connection that broke and came back."""

MIN_EXPECTED_ABSENT: Final = 0.1
"""Machines expected to be missing, below which none is kept back: an idle machine would cost more than it saves."""


@dataclass(frozen=True, slots=True)
class Attendance:
    """Counts of one machine's presence in a swarm, over all its stays."""

    stays: int = 0
    connected_seconds: float = 0.0
    losses: int = 0
    """Stays that ended without notice."""
    departures: int = 0
    """Stays that the machine ended in order: it asked to leave."""
    interruptions: int = 0
    """Broken connections within a stay."""


NEVER_SEEN: Final = Attendance()


@dataclass(frozen=True, slots=True)
class Reliability:
    """Estimated reliability of one machine, and why."""

    value: float
    """Above 0 and up to 1, in hundredths: a plan made a moment ago still holds."""
    reason: str


def estimate_reliability(seen: Attendance) -> Reliability:
    """The reliability of a machine of which a swarm saw this; 1 for one that was never seen."""
    missing = (
        LOSS_SECONDS * seen.losses + DEPARTURE_SECONDS * seen.departures + INTERRUPTION_SECONDS * seen.interruptions
    )
    present = PRIOR_SECONDS + seen.connected_seconds
    value = max(0.01, round(present / (present + missing), 2))
    if not seen.stays:
        return Reliability(value, f"reliability {value:.2f}: never seen before")
    events = [
        (seen.losses, counted(seen.losses, "loss", "losses")),
        (seen.departures, counted(seen.departures, "departure")),
        (seen.interruptions, counted(seen.interruptions, "interruption")),
    ]
    known = ", ".join(text for count, text in events if count) or "never lost"
    stays = f"{counted(seen.stays, 'stay')} of {seen.connected_seconds / 3600:.1f} h in all"
    return Reliability(value, f"reliability {value:.2f}: {known} in {stays}")


def expected_absent(reliabilities: Iterable[float]) -> int:
    """The number of these machines expected to be missing, rounded up: as many are kept back as standbys."""
    missing = sum(1 - reliability for reliability in reliabilities)
    return math.ceil(missing - 1e-9) if missing > MIN_EXPECTED_ABSENT - 1e-9 else 0

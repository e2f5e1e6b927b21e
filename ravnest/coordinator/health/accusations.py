"""Rulings on accusations: one stage reports that its neighbour broke the rules of the protocol.

The coordinator does not see the frames between two stages, so it cannot check the report. It bars the accused provider,
because an honest stage accuses a neighbour only of a frame that cannot occur. A provider that accuses a second
neighbour is barred itself, and the providers that were barred on its report alone may come back. So a liar costs a run
at most one honest provider, and only until it lies again. No clock and no messages.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ravnest.coordinator.swarm.provider_record import ProviderRecord


class AccusationRuling(NamedTuple):
    """Consequence of an accusation."""

    culprit: str
    """The provider that is barred; empty for none."""
    reason: str
    cleared: tuple[str, ...] = ()
    """Providers that had been barred on the report of the culprit alone, and may have a stage again."""


def judge_accusation(records: Mapping[str, ProviderRecord], accuser: str, accused: str, what: str) -> AccusationRuling:
    """Rules on the report of `accuser` that its neighbour broke the rules, and writes the ruling into the records of
    the run."""
    by, about = records[accuser].conduct, records[accused].conduct
    if by.barred_because:
        return AccusationRuling("", f"{accuser} broke the rules itself: its report about {accused} is ignored")
    before = sorted(node for node, known in records.items() if accuser in known.conduct.accused_by and node != accused)
    about.accused_by.add(accuser)
    if before:
        reason = f"{accuser} reports that {accused} broke the rules, and has said so of {', '.join(before)}: {what}"
        cleared = tuple(node for node in [*before, accused] if records[node].conduct.accused_by == {accuser})
        for node in cleared:
            records[node].conduct.barred_because = ""
        by.barred_because = reason
        return AccusationRuling(accuser, f"{reason}; it is unlikely that all of them did", cleared)
    about.barred_because = f"{accuser} reports: {what}"
    return AccusationRuling(accused, f"{what} (reported by {accuser}, which has the stage next to it)")

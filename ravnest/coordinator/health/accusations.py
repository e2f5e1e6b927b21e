"""Judge between two stages, one of which says that the other broke the rules.

The coordinator does not see what flows between two stages, so it is one provider's word against the other's. The
accused provider is barred, because an honest stage accuses a neighbour only of a frame that cannot occur. A provider
that accuses a second neighbour is barred itself, and the providers that were barred on its word alone may come back. So
a liar costs a run one honest provider at most, and only until it lies again. Pure: no clock, and no messages.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ravnest.coordinator.swarm.provider_record import ProviderRecord


class AccusationRuling(NamedTuple):
    """What follows from an accusation."""

    culprit: str
    """The provider that is barred; empty where nothing follows."""
    reason: str
    cleared: tuple[str, ...] = ()
    """The providers that were barred on the word of the culprit alone, and may have a stage again."""


def judge_accusation(records: Mapping[str, ProviderRecord], accuser: str, accused: str, what: str) -> AccusationRuling:
    """Judges the accusation by `accuser` that its neighbour broke the rules, and notes the result in the records of
    this run."""
    by, about = records[accuser].conduct, records[accused].conduct
    if by.barred_because:
        return AccusationRuling("", f"{accuser} broke the rules itself: what it says of {accused} is not believed")
    before = sorted(node for node, known in records.items() if accuser in known.conduct.accused_by and node != accused)
    about.accused_by.add(accuser)
    if before:
        reason = f"{accuser} says of {accused}, as it did of {', '.join(before)}, that it broke the rules: {what}"
        cleared = tuple(node for node in [*before, accused] if records[node].conduct.accused_by == {accuser})
        for node in cleared:
            records[node].conduct.barred_because = ""
        by.barred_because = reason
        return AccusationRuling(accuser, f"{reason}; that many neighbours are not at fault", cleared)
    about.barred_because = f"{accuser} says: {what}"
    return AccusationRuling(accused, f"{what} (as {accuser} says, which has the stage next to it)")

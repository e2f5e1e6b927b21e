"""What must be told of a fault in the events of the run: a fault that nobody noticed was not tested.

A sighting is a question to the events since the fault was injected. It has words, so that a failed test says what was
never told.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.chaos.watching import Event


@dataclass(frozen=True)
class Sighting:
    what: str
    is_in: Callable[[Sequence[Event]], bool]


def told(provider: str, *kinds: str) -> Sighting:
    """One of these kinds of events, of this provider, or of a link that it has."""
    return Sighting(
        f"{' or '.join(kinds)} of {provider}",
        lambda events: any(
            event["kind"] in kinds and provider in (event.get("provider"), event.get("to")) for event in events
        ),
    )


def happened(*kinds: str) -> Sighting:
    """One of these kinds of events, of whomever."""
    return Sighting(" or ".join(kinds), lambda events: any(event["kind"] in kinds for event in events))


def replaced(provider: str) -> Sighting:
    """Somebody else has the stage of this provider, or everything was formed anew without it, or its cluster has ended
    and the others go on."""

    def is_in(events: Sequence[Event]) -> bool:
        begun = False
        for event in events:
            kind, lost = event["kind"], event.get("lost")
            begun = begun or kind == "reform_begun" or (kind == "failover_begun" and lost == provider)
            if begun and kind in ("failover", "reformed"):
                return True
            if kind == "cluster_lost" and f"{provider}, which held stage" in event["reason"]:
                return True
        return False

    return Sighting(f"failover, reformed or cluster_lost after the loss of {provider}", is_in)


def missing(sightings: Sequence[Sighting], events: Sequence[Event]) -> list[str]:
    """What has not been told yet."""
    return [sighting.what for sighting in sightings if not sighting.is_in(events)]

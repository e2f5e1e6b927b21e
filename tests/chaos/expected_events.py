"""Events that a fault must cause: a fault without events was not noticed.

An `ExpectedEvent` is a condition on the events since the injection, with a description for the message of a failed
test.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.chaos.observer import Event


@dataclass(frozen=True)
class ExpectedEvent:
    description: str
    is_in: Callable[[Sequence[Event]], bool]


def event_of(provider: str, *kinds: str) -> ExpectedEvent:
    """An event of one of these kinds, about this provider or one of its links."""
    return ExpectedEvent(
        f"{' or '.join(kinds)} of {provider}",
        lambda events: any(
            event["kind"] in kinds and provider in (event.get("provider"), event.get("to")) for event in events
        ),
    )


def event_of_any(*kinds: str) -> ExpectedEvent:
    """An event of one of these kinds, about any provider."""
    return ExpectedEvent(" or ".join(kinds), lambda events: any(event["kind"] in kinds for event in events))


def replacement_of(provider: str) -> ExpectedEvent:
    """Another provider has taken over the stage of this one, or the run was redeployed without it, or its cluster has
    ended and the others continue."""

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

    return ExpectedEvent(f"failover, reformed or cluster_lost after the loss of {provider}", is_in)


def missing(expected: Sequence[ExpectedEvent], events: Sequence[Event]) -> list[str]:
    """Descriptions of the expected events that have not been reported yet."""
    return [each.description for each in expected if not each.is_in(events)]

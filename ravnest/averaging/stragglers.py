"""Who is to blame when a reduce does not end in time. A pure function: the decision and its reason."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stragglers:
    nodes: tuple[str, ...]
    """Who is left out of the next attempt; nobody: another attempt would end the same way."""
    reason: str


def find_stragglers(order: Sequence[str], reduced: Collection[str], progress: Mapping[str, int]) -> Stragglers:
    """Whom to leave out when time is up.

    `order`: the ring, each sends to the next; `reduced`: who has finished; `progress`: how many pieces the others have
    received, of those who said so of late. Silent ones come first: a healthy member says how far it is. Else it is the
    sender of the line that has carried least; downstream of a line that is stuck everybody has more.
    """
    silent = tuple(node for node in order if node not in reduced and node not in progress)
    if len(silent) == len(order):
        return Stragglers((), "nobody finished, and nobody said how far it is")
    if silent:
        return Stragglers(silent, f"{', '.join(silent)} neither finished nor said how far it is")
    waiting = {node: progress[node] for node in order if node not in reduced}
    assert waiting, "a reduce that everybody finished has not stalled"
    least = min(waiting.values())
    starved = [node for node in order if waiting.get(node) == least]
    if len(starved) == len(order):
        return Stragglers((), f"all members were equally slow: {least} pieces each")
    # Of several, the one behind whom somebody has more: there the line is stuck, not further up.
    after = next(node for node in starved if _before(order, node) not in starved)
    sender = _before(order, after)
    return Stragglers((sender,), f"{after} has received {least} pieces from {sender}, fewer than anybody else")


def _before(order: Sequence[str], node: str) -> str:
    return order[order.index(node) - 1]

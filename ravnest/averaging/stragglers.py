"""Choice of the members to leave out when a reduce misses its deadline: a pure function of what the members
reported."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stragglers:
    """The members that hold a reduce up."""

    nodes: tuple[str, ...]
    """The members to leave out of the next attempt. Empty: no single member is slow, and another attempt would end the
    same way."""
    reason: str


def find_stragglers(order: Sequence[str], reduced: Collection[str], progress: Mapping[str, int]) -> Stragglers:
    """The members to leave out of the next attempt, and why.

    `order`: the members, each of which sends to the next; `reduced`: those that have finished; `progress`: pieces
    received, by the other members that reported recently. Silent members come first, because a healthy member reports
    all the time. Otherwise the straggler is the sender on the line that carried the fewest pieces: all members further
    down the ring have received more.
    """
    silent = tuple(node for node in order if node not in reduced and node not in progress)
    if len(silent) == len(order):
        return Stragglers((), "no member finished or reported its progress")
    if silent:
        return Stragglers(silent, f"{', '.join(silent)} neither finished nor reported progress")
    waiting = {node: progress[node] for node in order if node not in reduced}
    assert waiting, "a reduce that all members finished has not stalled"
    fewest = min(waiting.values())
    starved = [node for node in order if waiting.get(node) == fewest]
    if len(starved) == len(order):
        return Stragglers((), f"all members were equally slow: {fewest} pieces each")
    # A starved member whose predecessor is starved too only passes the shortage on: the line is stuck further up.
    receiver = next(node for node in starved if _before(order, node) not in starved)
    sender = _before(order, receiver)
    return Stragglers((sender,), f"{receiver} has received {fewest} pieces from {sender}, fewer than any other member")


def _before(order: Sequence[str], node: str) -> str:
    return order[order.index(node) - 1]

"""Holder of a stage's replica: the provider that keeps a copy of its state, for the case that its provider is lost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holder:
    """The provider that keeps a stage's part of each replica, in addition to the stage's own provider."""

    node: str | None
    """None if no provider can."""
    reason: str


def choose_holders(
    stages: Sequence[str], standbys: Mapping[int, Sequence[str]], others: Sequence[str] = ()
) -> dict[int, Holder]:
    """For each stage of a cluster, by its number, the holder of its parts.

    `stages` are the providers from root to leaf, `standbys` the providers kept warm for each stage, the first choice
    first, and `others` providers outside the cluster in the order of preference. A warm standby has the weights
    already, a neighbour has a link, and another provider protects a stage without either. No provider holds its own
    part, which would be lost with it.
    """
    found = {}
    for number, node in enumerate(stages):
        warm = [name for name in standbys.get(number, ()) if name != node]
        after, before = stages[number + 1 : number + 2], stages[max(0, number - 1) : number]
        strangers = [name for name in others if name != node]
        if warm:
            found[number] = Holder(warm[0], f"{warm[0]} is kept warm for stage {number}")
        elif after:
            found[number] = Holder(after[0], f"{after[0]} has the stage after stage {number}, which has no standby")
        elif before:
            found[number] = Holder(before[0], f"{before[0]} has the stage before the last, which has no standby")
        elif strangers:
            found[number] = Holder(strangers[0], f"{strangers[0]} is outside the cluster, in which {node} is alone")
        else:
            found[number] = Holder(None, f"{node} is alone: no other provider can keep a copy of its stage")
    return found

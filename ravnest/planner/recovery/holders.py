"""Who keeps the copy of a stage's state from which the stage returns when its provider is lost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holder:
    """Who keeps a stage's part of each replica beside its own provider."""

    node: str | None
    """None: nobody can."""
    reason: str


def choose_holders(
    stages: Sequence[str], standbys: Mapping[int, Sequence[str]], others: Sequence[str] = ()
) -> dict[int, Holder]:
    """For each stage of a cluster, by its number, the holder of its parts.

    `stages` are the providers from root to leaf, `standbys` those who are kept warm for a stage, the first choice
    first, and `others` providers outside the cluster in the order in which they may be asked. A standby that would
    take the stage has the weights there already; a neighbour has a link; somebody else keeps a stage safe that is
    alone. Nobody holds its own part: that would be lost with it.
    """
    found = {}
    for number, node in enumerate(stages):
        warm = [name for name in standbys.get(number, ()) if name != node]
        after, before = stages[number + 1 : number + 2], stages[max(0, number - 1) : number]
        strangers = [name for name in others if name != node]
        if warm:
            found[number] = Holder(warm[0], f"{warm[0]} is kept warm for stage {number}")
        elif after:
            found[number] = Holder(after[0], f"{after[0]} has the stage after stage {number}, and none is kept warm")
        elif before:
            found[number] = Holder(before[0], f"{before[0]} has the stage before the last, and none is kept warm")
        elif strangers:
            found[number] = Holder(
                strangers[0], f"{strangers[0]} is of another cluster, and {node} is alone in its own"
            )
        else:
            found[number] = Holder(None, f"{node} is alone: nobody else can keep a copy of its stage")
    return found

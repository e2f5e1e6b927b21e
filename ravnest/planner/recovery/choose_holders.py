"""Holder of a stage's replica: the provider that keeps a copy of its state, for the case that its provider is lost."""

from collections.abc import Callable, Mapping, Sequence


def choose_holders(
    stages: Sequence[str],
    standbys: Mapping[int, Sequence[str]],
    others: Sequence[str] = (),
    has_poor_line: Callable[[str, str], bool] = lambda owner, holder: False,
) -> dict[int, str]:
    """For each stage of a cluster that another provider can protect, by its number, the holder of its parts.

    `stages` are the providers from root to leaf, `standbys` the providers kept warm for each stage, the first choice
    first, and `others` providers outside the cluster in the order of preference. A warm standby has the weights
    already, a neighbour has a link, and another provider protects a stage without either. A holder with a poor line
    from the owner is taken only if all have one: parts are large, and are sent again and again. No provider holds its
    own part, which would be lost with it.
    """
    found = {}
    for number, node in enumerate(stages):
        after, before = stages[number + 1 : number + 2], stages[max(0, number - 1) : number]
        in_turn = (*standbys.get(number, ()), *after, *before, *others)
        possible = [name for name in in_turn if name != node]
        if possible:
            # The first of those with the better lines.
            found[number] = min(possible, key=lambda name: has_poor_line(node, name))
    return found

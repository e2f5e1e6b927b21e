"""Cuts in a model of many places, in two steps: the best among few places, then the best near those."""

import math
from collections.abc import Sequence
from typing import Final

from ravnest.planner.cluster import Cluster
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.search.cuts import best_cuts
from ravnest.planner.search.objective import score

FEW_PLACES: Final = 64
"""Places up to which cuts are found in one step, and are the best possible."""

_NEAR: Final = 12
"""Maximum distance, in places, of the second step's cuts from those of the first."""


def finer_cuts(
    model: ModelCosts,
    goal: Goal,
    network: Network,
    order: Sequence[Provider],
    averaging_seconds: float = math.inf,
) -> Cluster | None:
    """As `best_cuts`, exact in a model of few places; None also if only cuts that are hard to find would fit."""
    if len(model.places) <= FEW_PLACES:
        return best_cuts(model, goal, network, order, averaging_seconds)
    rough = few_places(model)
    cluster = best_cuts(rough, goal, network, order, averaging_seconds)
    if cluster is None:
        return best_cuts(model, goal, network, order, averaging_seconds) if len(order) > rough.max_stages else None
    index = {place: i for i, place in enumerate(model.places)}
    kept = {index[place] for place in rough.places[:: max(1, len(rough.places) // 16)]} | {0, model.last}
    reach = min(_NEAR, max(2, 2 * len(model.places) // len(rough.places)))
    for stage in cluster.stages[1:]:
        middle = index[stage.start]
        kept.update(i for i in range(middle - reach, middle + reach + 1) if 0 < i < model.last)
    finer = best_cuts(model.at(sorted(kept)), goal, network, order, averaging_seconds)
    return max((c for c in (finer, cluster) if c is not None), key=lambda c: score(goal, c))


def exact_cuts(
    model: ModelCosts,
    goal: Goal,
    network: Network,
    order: Sequence[Provider],
    known: Cluster,
    averaging_seconds: float = math.inf,
) -> Cluster:
    """The best cuts for an order, and at least as good as the `known` ones; slow in a model of many places."""
    if len(model.places) <= FEW_PLACES:
        return known
    found = best_cuts(model, goal, network, order, averaging_seconds)
    return max((c for c in (known, found) if c is not None), key=lambda c: score(goal, c))


def few_places(model: ModelCosts) -> ModelCosts:
    """The model with at most FEW_PLACES places."""
    return model.coarser(FEW_PLACES)

"""Cuts in models of many places."""

import numpy as np
import pytest

from ravnest.planner.problem import Goal, Network
from ravnest.planner.search.cuts import best_cuts
from ravnest.planner.search.objective import score
from ravnest.planner.search.refine_cuts import FEW_PLACES, finer_cuts
from tests.planner.instances import random_model, random_providers


@pytest.mark.parametrize("seed", range(6))
def test_cuts_among_many_places_are_near_the_best(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model, order = random_model(rng, places=3 * FEW_PLACES), random_providers(rng, 4)
    best, found = best_cuts(model, Goal(), Network(), order), finer_cuts(model, Goal(), Network(), order)
    assert best is not None and found is not None
    assert 0.9 * score(Goal(), best) <= score(Goal(), found) <= score(Goal(), best) * (1 + 1e-9)
    assert found.stages[-1].end == model.places[-1]


def test_cuts_among_few_places_are_the_best() -> None:
    rng = np.random.default_rng(0)
    model, order = random_model(rng, places=20), random_providers(rng, 3)
    assert finer_cuts(model, Goal(), Network(), order) == best_cuts(model, Goal(), Network(), order)

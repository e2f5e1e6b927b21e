"""References of the planner benchmark: brute force, the bound and the paper's rule must be right."""

import itertools

import pytest

from benchmarks.planning.brute_force import best_listed_score, best_score
from benchmarks.planning.instances import random_instance
from benchmarks.planning.paper_rule import equal_cuts, paper_plan
from ravnest.planner.search.cuts import best_cuts
from ravnest.planner.search.objective import score
from ravnest.planner.search.search import form
from ravnest.planner.shared_limits import totals


@pytest.mark.parametrize("seed", range(3))
def test_brute_force_finds_at_least_what_a_single_cluster_can_do(seed: int) -> None:
    instance = random_instance(seed, 3)
    best, by_name = best_score(instance), {p.name: p for p in instance.providers}
    found = [
        best_cuts(instance.model, instance.goal, instance.network, order)
        for order in itertools.permutations(instance.providers)
    ]
    alone = [totals(instance.goal, instance.network, by_name, [c]).score for c in found if c is not None]
    assert alone
    assert best >= max(alone)


def test_listing_all_cuts_agrees_with_the_exact_cuts() -> None:
    instance = random_instance(3, 3, places=7)
    cluster = best_cuts(instance.model, instance.goal, instance.network, instance.providers)
    listed = best_listed_score(instance.model, instance.goal, instance.network, instance.providers)
    assert cluster is not None
    assert listed == pytest.approx(score(instance.goal, cluster))


@pytest.mark.parametrize("stages", [1, 2, 5, 10])
def test_equal_shares_are_as_many_stages_as_asked_for(stages: int) -> None:
    model = random_instance(0, 2, places=11).model
    cuts = equal_cuts(model, stages)
    assert len(cuts) == stages - 1
    assert all(model.legal[i, j] for i, j in itertools.pairwise((0, *cuts, model.last)))


@pytest.mark.parametrize("seed", range(4))
def test_the_papers_rule_is_never_predicted_to_do_more_than_ours(seed: int) -> None:
    instance = random_instance(seed, 5)
    ours = form(instance.model, instance.goal, instance.network, instance.providers).score
    theirs = paper_plan(instance)
    assert theirs.score <= ours * 1.001
    assert theirs.fitting <= theirs.clusters

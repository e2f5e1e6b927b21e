"""A lost stage goes to whoever lets training go on soonest without making it much slower."""

import pytest

from ravnest.planner.plan import Basis
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal
from ravnest.planner.recovery.choose_taker import Candidacy, Candidate, Recut, Taking, candidates_for, choose_taker
from tests.planner.made_up import machine, model, named, planned

GOAL, NETWORK, COSTS = Goal(), Network(), model(12)


def choose(*candidates: Candidate, before: float = 100.0, recut: float | None = 60.0) -> Taking:
    words = "ann and cat share the model" if recut is not None else "training waits for more machines"
    return choose_taker("bob", candidates, before, Recut(recut, words))


def test_a_warm_standby_takes_the_stage_before_a_faster_one_that_has_to_fetch_it() -> None:
    found = choose(Candidate("gus", False, 120.0), Candidate("hal", True, 85.0))
    assert (found.kind, found.taker) == ("takes", "hal") and "is warm for the stage" in found.reason


def test_of_warm_ones_the_fastest_takes_it_and_then_the_first_by_name() -> None:
    found = choose(Candidate("ida", True, 90.0), Candidate("hal", True, 99.0), Candidate("gus", True, 99.0))
    assert found.taker == "gus"


def test_a_warm_standby_that_would_slow_the_cluster_far_below_a_new_cut_does_not_take_it() -> None:
    found = choose(Candidate("hal", True, 40.0))
    assert found.kind == "reform" and found.taker is None and "ann and cat share the model" in found.reason
    assert choose(Candidate("hal", True, 50.0)).taker == "hal"


def test_a_cold_standby_takes_it_only_where_a_new_cut_gives_no_more() -> None:
    assert choose(Candidate("gus", False, 59.0)).kind == "reform"
    assert choose(Candidate("gus", False, 61.0)).taker == "gus"


def test_one_without_the_memory_never_takes_it() -> None:
    found = choose(Candidate("gus", True, None))
    assert found.kind == "reform" and "no standby has the memory" in found.reason


def test_any_standby_that_can_takes_it_where_nobody_else_could_hold_the_model() -> None:
    found = choose(Candidate("gus", False, 1.0), recut=None)
    assert found.taker == "gus" and "the model would not fit" in found.reason


def test_without_anybody_training_waits_and_says_so() -> None:
    found = choose(recut=None)
    assert (found.kind, found.taker) == ("wait", None) and "training waits for more machines" in found.reason


def test_until_a_new_cut_was_looked_for_only_one_that_keeps_the_pace_is_taken() -> None:
    assert choose_taker("bob", [Candidate("gus", False, 90.0)], 100.0, None).kind == "reform"
    assert choose_taker("bob", [Candidate("gus", False, 96.0)], 100.0, None).taker == "gus"


def candidates(*standbys: Provider, lost: str = "bob") -> tuple[Proposal, list[Candidate]]:
    """A cluster of three, and what these would make of it in the place of the lost one."""
    nodes = named(*(machine(n) for n in ("ann", "bob", "cat")))
    plan = planned(COSTS, GOAL, NETWORK, nodes, ["ann", "bob", "cat"])
    basis = Basis(COSTS, GOAL, NETWORK, nodes, GOAL)
    may = {standby.name: Candidacy(standby, is_warm=standby.name == "gus") for standby in standbys}
    return plan, candidates_for(basis, plan.clusters[0], lost, may)


@pytest.mark.parametrize("lost", ["ann", "bob", "cat"])
def test_a_like_standby_leaves_the_cluster_as_fast_as_it_was(lost: str) -> None:
    plan, (gus, hal) = candidates(machine("gus"), machine("hal", 0.02), lost=lost)
    assert (gus.name, gus.is_warm, hal.is_warm) == ("gus", True, False)
    assert gus.samples_per_second == pytest.approx(plan.clusters[0].samples_per_second)
    assert hal.samples_per_second is not None and hal.samples_per_second < 0.1 * plan.rates[0]
    assert choose_taker(lost, [gus, hal], plan.rates[0], None).taker == "gus"


def test_a_standby_without_the_memory_for_the_stage_has_no_rate() -> None:
    _, (gus,) = candidates(machine("gus", memory=1e6))
    assert gus.samples_per_second is None

"""A lost stage goes to whoever lets training go on soonest without making it much slower."""

import pytest

from ravnest.planner.cluster import memory_bytes
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal
from ravnest.planner.recovery.choose_taker import Candidate, Recut, Taking, choose_taker, taker_for
from tests.planner.made_up import machine, model, named, planned

GOAL, NETWORK, COSTS = Goal(), Network(), model(12)


def choose(*candidates: Candidate, before: float = 100.0, recut: float | None = 60.0) -> Taking:
    words = "ann and cat share the model" if recut is not None else "training waits for more machines"
    return choose_taker("bob", candidates, before, Recut(recut, words))


def test_a_warm_standby_takes_the_stage_before_a_faster_one_that_has_to_fetch_it() -> None:
    found = choose(Candidate("gus", False, 120.0), Candidate("hal", True, 85.0))
    assert (found.kind, found.taker) == ("takes", "hal") and "has the stage at hand" in found.reason


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
    assert found.kind == "reform" and "none of those who stand by has the memory" in found.reason


def test_any_standby_that_can_takes_it_where_nobody_else_could_hold_the_model() -> None:
    found = choose(Candidate("gus", False, 1.0), recut=None)
    assert found.taker == "gus" and "nobody could hold the model" in found.reason


def test_without_anybody_training_waits_and_says_so() -> None:
    found = choose(recut=None)
    assert (found.kind, found.taker) == ("wait", None) and "training waits for more machines" in found.reason


def test_until_a_new_cut_was_looked_for_only_one_that_keeps_the_pace_is_taken() -> None:
    assert choose_taker("bob", [Candidate("gus", False, 90.0)], 100.0, None).kind == "reform"
    assert choose_taker("bob", [Candidate("gus", False, 96.0)], 100.0, None).taker == "gus"


def swarm(*standbys: Provider, memory: float = 16e9) -> tuple[dict[str, Provider], Proposal]:
    nodes = named(*(machine(n, memory=memory) for n in ("ann", "bob", "cat")), *standbys)
    return nodes, planned(COSTS, GOAL, NETWORK, nodes, ["ann", "bob", "cat"])


def after(swarm: tuple[dict[str, Provider], Proposal], standbys: dict[str, bool], gone: tuple[str, ...] = ()) -> Taking:
    nodes, plan = swarm
    return taker_for(COSTS, GOAL, NETWORK, nodes, plan, "bob", standbys, gone)


def test_a_like_standby_takes_the_stage_as_it_is() -> None:
    both = swarm(machine("gus"))
    found = after(both, {"gus": True})
    assert found.kind == "takes" and found.cluster is not None and found.replanned is None
    assert found.cluster.providers == ("ann", "gus", "cat")
    assert [s.start for s in found.cluster.stages] == [s.start for s in both[1].clusters[0].stages]


def test_a_far_slower_standby_is_passed_over_for_a_new_cut() -> None:
    found = after(swarm(machine("gus", 0.02)), {"gus": True})
    assert found.kind == "reform" and found.replanned is not None
    assert "bob" not in found.replanned.plan.clusters[0].providers


def test_without_standbys_those_who_are_left_share_the_model() -> None:
    found = after(swarm(), {})
    assert found.kind == "reform" and found.replanned is not None
    assert found.replanned.plan.clusters[0].providers == ("ann", "cat")


def test_where_those_who_are_left_are_too_small_training_waits() -> None:
    half = memory_bytes(COSTS, GOAL, 1)[0, 6]
    found = after(swarm(memory=half * 0.95), {})
    assert found.kind == "wait" and "cannot hold the model" in found.reason


def test_a_standby_that_is_gone_or_taken_is_in_no_plan() -> None:
    both = swarm(machine("gus"), machine("hal"))
    found = after(both, {}, gone=("gus",))
    assert found.replanned is not None
    names = {name for cluster in found.replanned.plan.clusters for name in cluster.providers}
    assert names == {"ann", "cat"}


@pytest.mark.parametrize("lost", ["ann", "bob", "cat"])
def test_any_stage_of_a_cluster_can_be_taken(lost: str) -> None:
    nodes, plan = swarm(machine("gus"))
    found = taker_for(COSTS, GOAL, NETWORK, nodes, plan, lost, {"gus": False})
    assert found.cluster is not None
    assert found.cluster.providers == tuple("gus" if n == lost else n for n in ("ann", "bob", "cat"))

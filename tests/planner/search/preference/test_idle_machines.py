"""Machines that would compute and hold next to nothing: they stand by, unless memory or the requester needs them."""

from dataclasses import replace

import pytest

from ravnest.planner.cluster import memory_bytes
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider, Requester
from ravnest.planner.proposal import Proposal
from ravnest.planner.search.preference.idle_machines import (
    cost_of_requested_stages,
    idle_stages,
    without_idle_machines,
)
from ravnest.planner.search.preference.settle import settled
from ravnest.planner.search.search import form
from tests.planner.made_up import cut_at, machine, named
from tests.planner.search.preference.profiles import Part, profile, transformer

ALONE = Goal(max_clusters=1)
SLOW_REQUESTER = Network({}, Requester(up_bytes_per_second=5e3, down_bytes_per_second=5e3))
"""It feeds five microbatches a second, whatever the machines could do."""


def with_a_norm() -> ModelCosts:
    """Two blocks with a norm of 6 kB between them."""
    block = Part(0.03, 2e7, 1e6, 1e5, 0)
    return profile([block, block, Part(1e-5, 6144, 1e4, 1e5, 0), block, block])


def of_three(network: Network) -> tuple[ModelCosts, dict[str, Provider], Proposal]:
    """The plan that gives the norm to a machine of its own."""
    costs, providers = with_a_norm(), named(*(machine(name, mbps=1000) for name in "abc"))
    return costs, providers, cut_at(costs, ALONE, network, providers, ("abc", (2, 3)))


def test_a_norm_is_no_stage() -> None:
    costs, providers, plan = of_three(SLOW_REQUESTER)
    assert plan.limit.startswith("the requester's uplink: ")
    assert idle_stages(costs, plan.clusters[0]) == [1]
    found = without_idle_machines(costs, ALONE, SLOW_REQUESTER, providers, plan, plan)
    assert found.clusters[0].providers == ("a", "c") and found.standbys == ("b",)
    assert found.score >= 0.98 * plan.score
    assert found.preferences == (
        "b stands by: it would compute and hold next to nothing of the model as a stage of its own",
    )


def test_where_the_cores_of_one_machine_are_the_limit_a_norm_is_no_stage_either() -> None:
    costs = with_a_norm()
    providers = named(*(Provider(name=name, memory_bytes=10**10, host="here", cores=1) for name in "abc"))
    plan = cut_at(costs, ALONE, Network(), providers, ("abc", (2, 3)))
    assert plan.limit == "the 1 cores of here"
    found = without_idle_machines(costs, ALONE, Network(), providers, plan, plan)
    assert found.clusters[0].providers == ("a", "c")


def test_a_stage_that_the_memory_needs_stays() -> None:
    costs, providers, plan = of_three(SLOW_REQUESTER)
    # Even with one microbatch in flight, neither of the others has room for its blocks and the norm.
    least = min(float(memory_bytes(costs, ALONE, 1)[places]) for places in ((0, 3), (2, 5)))
    providers = {name: replace(p, memory_bytes=int(least) - 1) for name, p in providers.items()}
    assert without_idle_machines(costs, ALONE, SLOW_REQUESTER, providers, plan, plan) is plan


@pytest.mark.parametrize(
    "asked",
    [
        Goal(max_clusters=1, min_stages=3),
        Goal(min_clusters=1, max_clusters=1, min_providers=3),
    ],
)
def test_stages_that_were_asked_for_stay(asked: Goal) -> None:
    costs, providers, plan = of_three(SLOW_REQUESTER)
    assert without_idle_machines(costs, asked, SLOW_REQUESTER, providers, plan, plan) is plan


def test_even_stages_are_not_idle() -> None:
    costs = transformer(12, vocabulary_bytes=1.5e8)
    providers = [machine(f"p{k}", mbps=1000) for k in range(4)]
    plan = form(costs, Goal(max_clusters=1, min_stages=4), Network(), providers)
    plan = settled(costs, ALONE, Network(), named(*providers), plan)
    assert len(plan.clusters[0].stages) == 4 and not idle_stages(costs, plan.clusters[0])


def test_a_requested_stage_that_slows_the_others_down_is_told() -> None:
    # What crosses takes longer to handle than a block to compute, like a tied weight.
    heavy = profile([Part(0.02, 2e7, 1e6, 2e7, 0) for _ in range(6)])
    providers = named(*(machine(name, mbps=10_000) for name in "abc"))
    asked = Goal(max_clusters=1, min_stages=3)
    plan = settled(heavy, asked, Network(), providers, form(heavy, asked, Network(), list(providers.values())))
    assert len(plan.clusters[0].stages) == 3
    assert any(text.startswith("3 stages were asked for; without ") for text in plan.preferences)
    light = transformer(12, vocabulary_bytes=1e6, hidden=1e4)
    worth = form(light, asked, Network(), list(providers.values()))
    assert cost_of_requested_stages(light, asked, Network(), providers, worth) == ""


def test_the_reasons_tell_what_even_cuts_change() -> None:
    costs = transformer(12, vocabulary_bytes=1.5e8)
    providers = named(*(Provider(name=n, memory_bytes=24 * 10**9, host="here", cores=1) for n in "abc"))
    uneven = cut_at(costs, ALONE, Network(), providers, ("abc", (46, 47)))
    plan = settled(costs, ALONE, Network(), providers, uneven)
    [reason] = plan.preferences
    assert reason.startswith("within 2% of the fastest cuts, the fullest stage takes ") and " instead of " in reason
    assert settled(costs, ALONE, Network(), providers, plan).preferences == ()

"""Another plan takes the place of the running one only where it gains more than its standstill costs."""

from dataclasses import replace

from ravnest.planner.plan import Plan
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.recovery.worth_it import DEPLOY_SECONDS, HORIZON_SECONDS, MIN_GAIN, Judgement, worth_it
from ravnest.planner.search.search import form
from ravnest.units import byte_size
from tests.builders import plan_of_proposal
from tests.planner.made_up import machine, model, named, planned

GOAL, NETWORK, COSTS = Goal(), Network(), model(12)
WHOLE = float(COSTS.parameter_bytes[-1])
WITH_STATE = 1 + COSTS.state_bytes_per_byte


def deployed(*clusters: list[Provider]) -> Plan:
    nodes = named(*(provider for cluster in clusters for provider in cluster))
    found = planned(COSTS, GOAL, NETWORK, nodes, *([provider.name for provider in cluster] for cluster in clusters))
    return plan_of_proposal(found, COSTS, GOAL, NETWORK, nodes)


def with_more(running: Plan, *newcomers: Provider) -> tuple[Plan, Judgement]:
    """The plan that the search finds with these as well, and what is thought of it."""
    nodes = {**running.basis.providers, **named(*newcomers)}
    found = form(COSTS, GOAL, NETWORK, list(nodes.values()), known=running.proposal.clusters)
    plan = plan_of_proposal(found, COSTS, GOAL, NETWORK, nodes)
    return plan, worth_it(running, range(len(running.clusters)), plan)


ANN, BOB = machine("ann"), machine("bob")


def test_a_machine_that_makes_much_faster_is_worth_a_standstill() -> None:
    running = deployed([ANN])
    plan, found = with_more(running, machine("gus", 3.0))
    assert plan.steady_samples_per_second > (1 + MIN_GAIN) * running.steady_samples_per_second
    assert found.is_worth_it and found.gain > MIN_GAIN


def test_the_same_clusters_are_no_change() -> None:
    running = deployed([ANN])
    plan, found = with_more(running, machine("tiny", memory=1e6))
    assert plan.standbys == ("tiny",)
    assert not found.is_worth_it and found.gain == 0.0


def test_a_few_per_cent_are_not_worth_a_standstill() -> None:
    running = deployed([ANN])
    faster = replace(ANN, compute_speed=1 + MIN_GAIN / 2, name="gus")
    plan = deployed([faster])
    found = worth_it(running, [0], plan)
    assert 0 < found.gain < MIN_GAIN and not found.is_worth_it


def test_what_must_be_fetched_over_a_slow_line_counts_against_a_plan() -> None:
    running = deployed([ANN])
    fast, slow = (worth_it(running, [0], deployed([machine("gus", 2.0, mbps=mbps)])) for mbps in (1000.0, 3.0))
    assert fast.is_worth_it and not slow.is_worth_it
    standstill = DEPLOY_SECONDS + WHOLE * WITH_STATE / (3 * 125_000)
    assert f"which takes {standstill:.3g} s" in slow.reason and standstill < HORIZON_SECONDS


def test_only_what_a_provider_lacks_of_its_new_stage_is_fetched() -> None:
    running, plan = deployed([ANN]), deployed([ANN, BOB])
    found = worth_it(running, [0], plan)
    of_bob = plan.clusters[0].stages[1].cost.parameter_bytes
    assert f"{byte_size(of_bob * WITH_STATE)} are fetched" in found.reason


def test_any_plan_is_worth_it_where_no_cluster_trains() -> None:
    assert worth_it(deployed([ANN]), [], deployed([BOB])).is_worth_it

"""Last step of a search: the plan that a person would choose among those that are about as fast as the best."""

from collections.abc import Mapping
from dataclasses import replace

from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal
from ravnest.planner.search.preference.even_cuts import TOLERANCE, is_about_as_good, with_even_cuts
from ravnest.planner.search.preference.few_in_flight import with_few_in_flight
from ravnest.planner.search.preference.idle_machines import cost_of_requested_stages, without_idle_machines
from ravnest.units import byte_size


def settled(
    model: ModelCosts, goal: Goal, network: Network, providers: Mapping[str, Provider], found: Proposal
) -> Proposal:
    """The proposal with even cuts, without idle machines and with no more in flight than shared cores can work on, and
    with the reasons as its `preferences`."""
    fewer, why_fewer = with_few_in_flight(model, goal, network, providers, found)
    even = with_even_cuts(model, goal, network, providers, fewer)
    plan = without_idle_machines(model, goal, network, providers, even, found)
    if plan is not even:
        again, _ = with_few_in_flight(model, goal, network, providers, plan)
        again = with_even_cuts(model, goal, network, providers, again)
        if is_about_as_good(again.score, found.score):
            plan = replace(again, preferences=plan.preferences)
    reasons = (
        *why_fewer,
        _moved(model, providers, fewer, plan),
        *plan.preferences,
        cost_of_requested_stages(model, goal, network, providers, plan),
    )
    return replace(plan, preferences=tuple(filter(None, reasons)))


def _moved(model: ModelCosts, providers: Mapping[str, Provider], found: Proposal, plan: Proposal) -> str:
    """A sentence about the change against the fastest cuts; empty if the even ones are better in no figure."""
    if {cluster.providers for cluster in found.clusters} != {cluster.providers for cluster in plan.clusters}:
        return ""
    fuller, full = _fullest(providers, found), _fullest(providers, plan)
    more, less = _crossing_bytes(model, found), _crossing_bytes(model, plan)
    changes = []
    if byte_size(full) != byte_size(fuller):
        changes.append(f"the fullest stage takes {byte_size(full)} instead of {byte_size(fuller)}")
    if byte_size(less) != byte_size(more):
        changes.append(f"{byte_size(less)} cross the cuts instead of {byte_size(more)}")
    if (full >= fuller and less >= more) or not changes:
        return ""
    return f"within {TOLERANCE:.0%} of the fastest cuts, {' and '.join(changes)}"


def _fullest(providers: Mapping[str, Provider], plan: Proposal) -> float:
    """The memory of the stage that fills its machine the most."""
    stages = (stage for cluster in plan.clusters for stage in cluster.stages)
    return max(stages, key=lambda stage: stage.memory_bytes / providers[stage.provider].memory_bytes).memory_bytes


def _crossing_bytes(model: ModelCosts, plan: Proposal) -> float:
    """The bytes of a microbatch of every cluster that cross its cuts, both ways."""
    index = {place: i for i, place in enumerate(model.places)}
    traffic = model.forward_bytes + model.backward_bytes
    return float(sum(traffic[index[stage.start]] for cluster in plan.clusters for stage in cluster.stages[1:]))

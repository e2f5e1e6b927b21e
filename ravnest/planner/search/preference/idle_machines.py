"""Idle machines: stages that are smaller than they are worth, and plans without them.

A stage costs a machine and two hops of every microbatch, and its messages take time however little it computes. A
search may still keep such a stage where something else is the limit, because it harms no rate.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ravnest.planner.cluster import Cluster
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal, proposal_of
from ravnest.planner.search.preference.even_cuts import is_about_as_good
from ravnest.planner.search.refine_cuts import finer_cuts
from ravnest.units import sample_rate

LITTLE: Final = 0.2
"""A stage with less than this share of what an even one would compute and hold does next to nothing."""

_COMPARED: Final = 8
"""Stages up to which a requested number of them is compared with one fewer."""


def idle_stages(model: ModelCosts, cluster: Cluster) -> list[int]:
    """The stages that compute next to nothing and hold next to nothing, the smallest first. A single stage never
    does."""
    index = {place: i for i, place in enumerate(model.places)}
    work = model.heavy_seconds + model.light_seconds
    total, held = float(work[-1]) or 1.0, sum(stage.memory_bytes for stage in cluster.stages)
    shares = {
        number: max(float(work[index[s.end]] - work[index[s.start]]) / total, s.memory_bytes / held)
        for number, s in enumerate(cluster.stages)
    }
    little = LITTLE / len(cluster.stages)
    return sorted((number for number, share in shares.items() if share < little), key=lambda number: shares[number])


def without_idle_machines(
    model: ModelCosts, goal: Goal, network: Network, providers: Mapping[str, Provider], plan: Proposal, before: Proposal
) -> Proposal:
    """The plan without the machines whose stages do next to nothing, which become standbys, as long as the goal allows
    it, the memory of the others suffices, and the score stays about as good as that of the plan `before`."""
    for cluster in plan.clusters:
        now = cluster
        for _ in cluster.stages[1:]:
            fewer = _one_fewer(model, goal, network, providers, plan, now, before)
            if fewer is None:
                break
            plan, now = fewer
    return plan


def _one_fewer(
    model: ModelCosts,
    goal: Goal,
    network: Network,
    providers: Mapping[str, Provider],
    plan: Proposal,
    cluster: Cluster,
    before: Proposal,
) -> tuple[Proposal, Cluster] | None:
    """The plan with this cluster without one of its idle machines, and the cluster; None if it has to keep them."""
    used = sum(len(each.stages) for each in plan.clusters)
    if len(cluster.stages) <= max(1, goal.min_stages) or used <= goal.min_providers:
        return None
    for number in idle_stages(model, cluster):
        found = _without(model, goal, network, providers, plan, cluster, number)
        if found is not None and is_about_as_good(found[0].score, before.score):
            tried, smaller = found
            left = cluster.stages[number].provider
            reason = f"{left} stands by: it would compute and hold next to nothing of the model as a stage of its own"
            return replace(tried, preferences=(*plan.preferences, reason)), smaller
    return None


def _without(
    model: ModelCosts,
    goal: Goal,
    network: Network,
    providers: Mapping[str, Provider],
    plan: Proposal,
    cluster: Cluster,
    number: int,
) -> tuple[Proposal, Cluster] | None:
    """The plan without the machine of one stage of a cluster, whose others are cut again; None if it does not fit."""
    if len(plan.clusters) == 1:
        goal = replace(goal, max_clusters=1)
    order = [providers[stage.provider] for k, stage in enumerate(cluster.stages) if k != number]
    smaller = finer_cuts(model, goal, network, order)
    if smaller is None:
        return None
    clusters = [smaller if each is cluster else each for each in plan.clusters]
    return proposal_of(goal, network, providers, clusters), smaller


def cost_of_requested_stages(
    model: ModelCosts, goal: Goal, network: Network, providers: Mapping[str, Provider], plan: Proposal
) -> str:
    """A sentence if one stage fewer than requested would be faster; otherwise empty."""
    cluster = plan.clusters[0]
    stages = len(cluster.stages)
    if len(plan.clusters) > 1 or not 1 < stages <= min(goal.min_stages, _COMPARED):
        return ""
    tried = [_without(model, goal, network, providers, plan, cluster, number) for number in range(stages)]
    best = max((found[0] for found in tried if found is not None), key=lambda one: one.score, default=None)
    if best is None or is_about_as_good(plan.score, best.score):
        return ""
    [left] = set(cluster.providers) - set(best.clusters[0].providers)
    rate, now = sample_rate(best.predicted_samples_per_second), sample_rate(plan.predicted_samples_per_second)
    return f"{stages} stages were asked for; without {left} the others would train {rate} samples/s instead of {now}"

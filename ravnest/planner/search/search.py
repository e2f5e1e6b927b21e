"""Cluster formation: the clusters and standbys with the best predicted score.

For few providers, all partitions are compared; for many, a heuristic search with several strategies. Similar machines
end up together because that makes the fastest clusters.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from ravnest.errors import PlanError
from ravnest.planner.cluster import Cluster, cluster_of, memory_bytes
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal, proposal_of
from ravnest.planner.reliability import expected_absent
from ravnest.planner.search.cuts import best_cuts
from ravnest.planner.search.exhaustive import MOST, FewProviders
from ravnest.planner.search.heuristic import ManyProviders
from ravnest.planner.search.shortage import cannot_be_held, fitting_order
from ravnest.planner.shared_limits import totals

_MORE_PLACES: Final = 101


def form(
    model: ModelCosts,
    goal: Goal,
    network: Network,
    providers: Sequence[Provider],
    *,
    seed: int = 0,
    seconds: float | None = None,
    known: Sequence[Cluster] = (),
) -> Proposal:
    """The proposal with the best score that was found; PlanError, with the shortage, if the model fits nowhere.

    The same arguments and seed give the same proposal, unless `seconds` sets the duration of the search. `known` are
    the clusters of another plan for the same model: the result is no worse than those whose providers are all present.
    """
    if goal.min_clusters > 1 or goal.max_clusters == 1 or not _averaging_matters(model, goal, providers):
        return _formed(model, goal, network, providers, seed, seconds, known)
    # A cluster that trains alone keeps nothing for averaging, and may fit where several do not.
    alone = replace(goal, max_clusters=1)
    plans = []
    with contextlib.suppress(PlanError):
        plans = [_formed(model, goal, network, providers, seed, seconds, known)]
    # The first of equals.
    return max([_formed(model, alone, network, providers, seed, seconds, known), *plans], key=lambda plan: plan.score)


def _formed(
    model: ModelCosts,
    goal: Goal,
    network: Network,
    providers: Sequence[Provider],
    seed: int,
    seconds: float | None,
    known: Sequence[Cluster],
) -> Proposal:
    ordered = sorted(providers, key=lambda p: p.name)
    by_name = {p.name: p for p in ordered}
    assert len(by_name) == len(ordered), "Providers have names of their own."
    usable = [p for p in ordered if p.memory_bytes >= _smallest_stage_bytes(model, goal)]
    needed = max(goal.min_providers, goal.min_clusters * goal.min_stages)
    most = (goal.max_clusters or len(usable)) * model.max_stages
    if not usable or needed > min(len(usable), most) or goal.min_stages > model.max_stages:
        raise cannot_be_held(model, goal, ordered)
    search = _search(model, goal, network, usable, seed, seconds)
    clusters: Sequence[Cluster] = ()
    standbys = 0
    absent = expected_absent(p.reliability for p in usable)
    for standbys in range(min(absent, len(usable) - needed), -1, -1):
        clusters = search(standbys)
        if clusters:
            break
    plans = [proposal_of(goal, network, by_name, clusters)] if clusters else []
    again = _known_plan(model, goal, network, by_name, known)
    if again is not None and (not standbys or enough_stand_by(usable, again.clusters)):
        plans.append(again)
    if not plans:
        # The search prefers fast orders; a model that barely fits may need another one.
        order = fitting_order(model, goal, usable) if goal.min_clusters == 1 else None
        cluster = best_cuts(model, goal, network, order) if order is not None else None
        if cluster is None:
            raise cannot_be_held(model, goal, ordered)
        plans = [proposal_of(goal, network, by_name, [cluster])]
    return max(plans, key=lambda plan: plan.score)


def enough_stand_by(providers: Sequence[Provider], clusters: Sequence[Cluster]) -> bool:
    """Whether there are as many standbys as are expected to be missing, counting those with memory for some stage."""
    busy = {stage.provider for cluster in clusters for stage in cluster.stages}
    least = min(stage.memory_bytes for cluster in clusters for stage in cluster.stages)
    ready = [p for p in providers if p.name not in busy and p.memory_bytes >= least]
    relevant = [*(p for p in providers if p.name in busy), *ready]
    return len(ready) >= expected_absent(p.reliability for p in relevant)


def _search(
    model: ModelCosts,
    goal: Goal,
    network: Network,
    providers: Sequence[Provider],
    seed: int,
    seconds: float | None,
) -> Callable[[int], Sequence[Cluster]]:
    """The search for clusters that leave out a given number of providers."""

    def rule(standbys: int) -> Callable[[Sequence[Cluster]], bool] | None:
        """The test for allowed clusters; None if all are."""
        if not standbys and goal.min_clusters == 1:
            return None
        return lambda clusters: _keeps_to(goal, clusters) and (not standbys or enough_stand_by(providers, clusters))

    if len(providers) <= MOST:
        few = FewProviders(model, goal, network, providers)
        if not few.can_hold_model:
            # A stage may fit only between places that the search usually leaves out.
            few = FewProviders(model, goal, network, providers, _MORE_PLACES)
        return lambda standbys: few.best(standbys, rule(standbys))
    if seconds is None:
        many = ManyProviders(model, goal, network, providers, seed, None)
        return lambda standbys: many.best(standbys, rule(standbys))
    deadline = time.monotonic() + seconds
    by_name = {p.name: p for p in providers}
    timed = ManyProviders(model, goal, network, providers, seed, lambda: time.monotonic() < deadline)

    def repeatedly(standbys: int) -> Sequence[Cluster]:
        """The best of repeated searches, which differ by their random numbers."""
        best = timed.best(standbys, rule(standbys))
        while best and time.monotonic() < deadline:
            other = timed.best(standbys, rule(standbys))
            best = max(best, other, key=lambda c: totals(goal, network, by_name, c).score if c else 0.0)
        return best

    return repeatedly


def _known_plan(
    model: ModelCosts, goal: Goal, network: Network, providers: Mapping[str, Provider], known: Sequence[Cluster]
) -> Proposal | None:
    """The proposal with those of the known clusters that are still possible with the same cuts."""
    index = {place: i for i, place in enumerate(model.places)}
    found = []
    for cluster in known:
        if all(stage.provider in providers and stage.start in index for stage in cluster.stages):
            order = [providers[stage.provider] for stage in cluster.stages]
            cuts = [index[stage.start] for stage in cluster.stages[1:]]
            again = cluster_of(model, goal, network, order, cuts, cluster.in_flight)
            if all(stage.memory_bytes <= p.memory_bytes for stage, p in zip(again.stages, order, strict=True)):
                found.append(again)
    stages = min((len(cluster.stages) for cluster in found), default=0)
    if not found or stages < goal.min_stages or not _keeps_to(goal, found):
        return None
    return proposal_of(goal, network, providers, found)


def _keeps_to(goal: Goal, clusters: Sequence[Cluster]) -> bool:
    """Whether the numbers of these clusters, and of their providers, are within the goal."""
    most = goal.max_clusters or len(clusters)
    return (
        goal.min_clusters <= len(clusters) <= most
        and sum(len(cluster.stages) for cluster in clusters) >= goal.min_providers
    )


def _averaging_matters(model: ModelCosts, goal: Goal, providers: Sequence[Provider]) -> bool:
    """Whether some stage may not fit because of the memory that averaging needs."""
    if not goal.average_memory or not providers:
        return False
    held = memory_bytes(model, goal, goal.max_in_flight)
    return float(held.max()) > min(p.memory_bytes for p in providers)


def _smallest_stage_bytes(model: ModelCosts, goal: Goal) -> float:
    held = memory_bytes(model, goal, goal.in_flight or 1)
    return float(np.min(np.where(model.legal, held, np.inf)))

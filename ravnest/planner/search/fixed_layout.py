"""Clusters with fixed cuts: those of an earlier plan, with the providers that are present now."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ravnest.errors import PlanError
from ravnest.planner.cluster import Cluster, cluster_of, memory_bytes
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal, proposal_of
from ravnest.planner.search.objective import score


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """The providers and the cuts of a cluster."""

    providers: tuple[str, ...]
    """The providers of its stages, in order."""
    places: tuple[int, ...]
    """The places of the model at which the stages after the first begin."""
    in_flight: int


def filled(layouts: Sequence[ClusterLayout], present: Collection[str]) -> tuple[ClusterLayout, ...] | None:
    """The same layouts with providers without a stage in place of the absent ones; None if there are too few."""
    holding = {name for layout in layouts for name in layout.providers}
    free = sorted(set(present) - holding)
    absent = sorted(holding - set(present))
    if len(absent) > len(free):
        return None
    instead = dict(zip(absent, free, strict=False))
    return tuple(replace(each, providers=tuple(instead.get(name, name) for name in each.providers)) for each in layouts)


def laid_out(
    model: ModelCosts, goal: Goal, network: Network, providers: Mapping[str, Provider], layouts: Sequence[ClusterLayout]
) -> Proposal:
    """The proposal with these layouts; PlanError if they are not possible any more."""
    index = {place: number for number, place in enumerate(model.places)}
    clusters = []
    for each in layouts:
        if absent := [name for name in each.providers if name not in providers]:
            raise PlanError(f"{absent[0]} held a stage and is not present")
        if any(place not in index for place in each.places):
            raise PlanError("the model can no longer be cut where it was cut before")
        order, cuts = [providers[name] for name in each.providers], [index[place] for place in each.places]
        cluster = same_cuts(model, goal, network, order, cuts, each.in_flight)
        if cluster is None:
            raise PlanError(f"the stages of {', '.join(each.providers)} no longer fit into their memory")
        clusters.append(cluster)
    return proposal_of(goal, network, providers, clusters)


def cuts_of(model: ModelCosts, cluster: Cluster) -> tuple[int, ...]:
    """The cuts of a cluster, as indices into `model.places`."""
    index = {place: i for i, place in enumerate(model.places)}
    return tuple(index[stage.start] for stage in cluster.stages[1:])


def same_cuts(
    model: ModelCosts, goal: Goal, network: Network, order: Sequence[Provider], cuts: Sequence[int], in_flight: int
) -> Cluster | None:
    """The cluster of this order with these cuts and the best number in flight; None if a stage does not fit.

    `in_flight` is the number before, which stays unless another is better.
    """
    bounds = (0, *cuts, model.last)
    cluster = cluster_of(model, goal, network, order, cuts, in_flight)
    numbers = [1] if len(order) == 1 else [goal.max_in_flight]
    if goal.in_flight is None and len(order) > 1:
        highest = min(goal.max_in_flight, max(in_flight, cluster.enough_in_flight))
        numbers = sorted(range(1, highest + 1), key=lambda number: (abs(number - in_flight), number))
    best: Cluster | None = None
    for number in numbers:
        tried = replace(cluster, in_flight=number)
        if best is not None and score(goal, tried) <= score(goal, best) * (1 + 1e-9):
            continue
        held = memory_bytes(model, goal, number)
        if all(held[bounds[k], bounds[k + 1]] <= provider.memory_bytes for k, provider in enumerate(order)):
            best = tried
    return None if best is None else cluster_of(model, goal, network, order, cuts, best.in_flight)

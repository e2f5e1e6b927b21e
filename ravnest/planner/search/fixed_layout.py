"""A plan as it was: the same clusters, cut where they were, with whoever is there of those who held their stages."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ravnest.errors import PlanError
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal, proposal_of
from ravnest.planner.search.same_cuts import same_cuts


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """How a cluster lies."""

    providers: tuple[str, ...]
    """Who holds its stages, in order."""
    places: tuple[int, ...]
    """Where the stages after the first begin in the model."""
    in_flight: int


def filled(layouts: Sequence[ClusterLayout], present: Collection[str]) -> tuple[ClusterLayout, ...] | None:
    """The same with somebody who has no stage in the place of each who is absent; None where there are too few."""
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
    """The plan of clusters that lie so; PlanError where they cannot."""
    index = {place: number for number, place in enumerate(model.places)}
    clusters = []
    for each in layouts:
        if absent := [name for name in each.providers if name not in providers]:
            raise PlanError(f"{absent[0]} held a stage and is not there")
        if any(place not in index for place in each.places):
            raise PlanError("the model cannot be cut any more where it was cut before")
        order, cuts = [providers[name] for name in each.providers], [index[place] for place in each.places]
        cluster = same_cuts(model, goal, network, order, cuts, each.in_flight)
        if cluster is None:
            raise PlanError(f"the stages of {', '.join(each.providers)} do not fit into their memory any more")
        clusters.append(cluster)
    return proposal_of(goal, network, providers, clusters)

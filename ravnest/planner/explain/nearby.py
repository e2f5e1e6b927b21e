"""Plans close to a given one: the steps that use a provider without a stage.

Each step takes some clusters of a plan away and puts others in their place, and says so in words. Only the likeliest
providers and clusters are tried, so that steps are found quickly in a plan of any size.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ravnest.planner.cluster import Cluster
from ravnest.planner.link_codecs import assumed_share
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal
from ravnest.planner.search.cuts import best_cuts
from ravnest.planner.search.same_cuts import any_order, cuts_of, same_cuts, with_one_more

HELPERS: Final = 6
"""How many of those who stand by are tried for one place."""

NEIGHBOURS: Final = 5
"""How many other clusters are tried for one machine."""

MORE: Final = 3
"""How many larger numbers of members are tried for a new cluster, beyond the fewest that hold the model."""


@dataclass(frozen=True, slots=True)
class Case:
    """The model and the machines that are there."""

    model: ModelCosts
    rough: ModelCosts
    """The same with fewer places, for cuts that are tried out."""
    goal: Goal
    network: Network
    providers: Mapping[str, Provider]

    def named(self, names: Sequence[str]) -> list[Provider]:
        return [self.providers[name] for name in names]

    def allows(self, cluster: Cluster) -> bool:
        return len(cluster.stages) >= min(self.goal.min_stages, len(self.providers))

    def cut_anew(self, order: Sequence[Provider]) -> Cluster | None:
        return best_cuts(self.rough, self.goal, self.network, order)

    def in_any_order(self, members: Sequence[Provider]) -> Cluster | None:
        return any_order(self.rough, self.goal, self.network, members)

    def with_one_more(self, order: Sequence[Provider], one_more: Provider) -> Cluster | None:
        return with_one_more(self.rough, self.goal, self.network, order, one_more)

    def cut_alike(self, order: Sequence[Provider], like: Cluster) -> Cluster | None:
        cuts = cuts_of(self.model, like)
        return same_cuts(self.model, self.goal, self.network, order, cuts, like.in_flight)


@dataclass(frozen=True, slots=True)
class PlanChange:
    """Clusters of a plan that others replace."""

    removed: tuple[Cluster, ...]
    added: tuple[Cluster, ...]


def improvements(case: Case, plan: Proposal, free: Sequence[str], spare: Sequence[str]) -> Iterator[PlanChange]:
    """Ways to use those of a plan who stand by: the free ones in a cluster that is there or a new one, the spare ones
    to make up the number of a new one."""
    for name in _unlike(case, free)[:HELPERS]:
        for cluster in _likely(case, plan.clusters, name):
            slowest = max(cluster.stages, key=lambda stage: stage.seconds).provider
            instead = case.named([name if member == slowest else member for member in cluster.providers])
            for found in (
                case.with_one_more(case.named(cluster.providers), case.providers[name]),
                case.cut_alike(instead, cluster),
                case.cut_anew(instead) if len(instead) > 1 else None,
            ):
                if found is not None:
                    yield PlanChange((cluster,), (found,))
    if free and (case.goal.max_clusters is None or len(plan.clusters) < case.goal.max_clusters):
        yield from _new_clusters(case, free, spare)


def listed(names: Sequence[str]) -> str:
    """ "ann", "ann and bob", "ann, bob and cat"; of very many the first ones."""
    if len(names) > _LISTED + 1:
        return f"{', '.join(names[:_LISTED])} and {len(names) - _LISTED} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


Figures = tuple[int, float, float, float, float, float, bool, str]


def figures(provider: Provider) -> Figures:
    """What two machines must share so that a plan may take either."""
    p = provider
    line = p.up_bytes_per_second, p.down_bytes_per_second, p.latency_seconds, p.reachable, p.host
    return p.memory_bytes, p.compute_speed, p.memory_speed, *line


_LISTED = 8


def _new_clusters(case: Case, free: Sequence[str], spare: Sequence[str]) -> Iterator[PlanChange]:
    """Clusters of those who are free, and of spare ones where these are too few: of the fewest of the best that can
    hold the model, and of some more."""
    in_turn = _best_first(case, free) + _best_first(case, spare)
    found = 0
    for count in range(max(1, case.goal.min_stages), min(len(in_turn), case.model.max_stages, _LARGEST) + 1):
        members = in_turn[:count]
        cluster = case.in_any_order(case.named(members))
        if cluster is not None:
            yield PlanChange((), (cluster,))
            found += 1
        if found > MORE:
            return


_LARGEST = 12


def _best_first(case: Case, names: Sequence[str]) -> list[str]:
    """Who would be done first with a typical stage: its work, what crosses its ends, and its part of a round."""
    model = case.model
    heavy, light, size = (
        float(sums[-1]) / _TYPICAL for sums in (model.heavy_seconds, model.light_seconds, model.parameter_bytes)
    )
    forward, backward = model.carried(assumed_share(case.goal))
    crossing = float(np.median(forward + backward))

    def seconds(name: str) -> tuple[float, str]:
        p = case.providers[name]
        line = min(p.up_bytes_per_second, p.down_bytes_per_second)
        work = heavy / p.compute_speed + light / p.memory_speed
        return max(work, crossing / line) + 2 * size / line / case.goal.average_every, name

    return sorted(names, key=seconds)


_TYPICAL: Final = 4
"""Of so many stages, for want of a better guess."""


def _unlike(case: Case, names: Sequence[str]) -> list[str]:
    """One of each kind, the best first: of two that are alike in all figures the first by name will do."""
    kinds: dict[Figures, str] = {}
    for name in _best_first(case, names):
        kinds.setdefault(figures(case.providers[name]), name)
    return list(kinds.values())


def _likely(case: Case, clusters: Sequence[Cluster], name: str) -> list[Cluster]:
    """The clusters to which one more machine like this may bring most: fast ones for which it is a large part."""
    speed = case.providers[name].compute_speed

    def gain(cluster: Cluster) -> tuple[float, str]:
        others = sum(case.providers[n].compute_speed for n in cluster.providers)
        return -cluster.samples_per_second * speed / (others + speed), cluster.providers[0]

    return sorted(clusters, key=gain)[:NEIGHBOURS]

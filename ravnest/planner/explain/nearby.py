"""Plans close to a given one: changes that use a provider without a stage.

Each change replaces some clusters of a plan by others. Only the likeliest providers and clusters are tried, so that
changes are found quickly in a plan of any size.
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
from ravnest.planner.search.fixed_layout import cuts_of, same_cuts
from ravnest.planner.search.order import best_of, best_order

HELPERS: Final = 6
"""Number of standbys that are tried for one place."""

NEIGHBOURS: Final = 5
"""Number of clusters that are tried for one machine."""

MORE: Final = 3
"""Number of larger sizes that are tried for a new cluster, beyond the smallest that holds the model."""

ORDER_PLACES: Final = 32
"""Places to cut a model while an order is looked for: the order hardly depends on the exact place."""

ORDER_EXACT: Final = 5
"""Members up to which all orders are compared."""


@dataclass(frozen=True, slots=True)
class Case:
    """The model and the machines that a plan was made for."""

    model: ModelCosts
    rough: ModelCosts
    """The same with fewer places, for cuts that are tried."""
    goal: Goal
    network: Network
    providers: Mapping[str, Provider]

    def named(self, names: Sequence[str]) -> list[Provider]:
        return [self.providers[name] for name in names]

    def allows(self, cluster: Cluster) -> bool:
        return len(cluster.stages) >= min(self.goal.min_stages, len(self.providers))

    def with_new_cuts(self, order: Sequence[Provider]) -> Cluster | None:
        return best_cuts(self.rough, self.goal, self.network, order)

    def with_same_cuts(self, order: Sequence[Provider], like: Cluster) -> Cluster | None:
        cuts = cuts_of(self.model, like)
        return same_cuts(self.model, self.goal, self.network, order, cuts, like.in_flight)

    def with_one_more(self, order: Sequence[Provider], one_more: Provider) -> Cluster | None:
        """The best cluster of this order with one more provider in it; None if the model cannot be cut for it."""
        orders = [[*order[:k], one_more, *order[k:]] for k in range(len(order) + 1)]
        return best_of(self.rough, self.goal, self.network, orders)

    def in_any_order(self, members: Sequence[Provider]) -> Cluster | None:
        """A good cluster of all these members; None if the model cannot be cut for them.

        For few of them, it has the best order; for many, the best of the given order and some plausible ones.
        """
        orders = [list(members)]
        if len(members) > ORDER_EXACT:
            orders.append(sorted(members, key=lambda p: (-p.memory_bytes, p.name)))
            orders.append(sorted(members, key=lambda p: (-min(p.up_bytes_per_second, p.down_bytes_per_second), p.name)))
        elif len(members) > 1:
            model = self.rough.coarser(ORDER_PLACES)
            best = best_order(model, self.goal, self.network, members, exact=ORDER_EXACT)
            # With fewer places, a model may not fit that fits with all of them.
            if best is not None:
                orders = [self.named(best.providers)]
        return best_of(self.rough, self.goal, self.network, orders)


@dataclass(frozen=True, slots=True)
class PlanChange:
    """Clusters of a plan that others replace."""

    removed: tuple[Cluster, ...]
    added: tuple[Cluster, ...]


def improvements(case: Case, plan: Proposal, free: Sequence[str], spare: Sequence[str]) -> Iterator[PlanChange]:
    """Changes that use standbys: the `free` ones in an existing cluster or a new one, the `spare` ones only to complete
    a new one."""
    for name in _kinds(case, free)[:HELPERS]:
        for cluster in _likely_clusters(case, plan.clusters, name):
            slowest = max(cluster.stages, key=lambda stage: stage.seconds).provider
            instead = case.named([name if member == slowest else member for member in cluster.providers])
            for found in (
                case.with_one_more(case.named(cluster.providers), case.providers[name]),
                case.with_same_cuts(instead, cluster),
                case.with_new_cuts(instead) if len(instead) > 1 else None,
            ):
                if found is not None:
                    yield PlanChange((cluster,), (found,))
    if free and (case.goal.max_clusters is None or len(plan.clusters) < case.goal.max_clusters):
        yield from _new_clusters(case, free, spare)


def listed(names: Sequence[str]) -> str:
    """ "ann", "ann and bob", "ann, bob and cat"; only the first of many."""
    if len(names) > _LISTED + 1:
        return f"{', '.join(names[:_LISTED])} and {len(names) - _LISTED} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


Figures = tuple[int, float, float, float, float, float, bool, str]


def figures(provider: Provider) -> Figures:
    """The figures in which two machines must be equal for a plan to take either of them."""
    p = provider
    line = p.up_bytes_per_second, p.down_bytes_per_second, p.latency_seconds, p.reachable, p.host
    return p.memory_bytes, p.compute_speed, p.memory_speed, *line


_LISTED = 8


def _new_clusters(case: Case, free: Sequence[str], spare: Sequence[str]) -> Iterator[PlanChange]:
    """New clusters of the best free providers, and of spare ones if these are too few: the smallest that holds the
    model, and some larger ones."""
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
    """The providers by their time for a typical stage: its work, its traffic, and its part of a round."""
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
"""Number of stages from which a typical one is estimated."""


def _kinds(case: Case, names: Sequence[str]) -> list[str]:
    """One provider of each kind, the best first: of those with equal figures, the first by name."""
    kinds: dict[Figures, str] = {}
    for name in _best_first(case, names):
        kinds.setdefault(figures(case.providers[name]), name)
    return list(kinds.values())


def _likely_clusters(case: Case, clusters: Sequence[Cluster], name: str) -> list[Cluster]:
    """The clusters that may gain most from one more machine like this: fast ones of which it is a large part."""
    speed = case.providers[name].compute_speed

    def gain(cluster: Cluster) -> tuple[float, str]:
        others = sum(case.providers[n].compute_speed for n in cluster.providers)
        return -cluster.samples_per_second * speed / (others + speed), cluster.providers[0]

    return sorted(clusters, key=gain)[:NEIGHBOURS]

"""A cluster changed a little: the same cuts with another provider, one more provider, or the same in another order."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ravnest.planner.cluster import Cluster, cluster_of, memory_bytes
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.search.order import best_of, best_order, score

ORDER_PLACES: Final = 32
"""An order is looked for with so many places to cut, as it hardly hangs on the exact place."""

ORDER_EXACT: Final = 5
"""Up to so many providers all orders are looked at."""


def cuts_of(model: ModelCosts, cluster: Cluster) -> tuple[int, ...]:
    """Where a cluster is cut, as indices into `model.places`."""
    index = {place: i for i, place in enumerate(model.places)}
    return tuple(index[stage.start] for stage in cluster.stages[1:])


def same_cuts(
    model: ModelCosts, goal: Goal, network: Network, order: Sequence[Provider], cuts: Sequence[int], in_flight: int
) -> Cluster | None:
    """The cluster of these with these cuts, with as many in flight as is best; None where a stage does not fit.

    `in_flight` is how many there were: they stay where nothing else is better.
    """
    bounds = (0, *cuts, model.last)
    cluster = cluster_of(model, goal, network, order, cuts, in_flight)
    numbers = [1] if len(order) == 1 else [goal.max_in_flight]
    if goal.in_flight is None and len(order) > 1:
        most = min(goal.max_in_flight, max(in_flight, cluster.enough_in_flight))
        numbers = sorted(range(1, most + 1), key=lambda number: (abs(number - in_flight), number))
    best: Cluster | None = None
    for number in numbers:
        tried = replace(cluster, in_flight=number)
        if best is not None and score(goal, tried) <= score(goal, best) * (1 + 1e-9):
            continue
        held = memory_bytes(model, goal, number)
        if all(held[bounds[k], bounds[k + 1]] <= provider.memory_bytes for k, provider in enumerate(order)):
            best = tried
    return None if best is None else cluster_of(model, goal, network, order, cuts, best.in_flight)


def with_one_more(
    model: ModelCosts, goal: Goal, network: Network, order: Sequence[Provider], one_more: Provider
) -> Cluster | None:
    """The best cluster of these in this order with one more among them, cut anew; None where none can be cut."""
    return best_of(model, goal, network, [[*order[:k], one_more, *order[k:]] for k in range(len(order) + 1)])


def any_order(model: ModelCosts, goal: Goal, network: Network, providers: Sequence[Provider]) -> Cluster | None:
    """A good cluster of all of these in whatever order; None where the model cannot be cut for them.

    The best order for few of them; for many the best of some plausible ones, the one given among them.
    """
    orders = [list(providers)]
    if len(providers) > ORDER_EXACT:
        orders.append(sorted(providers, key=lambda p: (-p.memory_bytes, p.name)))
        orders.append(sorted(providers, key=lambda p: (-min(p.up_bytes_per_second, p.down_bytes_per_second), p.name)))
    elif len(providers) > 1:
        rough = best_order(model.coarser(ORDER_PLACES), goal, network, providers, exact=ORDER_EXACT)
        # With fewer places nothing may fit that does with all of them.
        if rough is not None:
            by_name = {provider.name: provider for provider in providers}
            orders = [[by_name[name] for name in rough.providers]]
    return best_of(model, goal, network, orders)

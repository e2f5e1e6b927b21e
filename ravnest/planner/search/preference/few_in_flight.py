"""No more microbatches in flight than the cores of shared hosts can work on.

If providers of one machine share its cores, the cores are often the limit, and not the slowest stage. A microbatch then
begins less often than the slowest stage could take it, and fewer in flight keep the cores busy: four stages on two
cores need three, where the slowest stage alone would ask for six. Every further one would only wait, with its
activations and its version of the weights, and make updates staler.
"""

from collections.abc import Mapping, Sequence

from ravnest.planner.cluster import Cluster, cluster_of
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal, proposal_of
from ravnest.planner.search.fixed_layout import cuts_of
from ravnest.planner.search.preference.even_cuts import is_about_as_good
from ravnest.planner.shared_limits import period_on_hosts
from ravnest.units import counted


def with_few_in_flight(
    model: ModelCosts, goal: Goal, network: Network, providers: Mapping[str, Provider], found: Proposal
) -> tuple[Proposal, tuple[str, ...]]:
    """The proposal with the same cuts, and with fewer microbatches in flight in clusters that their hosts limit; and
    the reason for each of these clusters."""
    if goal.in_flight is not None:
        return found, ()
    clusters: list[Cluster] = []
    reasons: list[str] = []
    for cluster, period in zip(found.clusters, period_on_hosts(network, providers, found.clusters), strict=True):
        enough = cluster.enough_in_flight_at(period) if period else cluster.in_flight
        if len(cluster.stages) < 2 or enough >= cluster.in_flight:
            clusters.append(cluster)
            continue
        order = [providers[name] for name in cluster.providers]
        clusters.append(cluster_of(model, goal, network, order, cuts_of(model, cluster), enough))
        reasons.append(_reason(found, cluster, enough))
    if not reasons:
        return found, ()
    fewer = proposal_of(goal, network, providers, clusters)
    return (fewer, tuple(reasons)) if is_about_as_good(fewer.score, found.score) else (found, ())


def cores_in_use(network: Network, providers: Mapping[str, Provider], clusters: Sequence[Cluster]) -> tuple[float, ...]:
    """By cluster, how many of its stages compute at once on average while its hosts are the limit; 0 if they are
    not."""
    return tuple(
        sum(stage.compute_seconds for stage in cluster.stages) / period if period else 0.0
        for cluster, period in zip(clusters, period_on_hosts(network, providers, clusters), strict=True)
    )


def _reason(found: Proposal, cluster: Cluster, enough: int) -> str:
    flying = counted(enough, "microbatch", "microbatches")
    return f"{flying} in flight instead of {cluster.in_flight}: more would only wait for {found.limit}"

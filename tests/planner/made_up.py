"""Models and machines that are made up: what the planner is asked about where no model needs to be captured."""

from collections.abc import Sequence

import numpy as np

from ravnest.planner.cluster import Cluster, cluster_of
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal, proposal_of
from ravnest.planner.search.cuts import best_cuts

GIGABYTE = 10**9


def model(
    layers: int = 12,
    *,
    layer_seconds: float = 0.01,
    layer_bytes: float = 4e6,
    crossing_bytes: float = 1e5,
    saved_bytes: float = 1e5,
    samples: int = 8,
) -> ModelCosts:
    """So many equal layers, with a place to cut between any two of them; the places count by ten."""
    sums = np.arange(layers + 1, dtype=float)
    crossing = np.full(layers + 1, crossing_bytes)
    crossing[[0, -1]] = 0.0
    ends = np.zeros((2, layers + 1))
    ends[0, 1:] = 1.0
    ends[1, -1] = 1.0
    return ModelCosts(
        places=tuple(10 * i for i in range(layers + 1)),
        heavy_seconds=sums * layer_seconds * 0.9,
        light_seconds=sums * layer_seconds * 0.1,
        heavy_forward_seconds=sums * layer_seconds * 0.3,
        light_forward_seconds=sums * layer_seconds * 0.03,
        parameter_bytes=sums * layer_bytes,
        parameters=sums * 2,
        saved_bytes=sums * saved_bytes,
        forward_bytes=crossing,
        backward_bytes=crossing.copy(),
        input_bytes=(1000.0, 100.0),
        input_uses=ends,
        samples=samples,
    )


def machine(
    name: str,
    speed: float = 1.0,
    *,
    memory: float = 16 * GIGABYTE,
    mbps: float = 100.0,
    up_mbps: float | None = None,
    latency: float = 0.01,
    reachable: bool = True,
    reliability: float = 1.0,
    host: str = "",
) -> Provider:
    """A machine with a line of so many Mbit/s both ways, or fewer up."""
    return Provider(
        name=name,
        memory_bytes=int(memory),
        compute_speed=speed,
        memory_speed=speed,
        up_bytes_per_second=(mbps if up_mbps is None else up_mbps) * 125_000,
        down_bytes_per_second=mbps * 125_000,
        latency_seconds=latency,
        reachable=reachable,
        reliability=reliability,
        host=host,
    )


def named(*providers: Provider) -> dict[str, Provider]:
    return {provider.name: provider for provider in providers}


def planned(
    costs: ModelCosts, goal: Goal, network: Network, providers: dict[str, Provider], *clusters: Sequence[str]
) -> Proposal:
    """The plan of these clusters, each in the order given and cut where that is best."""
    found: list[Cluster] = []
    for names in clusters:
        cluster = best_cuts(costs, goal, network, [providers[name] for name in names])
        assert cluster is not None
        found.append(cluster)
    return proposal_of(goal, network, providers, found)


def cut_at(
    costs: ModelCosts,
    goal: Goal,
    network: Network,
    providers: dict[str, Provider],
    *clusters: tuple[Sequence[str], Sequence[int]],
) -> Proposal:
    """The plan of these clusters, each cut at these places (as the model's tables count them)."""
    found = [cluster_of(costs, goal, network, [providers[n] for n in names], cuts, 2) for names, cuts in clusters]
    return proposal_of(goal, network, providers, found)

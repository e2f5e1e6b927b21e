"""Builders of values that many tests need: plans of made-up clusters."""

from collections.abc import Collection, Mapping, Sequence
from typing import cast

from ravnest.graph.portable import PortableGraph
from ravnest.planner.cluster import StageCost
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.plan import Basis, ClusterPlan, Plan, StagePlan, role_of
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal


def stage_cost(provider: str, seconds: float = 0.0, line_seconds: float = 0.0, fed_bytes: float = 0.0) -> StageCost:
    """A stage of one place that computes this long, behind a line that is busy this long."""
    return StageCost(provider, 0, 1, seconds, 0.0, 0.0, line_seconds, seconds + line_seconds, 1e6, 1e6, fed_bytes, 0.0)


def stage_plan(
    provider: str,
    stage: int = 0,
    graph: PortableGraph = PortableGraph(()),  # noqa: B008 (a frozen value)
    *,
    role: str = "stem",
    parameters: int = 1,
    cluster: int = 0,
    line_seconds: float = 0.0,
) -> StagePlan:
    """A stage of a provider, by default with an empty graph."""
    cost = stage_cost(provider, line_seconds=line_seconds)
    return StagePlan(cost, stage, role, graph, parameters, cluster)


def cluster_plan(stages: Sequence[StagePlan], number: int = 0, in_flight: int = 1, ahead: int = 1) -> ClusterPlan:
    """A cluster of these stages."""
    return ClusterPlan(number, tuple(stages), in_flight, ahead, 1.0, "made up", max_in_flight=in_flight)


def a_plan(clusters: Collection[ClusterPlan], reason: str = "because") -> Plan:
    """A plan of these clusters, made from nothing."""
    basis = Basis(cast(ModelCosts, None), Goal(), Network(), {}, Goal())
    return Plan(tuple(clusters), reason, basis, 1.0, 1.0)


def plan_of_proposal(
    found: Proposal, model: ModelCosts, goal: Goal, network: Network, providers: Mapping[str, Provider]
) -> Plan:
    """The plan of what a search has found, with no graphs of the stages."""
    clusters = []
    for number, (cluster, rate) in enumerate(zip(found.clusters, found.rates, strict=True)):
        count = len(cluster.stages)
        stages = tuple(
            StagePlan(cost, k, role_of(k, count), PortableGraph(()), 1, number) for k, cost in enumerate(cluster.stages)
        )
        clusters.append(
            ClusterPlan(number, stages, cluster.in_flight, 2, rate, cluster.flight_reason, samples=cluster.samples)
        )
    return Plan(
        tuple(clusters),
        "made up",
        Basis(model, goal, network, providers, goal),
        found.predicted_samples_per_second,
        found.score,
        found.limit,
        found.averaging_seconds,
    )

"""The plan of one cluster: which provider holds which stage, where the cuts are, and the rate that promises.

Pure functions: profiles and costs in, a plan with its predicted number and its reason out.
"""

from dataclasses import dataclass

from ravnest.graph.partition import Cuts, choose_cuts, split
from ravnest.graph.portable import PortableGraph
from ravnest.graph.profile import CostProfile


@dataclass(frozen=True, slots=True)
class ProviderProfile:
    """One provider as the planner sees it. Providers of the same `host` share its cores."""

    node: str
    host: str
    cores: int
    threads: int


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: who holds it, its graph, and what it is expected to cost for one microbatch."""

    node: str
    stage: int
    role: str
    graph: PortableGraph
    parameters: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A cluster in order from root to leaf, with the predicted rate and why it is that."""

    stages: tuple[StagePlan, ...]
    predicted_samples_per_second: float
    reason: str


def role_of(stage: int, stages: int) -> str:
    """The glossary's name for a place in the cluster; a single stage is root and leaf in one."""
    if stages == 1:
        return "root+leaf"
    return "root" if stage == 0 else "leaf" if stage == stages - 1 else "stem"


def plan_cluster(graph: PortableGraph, costs: CostProfile, providers: tuple[ProviderProfile, ...]) -> Plan:
    """One stage for each provider, in the order given. PlanError when the model has fewer places to cut."""
    cuts = choose_cuts(graph, costs, len(providers))
    graphs = split(graph, cuts.places)
    stages = tuple(
        StagePlan(
            node=provider.node,
            stage=i,
            role=role_of(i, len(providers)),
            graph=part,
            parameters=sum(_count(p.shape) for p in part.parameters),
            seconds=seconds,
        )
        for i, (provider, part, seconds) in enumerate(zip(providers, graphs, cuts.stage_seconds, strict=True))
    )
    rate, limit = _rate(cuts, costs.samples, providers)
    return Plan(stages, rate, f"{cuts.reason}; {limit} limits it to {rate:.1f} samples/s")


def _rate(cuts: Cuts, samples: int, providers: tuple[ProviderProfile, ...]) -> tuple[float, str]:
    """Samples/s by the slowest stage, or by the busiest host where several stages share its cores."""
    slowest = max(range(len(providers)), key=lambda i: cuts.stage_seconds[i])
    seconds, limit = cuts.stage_seconds[slowest], f"stage {slowest}"
    for host in sorted({p.host for p in providers}):
        there = [i for i, p in enumerate(providers) if p.host == host]
        shared = sum(cuts.stage_seconds[i] * providers[i].threads for i in there) / providers[there[0]].cores
        if shared > seconds:
            seconds, limit = shared, f"the {providers[there[0]].cores} cores of {host}"
    return samples / seconds, limit


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count

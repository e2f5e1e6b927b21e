"""The plan of one cluster: which provider holds which stage, where the cuts are, and the rate that promises.

Pure functions: profiles and costs in, a plan with its predicted number and its reason out.
"""

from dataclasses import dataclass

from ravnest.graph.partition import choose_cuts, split
from ravnest.graph.portable import PortableGraph
from ravnest.graph.profile import CostProfile

FRAME_SECONDS = 300e-6
"""Processor time that a frame costs a node beyond its computation: packing, the transport, passing it from thread to
thread. It hardly depends on the frame's size. Measured by `python -m benchmarks.overhead` on an AMD EPYC at 2.6 GHz;
other machines of this age differ by less than a factor of two."""


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

    @property
    def frames(self) -> int:
        """Frames that this stage takes or sends for one microbatch."""
        fed, done = bool(self.graph.inputs), not self.graph.receives
        return fed + done + 2 * bool(self.graph.receives) + 2 * bool(self.graph.sends)


@dataclass(frozen=True, slots=True)
class Plan:
    """A cluster in order from root to leaf, with the predicted rate and why it is that."""

    stages: tuple[StagePlan, ...]
    places: tuple[int, ...]
    """Where the model is cut, as `split` takes it."""
    predicted_samples_per_second: float
    reason: str


def role_of(stage: int, stages: int) -> str:
    """The glossary's name for a place in the cluster; a single stage is root and leaf in one."""
    if stages == 1:
        return "root+leaf"
    return "root" if stage == 0 else "leaf" if stage == stages - 1 else "stem"


def plan_cluster(
    graph: PortableGraph, costs: CostProfile, providers: tuple[ProviderProfile, ...], coordinator_host: str = ""
) -> Plan:
    """One stage for each provider, in the order given. PlanError when the model has fewer places to cut.

    The coordinator takes its part of the cores of its host, where providers are there too.
    """
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
    seconds, limit = _period(stages, providers, coordinator_host)
    rate = costs.samples / seconds
    return Plan(stages, cuts.places, rate, f"{cuts.reason}; {limit} limits it to {rate:.1f} samples/s")


def _period(
    stages: tuple[StagePlan, ...], providers: tuple[ProviderProfile, ...], coordinator_host: str
) -> tuple[float, str]:
    """Seconds from one microbatch to the next: of the slowest stage, or of a host whose cores several processes share.

    A stage's frames are handled by another thread than the one that computes, but Python runs one of them at a time.
    """
    slowest = max(stages, key=lambda stage: stage.seconds + stage.frames * FRAME_SECONDS)
    seconds, limit = slowest.seconds + slowest.frames * FRAME_SECONDS, f"stage {slowest.stage}"
    for host in sorted({p.host for p in providers}):
        there = [(s, p) for s, p in zip(stages, providers, strict=True) if p.host == host]
        busy = sum(s.seconds * p.threads + s.frames * FRAME_SECONDS for s, p in there)
        if host == coordinator_host:
            fed = sum(bool(stage.graph.inputs) for stage in stages)
            busy += (fed + 1) * FRAME_SECONDS
        cores = there[0][1].cores
        if busy / cores > seconds:
            seconds, limit = busy / cores, f"the {cores} cores of {host}"
    return seconds, limit


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count

"""The stages of a cluster as they are deployed: who holds which part of the model, and its graph."""

import math
from dataclasses import dataclass

from ravnest.graph.partition import split
from ravnest.graph.portable import PortableGraph
from ravnest.planner.cluster import Cluster


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: who holds it, and its graph."""

    node: str
    stage: int
    role: str
    graph: PortableGraph
    parameters: int
    cluster: int = 0
    """Counted from 0, as the stages are."""
    start: int = 0
    """The place in the model where it begins, as `split` counts them."""
    split_backward: bool = False
    """Whether it sends gradients on before it computes those of its own weights."""
    codec: str = "float32"
    """Of activations and gradients between it and the stage before."""
    codec_reason: str = ""


def stages_of(graph: PortableGraph, cluster: Cluster, number: int = 0) -> tuple[StagePlan, ...]:
    """The stages of this cluster, the plan's first or another, in order, cut from the whole model's graph."""
    parts = split(graph, [stage.start for stage in cluster.stages[1:]])
    return tuple(
        StagePlan(
            node=stage.provider,
            stage=position,
            role=role_of(position, len(parts)),
            graph=part,
            parameters=sum(math.prod(p.shape) for p in part.parameters),
            cluster=number,
            start=stage.start,
            codec=stage.codec,
            codec_reason=stage.codec_reason,
        )
        for position, (stage, part) in enumerate(zip(cluster.stages, parts, strict=True))
    )


def role_of(stage: int, stages: int) -> str:
    """The glossary's name for a place in the cluster; a single stage is root and leaf in one."""
    if stages == 1:
        return "root+leaf"
    return "root" if stage == 0 else "leaf" if stage == stages - 1 else "stem"

"""Rings of clusters that are cut at given places."""

import itertools
from collections.abc import Sequence

from ravnest.graph.cutting.layout import layout
from ravnest.graph.portable import PortableGraph
from ravnest.planner.cluster import Cluster, StageCost
from ravnest.planner.problem import Goal, Network
from ravnest.planner.proposal import proposal_of
from ravnest.planner.rings.rings import Ring, rings_of
from tests.graph.cutting import even_costs
from tests.planner.made_up import machine


def rings_cut_at(graph: PortableGraph, cuts: Sequence[Sequence[int]]) -> tuple[Ring, ...]:
    """The rings of clusters that cut the model at these places."""
    costs, end = even_costs(graph), len(layout(graph).line)
    clusters = []
    for c, places in enumerate(cuts):
        bounds = itertools.pairwise((0, *places, end))
        stages = [StageCost(f"c{c}s{s}", a, b, 1.0, 0, 0, 0, 1.0, 0, 0, 0, 0) for s, (a, b) in enumerate(bounds)]
        clusters.append(Cluster(tuple(stages), 1, 1))
    everybody = {name: machine(name) for cluster in clusters for name in cluster.providers}
    return rings_of(proposal_of(Goal(), Network(), everybody, clusters), costs, Network(), everybody)

"""The model that kept and moved stages train in tests."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from ravnest.graph.capture.capture import Captured, capture
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.graph.portable import PortableGraph
from tests.e2e.jobs import CLASSES, FEATURES, batches

BATCHES = batches([8] * 8)


@cache
def captured() -> Captured:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU()),
        *(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)),
    )
    return capture(model, F.cross_entropy, {}, batches([8, 5]))


@cache
def graphs() -> tuple[PortableGraph, ...]:
    """Two stages, each with a batch norm."""
    graph = captured().graph
    found = [split(graph, [place]) for place in layout(graph).cuts]
    return next(tuple(s) for s in found if all(any("num_batches" in x.key for x in part.states) for part in s))

"""Where a model's modules begin and end, as the names of its parameters tell."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models import GPT, GPTSize, next_token_loss
from ravnest.graph.capture.capture import capture
from ravnest.graph.cutting.layout import layout
from ravnest.graph.portable import PortableGraph
from ravnest.graph.profile import CostProfile, NodeCost
from ravnest.planner.count_costs import count_costs
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.module_depth import module_depths
from tests.planner.made_up import model

SIZE = GPTSize(layers=3, width=16, heads=2, vocabulary=32, context=8)


def gpt(*, tied: bool) -> PortableGraph:
    batches = torch.randint(32, (2, 2, 8))
    return capture(GPT(SIZE, tied=tied), next_token_loss, {}, [(tokens, tokens) for tokens in batches]).graph


def costs_of(graph: PortableGraph) -> ModelCosts:
    """The costs of a graph whose operators all take a millisecond and yield 1 kB."""
    nodes = {node.name: NodeCost(1e-3, 2e-3, 1024, 1024) for node in graph.nodes}
    return count_costs(graph, CostProfile(nodes, samples=1, threads=1), {v.name: 64 for v in graph.inputs})


@pytest.mark.parametrize("tied", [False, True])
def test_a_block_of_a_transformer_is_deeper_than_its_boundaries(tied: bool) -> None:
    graph = gpt(tied=tied)
    plan = layout(graph)
    depths = module_depths(graph, plan)
    assert len(depths) == len(plan.line) + 1 and depths[0] == depths[-1] == 0
    first = {p.key: plan.first_use[p.name] for p in graph.parameters if p.name in plan.first_use}
    for number in range(3):
        begin, end = first[f"blocks.{number}.attention_norm.weight"], first[f"blocks.{number}.feed.2.weight"]
        assert depths[begin] <= 1, "`blocks` is around it at most"
        assert all(depth >= 2 for depth in depths[begin + 1 : end + 1])
        assert depths[first[f"blocks.{number}.feed.2.weight"]] == 3, "inside of blocks.N.feed"
    assert depths[first["norm.weight"]] == 0


def test_the_costs_know_the_depth_of_each_place_also_with_fewer_places() -> None:
    graph = gpt(tied=False)
    costs, depths = costs_of(graph), module_depths(graph, layout(graph))
    assert costs.module_depth is not None
    assert list(costs.module_depth) == [depths[place] for place in costs.places]
    fewer = costs.coarser(8)
    assert fewer.module_depth is not None
    assert list(fewer.module_depth) == [depths[place] for place in fewer.places]


def test_of_places_with_equal_traffic_the_one_between_modules_is_kept() -> None:
    costs = model(40)
    depth = np.full(41, 2.0)
    depth[::4] = 1.0
    kept = ModelCosts(**{**vars(costs), "module_depth": depth}).coarser(9)
    assert kept.module_depth is not None
    cuts = [int(place) // 10 for place in kept.places[1:-1] if int(place) // 10 not in costs.smallest_stages]
    assert all(place % 4 == 0 for place in cuts)


def test_a_model_without_modules_has_no_depth() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return torch.relu(given @ self.one) @ self.other

    batch = (torch.randn(2, 4), torch.randn(2, 4))
    graph = capture(Plain(), F.mse_loss, {}, [batch, batch]).graph
    assert set(module_depths(graph, layout(graph))) == {0}

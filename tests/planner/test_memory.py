"""How many providers hold a model: as few as can, and none that cannot."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ravnest.graph.capture import capture
from ravnest.graph.portable import PortableGraph
from ravnest.graph.profile import CostProfile, profile
from ravnest.planner.memory import enough_memory, stage_bytes

WIDTH, LAYERS = 256, 6
PARAMETER_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4


@pytest.fixture(scope="module")
def model() -> tuple[PortableGraph, CostProfile]:
    net = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    batch = torch.randn(4, WIDTH), torch.randint(0, WIDTH, (4,))
    captured = capture(net, F.cross_entropy, {}, [batch, batch])
    return captured.graph, profile(captured.graph, captured.weights, captured.sample, 4)


def test_a_stage_holds_weights_gradients_moments_versions_and_activations(
    model: tuple[PortableGraph, CostProfile],
) -> None:
    graph, costs = model
    activations = sum(cost.saved_bytes for cost in costs.nodes.values())
    assert stage_bytes(graph, costs, 1) == 4 * PARAMETER_BYTES + activations
    assert stage_bytes(graph, costs, 3) == 6 * PARAMETER_BYTES + 3 * activations


def test_one_that_can_hold_it_alone_is_enough(model: tuple[PortableGraph, CostProfile]) -> None:
    found = enough_memory(*model, [1 << 40, 1 << 40])
    assert found.count == 1 and "1 stages" in found.reason


def test_as_many_as_it_takes_and_no_more(model: tuple[PortableGraph, CostProfile]) -> None:
    alone = int(1.3 * stage_bytes(*model, 1))
    assert enough_memory(*model, [alone]).count == 1
    too_little = enough_memory(*model, [alone - 1])
    assert too_little.count == 0 and "of 1 stages number 0 needs" in too_little.reason
    together = enough_memory(*model, [int(0.9 * alone)] * 4)
    assert 2 <= together.count <= 4


def test_more_than_there_are_places_to_cut_do_not_help(model: tuple[PortableGraph, CostProfile]) -> None:
    found = enough_memory(*model, [1000] * 50)
    assert found.count == 0 and "needs" in found.reason
    assert enough_memory(*model, []).reason == "nobody has joined"

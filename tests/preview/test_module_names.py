"""The contents of a stage are described with the model's own names."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ravnest.graph.capture.capture import capture
from ravnest.graph.cutting.partition import split
from ravnest.planner.plan import role_of
from ravnest.preview.module_names import Part, Parts


@pytest.mark.parametrize(
    ("first", "last", "title"),
    [
        ("features.0.weight", "features.5.bias", "features.0 to .5"),
        ("features.0.weight", "features.0.bias", "features.0"),
        ("features.0.weight", "head.weight", "features.0 to head"),
        ("blocks.2.n1.weight", "blocks.4.f.2.bias", "blocks.2.n1 to blocks.4.f.2"),
        ("position", "blocks.0.weight", "position to blocks.0"),
        ("a.weight", "b.weight", "a to b"),
    ],
)
def test_titles_name_the_first_and_the_last_module(first: str, last: str, title: str) -> None:
    assert Part(first, last, 1).title == title


def test_a_part_has_the_parameters_that_the_stage_cut_there_owns() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.ReLU())]
    batch = torch.randn(4, 6), torch.zeros(4, dtype=torch.long)
    graph = capture(nn.Sequential(*layers, nn.Linear(6, 3)), F.cross_entropy, {}, [batch]).graph
    parts, places = Parts.of(graph), [2, 5]
    ends = [0, *places, 10**6]
    for number, stage in enumerate(split(graph, places)):
        owned = [p.key for p in stage.parameters]
        part = parts.between(ends[number], ends[number + 1])
        assert {part.first, part.last} <= set(owned), role_of(number, 3)
        assert part.parameters == sum(torch.Size(p.shape).numel() for p in stage.parameters)
    assert parts.count == parts.between(0, 10**6).parameters
    assert parts.between(3, 3) == Part("", "", 0)

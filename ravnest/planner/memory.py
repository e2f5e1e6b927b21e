"""How much memory a stage takes, and how many providers it takes to hold a model. Pure functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ravnest.errors import PlanError
from ravnest.graph.partition import choose_cuts, most_stages, split
from ravnest.graph.portable import PortableGraph
from ravnest.graph.profile import CostProfile

_SPARE = 1.3
"""Beyond what a stage holds: fragments, buffers of the network. `python -m benchmarks.memory` measures this factor."""

_OPTIMIZER_STATES = 2
"""Tensors of a parameter's size that an optimizer keeps for it, at the most common: Adam's two moments."""


@dataclass(frozen=True, slots=True)
class Enough:
    """How many providers, in the order given, hold the model; `count` is 0 where they do not yet."""

    count: int
    reason: str


def stage_bytes(stage: PortableGraph, costs: CostProfile, in_flight: int) -> int:
    """What a stage holds while `in_flight` microbatches are between forward and backward there."""
    parameters = sum(math.prod(p.shape) * p.dtype.itemsize for p in stage.parameters)
    saved = sum(costs.nodes[node.name].saved_bytes for node in stage.nodes if node.name in costs.nodes)
    # The newest microbatch in flight uses the weights as they are; each older one needs a version of its own.
    return parameters * (2 + _OPTIMIZER_STATES + in_flight - 1) + in_flight * saved


def enough_memory(graph: PortableGraph, costs: CostProfile, memory_bytes: Sequence[int]) -> Enough:
    """The fewest of these providers, from the first on, whose memory holds a stage each."""
    short = "nobody has joined"
    for count in range(1, min(len(memory_bytes), most_stages(graph)) + 1):
        try:
            stages = split(graph, choose_cuts(graph, costs, count).places)
        except PlanError as error:
            return Enough(0, str(error))
        needs = [
            int(_SPARE * stage_bytes(stage, costs, 1 if number == count - 1 else count + 1))
            for number, stage in enumerate(stages)
        ]
        if all(need <= has for need, has in zip(needs, memory_bytes, strict=False)):
            return Enough(count, f"{count} stages of {_shown(max(needs))} at most fit into the memory there is")
        worst = max(range(count), key=lambda number: needs[number] - memory_bytes[number])
        short = (
            f"of {count} stages number {worst} needs {_shown(needs[worst])}, where {_shown(memory_bytes[worst])} are"
        )
    return Enough(0, short)


def _shown(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"

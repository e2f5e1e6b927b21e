"""Makes a cost profile agree with what a stage really takes: real steps of the whole model, timed, and costs scaled.

A profile times each node alone. Within a model there is more to do: the interpreter between the nodes, memory that is
handed out and taken back, a cache that holds what the node before needed. So a few microbatches are trained through
the same stage that a provider runs, and the costs of nodes and updates are scaled until their sums are what that took.

Those steps follow one another at once. In a swarm a stage's tasks are apart, and meanwhile the processor sends,
receives, or computes for others: so a few more steps are timed with the cache emptied before each task. How much
longer they take hardly depends on the model, and is the price of being a stage.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch

from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage
from ravnest.graph.clock import work_clock
from ravnest.graph.portable import PortableGraph
from ravnest.graph.profile import CostProfile

BUDGET_SECONDS: Final = 3.0
_WARM_PART: Final = 0.7
_MIN_STEPS: Final = 2
_MAX_STEPS: Final = 40
_MAX_COLD_STEPS: Final = 8
_CACHE_BYTES: Final = 32 << 20
"""Copied from one place to another, this leaves nothing else in the cache of an ordinary processor."""
_MAX_COLD_SECONDS: Final = 3e-3
"""Filling the cache again takes no longer: more than that is how long steps differ from one to the next."""
_MAX_FASTER: Final = 20.0
"""What mixed precision gains on a processor, at most: steps differ, and what is left of them may be next to nothing."""
_COPIES: Final = 4
"""Of the parameters in a step: the stage's own, gradients, and the two moments that most optimizers keep."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """What one microbatch takes in a stage that holds the whole model."""

    forward: float
    backward: float
    update: float
    cold: float = 0.0
    """How much longer all three take where each begins with an empty cache."""


def calibrate(
    costs: CostProfile,
    graph: PortableGraph,
    weights: Mapping[str, torch.Tensor],
    sample: Mapping[str, torch.Tensor],
    settings: StageSettings,
    available_bytes: int,
    budget_seconds: float = BUDGET_SECONDS,
) -> CostProfile:
    """The profile as a stage of the whole model, trained for a moment, shows it to be.

    Where a step of the whole model does not fit into the memory that is available, the profile as it is. The weights
    are copied, and neither they nor the state of the random numbers change.
    """
    if step_bytes(costs, graph) > available_bytes:
        return costs
    return scaled(costs, graph, time_steps(graph, weights, sample, settings, budget_seconds))


def products_speed(costs: CostProfile, measured: StepSeconds) -> float:
    """How many times as fast as the calibrated costs say products are computed in the precision that was measured: by
    the time that steps of the whole model take in it, less what is no product, which it does not change."""
    heavy = sum(cost.seconds for cost in costs.nodes.values() if cost.heavy)
    light = sum(cost.seconds for cost in costs.nodes.values() if not cost.heavy)
    left = measured.forward + measured.backward - light
    return heavy / max(left, heavy / _MAX_FASTER) if heavy else 1.0


def step_bytes(costs: CostProfile, graph: PortableGraph) -> int:
    """About what a step of the whole model takes beside the model itself."""
    return sum(cost.saved_bytes for cost in costs.nodes.values()) + _COPIES * _parameter_bytes(graph)


def time_steps(
    graph: PortableGraph,
    weights: Mapping[str, torch.Tensor],
    sample: Mapping[str, torch.Tensor],
    settings: StageSettings,
    budget_seconds: float = BUDGET_SECONDS,
) -> StepSeconds:
    """Trains copies of the weights on the sample until the budget is spent: at least two steps, the first not counted.

    The median of each part. With gradients that are summed over several microbatches, each bears its part of the
    update.
    """
    stage = Stage(graph, {spec.key: weights[spec.key].clone() for spec in graph.weights}, settings)
    began = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        warm = _steps(stage, sample, lambda: None, _MAX_STEPS, began + _WARM_PART * budget_seconds)[1:]
        cold = _steps(stage, sample, _empty_cache(), _MAX_COLD_STEPS, began + budget_seconds)
    forward, backward, update = (statistics.median(part) for part in zip(*warm, strict=True))
    longer = sum(min(part) for part in zip(*cold, strict=True)) - sum(min(part) for part in zip(*warm, strict=True))
    cold_seconds = min(max(0.0, longer), _MAX_COLD_SECONDS)
    return StepSeconds(forward, backward, update / settings.accumulate, cold_seconds)


def scaled(costs: CostProfile, graph: PortableGraph, measured: StepSeconds) -> CostProfile:
    """The profile with every cost scaled so that forward, backward and update of the whole model take this long."""
    forward = _factor(measured.forward, sum(cost.forward_seconds for cost in costs.nodes.values()))
    backward = _factor(measured.backward, sum(cost.backward_seconds for cost in costs.nodes.values()))
    update = _factor(measured.update, costs.update.seconds(len(graph.parameters), _parameter_bytes(graph)))
    nodes = {
        name: replace(
            cost,
            forward_seconds=forward * cost.forward_seconds,
            backward_seconds=backward * cost.backward_seconds,
        )
        for name, cost in costs.nodes.items()
    }
    return replace(costs, nodes=nodes, update=costs.update.scaled(update), stage_seconds=measured.cold)


def _steps(
    stage: Stage, sample: Mapping[str, torch.Tensor], between: Callable[[], None], most: int, deadline: float
) -> list[tuple[float, float, float]]:
    """Seconds of forward, backward and update, each after `between`: at least two steps, more until the deadline."""
    steps: list[tuple[float, float, float]] = []
    began = time.perf_counter()
    while len(steps) < most:
        # Fresh memory, as it comes from the network.
        steps.append(_step(stage, {name: value.clone() for name, value in sample.items()}, between))
        now = time.perf_counter()
        if len(steps) >= _MIN_STEPS and now + (now - began) / len(steps) > deadline:
            break
    return steps


def _step(stage: Stage, values: Mapping[str, torch.Tensor], between: Callable[[], None]) -> tuple[float, float, float]:
    def forward() -> None:
        # A worker looks at the loss before it goes on.
        float(stage.forward(0, values)[str(stage.graph.loss)])

    def timed(task: Callable[[], object]) -> float:
        between()
        began = clock()
        task()
        return clock() - began

    clock = work_clock()
    return timed(forward), timed(lambda: stage.backward(0, None)), timed(lambda: stage.update(0, flush=True))


def _empty_cache() -> Callable[[], None]:
    source = torch.zeros(_CACHE_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)

    def empty() -> None:
        target.copy_(source)

    return empty


def _factor(measured: float, summed: float) -> float:
    return measured / summed if measured > 0 and summed > 0 else 1.0


def _parameter_bytes(graph: PortableGraph) -> int:
    return sum(math.prod(p.shape) * p.dtype.itemsize for p in graph.parameters)

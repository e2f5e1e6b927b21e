"""Calibration of a cost profile: times real steps of the whole model and scales the costs to match.

A profile times each node alone. A whole model also takes time for the interpreter between nodes and for memory
allocation, and its cache holds other data. The calibration therefore trains a few microbatches through the same stage
code that a provider runs, and scales the costs of nodes and updates until their sums equal the measured times.

These steps follow each other without a pause. In a swarm, a CPU sends, receives or computes for other processes between
the tasks of a stage. Some more steps are therefore timed with the cache emptied before each task. The additional time
hardly depends on the model and is the overhead of a stage.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage
from ravnest.graph.clock import work_clock
from ravnest.graph.portable import PortableGraph
from ravnest.graph.profile import CostProfile

BUDGET_SECONDS: Final = 3.0
WARM_SHARE: Final = 0.7
_MIN_STEPS: Final = 2
_MAX_STEPS: Final = 40
_MAX_COLD_STEPS: Final = 8
_CACHE_BYTES: Final = 32 << 20
"""Copying this many bytes replaces everything in the cache of an ordinary CPU."""
MAX_COLD_SECONDS: Final = 3e-3
"""Upper bound of the time to fill the cache again; a larger difference is variation between steps."""
_MAX_FASTER: Final = 20.0
"""Upper bound of the gain of mixed precision on a CPU; because steps vary, the estimate could be unbounded."""
_COPIES: Final = 4
"""Copies of the parameters during a step: the stage's own, gradients, and two moments, as most optimizers have."""


TaskSeconds = tuple[float, float, float]
"""Times of a forward, a backward and an update."""

Step = Callable[[Callable[[], None]], TaskSeconds]
"""Trains by one microbatch and returns the times; makes the given call before each task."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Times of one microbatch in a stage that holds the whole model."""

    forward: float
    backward: float
    update: float
    cold: float = 0.0
    """Additional time of all three together if each begins with an empty cache."""


def calibrate(
    costs: CostProfile,
    graph: PortableGraph,
    weights: Mapping[str, torch.Tensor],
    sample: Mapping[str, torch.Tensor],
    settings: StageSettings,
    available_bytes: int,
    budget_seconds: float = BUDGET_SECONDS,
) -> CostProfile:
    """The profile scaled to the measured times of a stage with the whole model.

    The profile is unchanged if a step of the whole model does not fit into `available_bytes`. The weights are copied;
    neither they nor the state of the random number generators change.
    """
    if step_bytes(costs, graph) > available_bytes:
        return costs
    return scaled(costs, graph, time_steps(graph, weights, sample, settings, budget_seconds))


def products_speed(costs: CostProfile, measured: StepSeconds) -> float:
    """Speed of products in the measured precision, relative to the calibrated costs.

    Computed from the time of steps of the whole model, minus the time of other operators, which is the same in each
    precision.
    """
    heavy = sum(cost.seconds for cost in costs.nodes.values() if cost.heavy)
    light = sum(cost.seconds for cost in costs.nodes.values() if not cost.heavy)
    left = measured.forward + measured.backward - light
    return heavy / max(left, heavy / _MAX_FASTER) if heavy else 1.0


def step_bytes(costs: CostProfile, graph: PortableGraph) -> int:
    """Approximate memory of a step of the whole model, in addition to the model itself."""
    return sum(cost.saved_bytes for cost in costs.nodes.values()) + _COPIES * _parameter_bytes(graph)


def time_steps(
    graph: PortableGraph,
    weights: Mapping[str, torch.Tensor],
    sample: Mapping[str, torch.Tensor],
    settings: StageSettings,
    budget_seconds: float = BUDGET_SECONDS,
) -> StepSeconds:
    """Trains copies of the weights on the sample for about `budget_seconds`; see `measure`."""
    stage = Stage(graph, {spec.key: weights[spec.key].clone() for spec in graph.weights}, settings)
    with torch.random.fork_rng(devices=[]):
        return measure(partial(_step, stage, sample), settings.accumulate, budget_seconds)


def measure(step: Step, accumulate: int, budget_seconds: float, warm_share: float = WARM_SHARE) -> StepSeconds:
    """Repeats the step until the budget is spent, but at least twice without and twice with an empty cache.

    The result has the median of each time, without the first step. The update's time is divided by `accumulate`, the
    number of microbatches that share one update. `warm_share` is the part of the budget for steps with a warm cache.
    """
    began = time.perf_counter()
    warm = _repeat(step, lambda: None, _MAX_STEPS, began + warm_share * budget_seconds)[1:]
    cold = _repeat(step, _empty_cache(), _MAX_COLD_STEPS, began + budget_seconds)
    forward, backward, update = (statistics.median(part) for part in zip(*warm, strict=True))
    longer = sum(min(part) for part in zip(*cold, strict=True)) - sum(min(part) for part in zip(*warm, strict=True))
    cold_seconds = min(max(0.0, longer), MAX_COLD_SECONDS)
    return StepSeconds(forward, backward, update / accumulate, cold_seconds)


def scaled(costs: CostProfile, graph: PortableGraph, measured: StepSeconds) -> CostProfile:
    """The profile with its costs scaled so that forward, backward and update of the whole model take these times."""
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


def _repeat(step: Step, before_task: Callable[[], None], max_steps: int, deadline: float) -> list[TaskSeconds]:
    """The times of at least two steps, and more until the deadline."""
    steps: list[TaskSeconds] = []
    began = time.perf_counter()
    while len(steps) < max_steps:
        steps.append(step(before_task))
        now = time.perf_counter()
        if len(steps) >= _MIN_STEPS and now + (now - began) / len(steps) > deadline:
            break
    return steps


def _step(stage: Stage, sample: Mapping[str, torch.Tensor], before_task: Callable[[], None]) -> TaskSeconds:
    # In new memory, like values that arrive from the network.
    values = {name: value.clone() for name, value in sample.items()}

    def forward() -> None:
        # A worker reads the loss before it continues.
        float(stage.forward(0, values)[str(stage.graph.loss)])

    def timed(task: Callable[[], object]) -> float:
        before_task()
        began = clock()
        task()
        return clock() - began

    clock = work_clock()
    return timed(forward), timed(partial(stage.backward, 0, None)), timed(partial(stage.update, 0, flush=True))


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

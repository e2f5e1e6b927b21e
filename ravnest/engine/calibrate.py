"""Makes a cost profile agree with what a stage really takes: real steps of the whole model, timed, and costs scaled.

A profile times each node alone. Within a model there is more to do: the interpreter between the nodes, memory that is
handed out and taken back, a cache that holds what the node before needed. So a few microbatches are trained through
the same stage that a provider runs, and the costs of nodes and updates are scaled until their sums are what that took.
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
_LEAST_STEPS: Final = 2
_MOST_STEPS: Final = 40
_COPIES: Final = 4
"""Of the parameters in a step: the stage's own, gradients, and the two moments that most optimizers keep."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """What one microbatch takes in a stage that holds the whole model."""

    forward: float
    backward: float
    update: float


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
    clock = work_clock()
    began = time.perf_counter()
    steps: list[StepSeconds] = []
    with torch.random.fork_rng(devices=[]):
        for number in range(_MOST_STEPS + 1):
            # Fresh memory, as it comes from the network.
            steps.append(_step(stage, number, {name: value.clone() for name, value in sample.items()}, clock))
            spent = time.perf_counter() - began
            if len(steps) >= _LEAST_STEPS and spent + spent / len(steps) > budget_seconds:
                break
    return StepSeconds(
        statistics.median(step.forward for step in steps[1:]),
        statistics.median(step.backward for step in steps[1:]),
        statistics.median(step.update for step in steps[1:]) / settings.accumulate,
    )


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
    return replace(costs, nodes=nodes, update=costs.update.scaled(update))


def _step(stage: Stage, number: int, values: Mapping[str, torch.Tensor], clock: Callable[[], float]) -> StepSeconds:
    began = clock()
    # A worker looks at the loss before it goes on.
    float(stage.forward(number, values)[str(stage.graph.loss)])
    forward = clock()
    stage.backward(number, None)
    backward = clock()
    stage.update(number, flush=True)
    return StepSeconds(forward - began, backward - forward, clock() - backward)


def _factor(measured: float, summed: float) -> float:
    return measured / summed if measured > 0 and summed > 0 else 1.0


def _parameter_bytes(graph: PortableGraph) -> int:
    return sum(math.prod(p.shape) * p.dtype.itemsize for p in graph.parameters)

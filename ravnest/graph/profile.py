"""Profile of a graph: forward and backward time of each node on this machine, and the bytes that it yields and saves.

Each node is timed alone, on the values that it really gets, with its own backward. The cost of a stage is therefore the
sum over its nodes for every way of cutting the model. The requester's machine measures the profile once.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ravnest.graph import ops
from ravnest.graph.clock import work_clock
from ravnest.graph.portable import PortableGraph
from ravnest.graph.program import Program
from ravnest.graph.step import Step
from ravnest.graph.update_cost import UpdateCost

_BUDGET_SECONDS = 4.0
_REPETITIONS = 3


@dataclass(frozen=True, slots=True)
class NodeCost:
    forward_seconds: float
    backward_seconds: float
    output_bytes: int
    saved_bytes: int
    """Memory that autograd keeps from this node until its backward, without parameters and values that earlier nodes
    already saved."""
    heavy: bool = False
    """Whether the node is a matrix product or convolution, whose time depends on a machine's arithmetic speed; that of
    other nodes depends on its memory speed."""

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Cost of each node by name, for one microbatch of `samples` samples."""

    nodes: Mapping[str, NodeCost]
    samples: int
    threads: int
    update: UpdateCost = field(default_factory=UpdateCost)
    flops_per_second: float = 0.0
    """Speed of the measuring machine with `threads` threads, to compare a provider's speed with; 0 if unknown."""
    memory_bytes_per_second: float = 0.0
    precision: str = "float32"
    """Precision in which providers compute products. The costs are always those of float32."""
    precision_speed: float = 1.0
    """How many times as fast as in float32 the measuring machine computes products in that precision."""
    stage_seconds: float = 0.0
    """Time that each stage takes for a microbatch in addition to its nodes and its update, wherever the cuts fall:
    between two tasks of a stage the processor does other work, so each task starts with a cold cache."""


def profile(
    graph: PortableGraph, weights: Mapping[str, torch.Tensor], sample: Mapping[str, torch.Tensor], samples: int
) -> CostProfile:
    """Measure every node of a whole model's graph on the sample. Takes a few passes, or fewer if one is slow."""
    program = Program(graph)
    saved = _saved_bytes(program, graph, weights, sample)
    env = program.environment(sample, _copies(graph, weights))
    costs: dict[str, NodeCost] = {}
    started = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        for step in program.train_steps:
            hurry = time.perf_counter() - started > _BUDGET_SECONDS
            forward, backward = _timed(step, env, 1 if hurry else _REPETITIONS)
            name = step.node.name
            with torch.no_grad():
                step.call(env)
                env[program.slot(name)] = _marked(env[program.slot(name)], step)
            size = _bytes(env[program.slot(name)])
            costs[name] = NodeCost(forward, backward, size, saved.get(name, 0), ops.is_heavy(step.node.op))
            for slot in step.frees:
                env[slot] = None
    return CostProfile(costs, samples, torch.get_num_threads())


def _copies(graph: PortableGraph, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights for a trial run: parameters with gradients, and copies of the states, because the forward changes
    them."""
    leaves = {p.name: weights[p.key].detach().requires_grad_() for p in graph.parameters}
    fixed = {c.name: weights[c.key].detach() for c in graph.constants}
    return {**leaves, **fixed, **{s.name: weights[s.key].clone() for s in graph.states}}


def _timed(step: Step, env: list[Any], repetitions: int) -> tuple[float, float]:
    forward = backward = float("inf")
    changes = bool(ops.written_arguments(step.node.op))
    for _ in range(repetitions):
        args, kwargs = step.arguments(env)
        leaves: list[torch.Tensor] = []
        args = [_leaf(a, leaves, changes) for a in args]
        trial = _Trial(step, args, kwargs)
        forward = min(forward, trial.forward_seconds)
        backward = min(backward, trial.backward(leaves))
    return forward, backward


class _Trial:
    """One call of a node with its own small autograd graph."""

    def __init__(self, step: Step, args: list[Any], kwargs: dict[str, Any]) -> None:
        function = step.function
        self._grad = step.node.grad
        self._clock = work_clock()
        start = self._clock()
        with torch.set_grad_enabled(self._grad):
            self._result = function(*args, **kwargs)
        self.forward_seconds = self._clock() - start

    def backward(self, leaves: list[torch.Tensor]) -> float:
        results = self._result if isinstance(self._result, tuple | list) else [self._result]
        wanted = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        # A view taken under no_grad reports requires_grad, but has no gradient.
        if not self._grad or not wanted or not leaves:
            return 0.0
        ones = [torch.ones_like(r) for r in wanted]
        start = self._clock()
        torch.autograd.grad(wanted, leaves, ones, allow_unused=True)
        return self._clock() - start


def _marked(value: Any, step: Step) -> Any:
    """The value detached from the node that made it, requiring a gradient if it does in the model."""
    if isinstance(value, tuple | list):
        return [_marked(v, step) for v in value]
    if not isinstance(value, torch.Tensor):
        return value
    output = step.node.output
    needs = value.is_floating_point() and (output.needs_grad if output is not None else step.node.grad)
    return value.detach().requires_grad_(needs)


def _leaf(argument: Any, leaves: list[torch.Tensor], copy: bool) -> Any:
    if isinstance(argument, list):
        return [_leaf(a, leaves, copy) for a in argument]
    if not isinstance(argument, torch.Tensor):
        return argument
    fresh = argument.detach()
    if argument.requires_grad:
        fresh = fresh.requires_grad_()
        leaves.append(fresh)
    # An operator that writes into its argument must get a non-leaf, as in the model.
    return fresh.clone() if copy else fresh


def _saved_bytes(
    program: Program, graph: PortableGraph, weights: Mapping[str, torch.Tensor], sample: Mapping[str, torch.Tensor]
) -> dict[str, int]:
    named = _copies(graph, weights)
    env = program.environment(sample, named)
    seen = {t.untyped_storage().data_ptr() for t in (*named.values(), *sample.values())}
    saved: dict[str, int] = {}
    current = ""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in seen:
            seen.add(pointer)
            saved[current] = saved.get(current, 0) + tensor.untyped_storage().nbytes()
        return tensor

    with (
        torch.random.fork_rng(devices=[]),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        torch.enable_grad(),
    ):
        kept = []
        for step in program.train_steps:
            current = step.node.name
            step.call(env)
            # The results are kept until the end: reused memory would be counted once for two saved values.
            kept.append(env[program.slot(current)])
    return saved


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(v) for v in value) if isinstance(value, tuple | list) else 0

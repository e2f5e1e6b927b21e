"""Interpreter of a portable graph: a list of steps over numbered slots.

No text that a provider receives becomes source code. Even if a job asks for torch.compile, the compiler sees numbered
values and operators of the allow-list alone (compiling.py). A value is dropped after its last use, so a stage holds
only the values that autograd saves. A microbatch that a check refuses, or that would take more memory than is lent,
ends with a GraphError.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ravnest.errors import GraphError
from ravnest.graph.aliasing import Aliases, written_names
from ravnest.graph.operators.memory_account import MemoryAccount
from ravnest.graph.portable import Node, PortableGraph
from ravnest.graph.step import Step
from ravnest.graph.switch import evaluation_form
from ravnest.graph.weight_uses import weight_uses

if TYPE_CHECKING:
    from ravnest.graph.compiling import Compiled

_MASK = (1 << 63) - 1
_UNLIMITED_BYTES = 1 << 62
_MAX_SHAPES = 10_000
"""Maximum number of sets of shapes that are remembered as checked."""


def draw_seed(seed: int, microbatch: int, number: int) -> int:
    """The seed of one random operator for one microbatch: the same on every stage and in every run."""
    mixed = (seed * 0x9E3779B97F4A7C15 + microbatch * 0xBF58476D1CE4E5B9 + number * 0x94D049BB133111EB + 1) & _MASK
    mixed ^= mixed >> 31
    return (mixed * 0xD6E8FEB86659FD93) & _MASK


@dataclass(frozen=True, slots=True)
class WeightUse:
    """An operator call whose weights were detached from the rest of the graph, so that their gradients can wait."""

    output: GradientEdge
    """The place in the autograd graph where the gradient of the result arrives."""
    weights: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Each weight and the leaf that the operator got in its place; the two share memory."""


class Program:
    """Runs one graph on one device, in training or evaluation."""

    def __init__(
        self,
        graph: PortableGraph,
        device: torch.device | str = "cpu",
        *,
        compiled: bool = False,
        memory_bytes: int | None = None,
    ) -> None:
        """With `compiled`, training is compiled for the device. With `memory_bytes`, a microbatch that would take more
        memory ends with a LentMemoryError before the memory is allocated."""
        self.graph = graph
        self.device = torch.device(device)
        self._slots = {name: i for i, name in enumerate(graph.given_names())}
        self._given = len(self._slots)
        self._fed = len(graph.inputs) + len(graph.from_stages)
        for node in graph.nodes:
            self._slots[node.name] = len(self._slots)
        aliases = self._aliases = Aliases(graph)
        states = {aliases.group(s.name) for s in graph.states}
        losses = [graph.loss] if graph.loss else []
        self._trained = [*(v.name for v in graph.sends), *losses]
        self._evaluated = [*self._trained, *graph.metrics.values()]
        evaluation = [evaluation_form(n, lambda name: aliases.group(name) in states) for n in graph.nodes]
        self._memory_bytes = _UNLIMITED_BYTES if memory_bytes is None else memory_bytes
        self._train = self._steps(graph.nodes, self._trained)
        self._evaluate = self._steps(evaluation, self._evaluated)
        self._account = MemoryAccount(self._memory_bytes)
        self._checked: set[Any] = set()
        self._follows_values = any(step.follows_values for step in (*self._train, *self._evaluate))
        self._compiled: Compiled | None = None
        self._not_compiled = _uncompilable([*self._train]) if compiled else ""
        if self._not_compiled:
            warnings.warn(f"this stage runs uncompiled: {self._not_compiled}", stacklevel=2)
        elif compiled:
            # Imported here because the compiler takes seconds to import and few jobs use it.
            from ravnest.graph import compiling

            nodes = [step.node for step in self._train]
            module = compiling.as_module(nodes, list(graph.given_names()), self._trained, self.device)
            self._compiled = compiling.Compiled(module)
        self._uses = {node: tuple(self._slots[name] for name in names) for node, names in weight_uses(graph).items()}

    def run(
        self,
        values: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        *,
        train: bool,
        seed: int = 0,
        microbatch: int = 0,
        apart: list[WeightUse] | None = None,
    ) -> dict[str, Any]:
        """Run the graph. Returns the values that it sends, its loss and, in evaluation, its metrics, by value name.

        `values` holds the inputs and received values, `weights` the parameters, constants and states, by name in the
        graph. If `apart` is a list, the uses of weights whose gradients can wait are appended to it in the order of the
        calls. Gradients then reach those weights only through the list.
        """
        env = self.environment(values, weights)
        signature = self._signature(env, train)
        account = None if signature in self._checked else self._account
        if account is not None:
            account.begin(env[: self._given])
        generator = self._generator()
        if train and self._compiled is not None:
            if account is not None:
                self._try_out(env, account)
                self._checked.add(signature)
            generator.manual_seed(draw_seed(seed, microbatch, 0))
            results = self._compiled(*env[: self._given])
            return dict(zip(self._trained, results, strict=True))
        for step in self._train if train else self._evaluate:
            if step.seed is not None:
                generator.manual_seed(draw_seed(seed, microbatch, step.seed))
            if apart is not None and (used := self._uses.get(step.node.name)) is not None:
                _call_apart(step, used, env, apart, account)
            else:
                step.call(env, account)
            for slot in step.frees:
                env[slot] = None
        if account is not None and not self._follows_values and not account.follows_values:
            if len(self._checked) >= _MAX_SHAPES:
                self._checked.clear()
            self._checked.add(signature)
        # No metrics in training: a result with a gradient would be trained on.
        return {name: env[self._slots[name]] for name in (self._trained if train else self._evaluated)}

    def watch(
        self,
        values: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        *,
        seed: int,
        microbatch: int,
        before: Callable[[Node, list[Any]], None],
        after: Callable[[Node, Any], None],
    ) -> None:
        """Run in training like `run`, but never compiled. Calls `before` with each node and its arguments, and `after`
        with the node and its result."""
        env = self.environment(values, weights)
        self._account.begin(env[: self._given])
        generator = self._generator()
        for step in self._train:
            if step.seed is not None:
                generator.manual_seed(draw_seed(seed, microbatch, step.seed))
            before(step.node, step.arguments(env)[0])
            step.call(env, self._account)
            after(step.node, env[step.slot])
            for slot in step.frees:
                env[slot] = None

    def _try_out(self, env: list[Any], account: MemoryAccount) -> None:
        """Run the steps once with their checks and discard the results, because compiled code has no checks."""
        states = {self._slots[state.name] for state in self.graph.states}
        trial = [v.clone() if slot in states else v for slot, v in enumerate(env)]
        for step in self._train:
            step.call(trial, account)
            for slot in step.frees:
                trial[slot] = None

    def _signature(self, env: list[Any], train: bool) -> Any:
        """The mode and the shapes that determine the shapes of all values. The shapes of weights never change."""
        shapes = [v.shape if isinstance(v, torch.Tensor) else v for v in env[: self._fed]]
        types = [v.dtype for v in env[: self._fed] if isinstance(v, torch.Tensor)]
        return train, torch.is_grad_enabled(), *shapes, *types

    def environment(self, values: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> list[Any]:
        """The slots at the start of a run; GraphError if a value that the graph needs is missing."""
        env: list[Any] = [None] * len(self._slots)
        for spec in (*self.graph.inputs, *self.graph.from_stages):
            if spec.name not in values:
                raise GraphError(f"the stage needs the value {spec.name!r}, but did not get it")
            env[self._slots[spec.name]] = values[spec.name]
        for weight in self.graph.weights:
            env[self._slots[weight.name]] = weights[weight.name]
        return env

    @property
    def not_compiled(self) -> str:
        """Why the graph runs uncompiled although the job asks for compilation; empty if compiled or not yet known."""
        return self._not_compiled if self._compiled is None else self._compiled.failure

    @property
    def train_steps(self) -> "list[Step]":
        return self._train

    @property
    def evaluation_steps(self) -> "list[Step]":
        return self._evaluate

    @property
    def can_split(self) -> bool:
        """Whether any weight's gradient can wait. Never for compiled code, which runs as one operator."""
        return bool(self._uses) and self._compiled is None

    def slot(self, name: str) -> int:
        return self._slots[name]

    def _generator(self) -> torch.Generator:
        if self.device.type == "cuda":
            index = self.device.index if self.device.index is not None else torch.cuda.current_device()
            return torch.cuda.default_generators[index]
        if self.device.type == "mps":
            return torch.mps._get_default_mps_generator()
        return torch.default_generator

    def _steps(self, nodes: Iterable[Node], outputs: Iterable[str]) -> "list[Step]":
        chosen = self._needed(nodes, outputs)
        last_use: dict[str, int] = {}
        for i, node in enumerate(chosen):
            last_use.setdefault(node.name, i)
            for name in _called_with(node):
                last_use[name] = i
        kept = set(outputs) | {w.name for w in self.graph.weights}
        frees: list[list[int]] = [[] for _ in chosen]
        for name, i in last_use.items():
            if name not in kept:
                frees[i].append(self._slots[name])
        return [
            Step(node, self._slots, self.device, tuple(f), self._memory_bytes)
            for node, f in zip(chosen, frees, strict=True)
        ]

    def _needed(self, nodes: Iterable[Node], outputs: Iterable[str]) -> list[Node]:
        """The nodes that the outputs depend on, and those that change a value visible to these or to the caller."""
        chosen: list[Node] = []
        needed = set(outputs)
        seen = {self._aliases.group(name) for name in (*self.graph.given_names(), *needed)}
        for node in reversed(list(nodes)):
            if node.name in needed or any(self._aliases.group(name) in seen for name in written_names(node)):
                chosen.append(node)
                references = _called_with(node)
                needed.update(references)
                seen.update(self._aliases.group(name) for name in references)
        chosen.reverse()
        return chosen


def _uncompilable(steps: "Iterable[Step]") -> str:
    """Why these steps must run uncompiled, since compiled code has no checks between operators; empty if they need
    not."""
    for step in steps:
        if step.node.backward is not None:
            return "the model defines its own backward pass, which can only be interpreted"
        if step.needs_its_checks:
            return f"the arguments of {step.node.op} have to be checked before each call"
    return ""


def _call_apart(
    step: Step, used: tuple[int, ...], env: list[Any], apart: list[WeightUse], account: MemoryAccount | None
) -> None:
    """Run the step with a leaf in place of each of these weights."""
    weights = {slot: env[slot] for slot in used if isinstance(env[slot], torch.Tensor) and env[slot].requires_grad}
    leaves = {slot: weight.detach().requires_grad_() for slot, weight in weights.items()}
    for slot, leaf in leaves.items():
        env[slot] = leaf
    step.call(env, account)
    for slot, weight in weights.items():
        env[slot] = weight
    if leaves:
        # The edge instead of the tensor: a later write in place would move the tensor to another edge.
        output = get_gradient_edge(env[step.slot])
        apart.append(WeightUse(output, tuple((weight, leaves[slot]) for slot, weight in weights.items())))


def _called_with(node: Node) -> list[str]:
    """The values that this form of the node takes."""
    return list(replace(node, evaluation=None).references())

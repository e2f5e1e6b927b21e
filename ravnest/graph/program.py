"""A portable graph made ready to run: a list of steps over numbered slots.

It is an interpreter, not generated code: nothing that a provider was sent becomes source, unless a job asks for
torch.compile, which is given numbered values and operators of the allow-list alone (compiling.py).
Values are dropped as soon as no later step needs them, so a stage holds what autograd saves and nothing more.
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
"""Sets of shapes that are remembered as checked."""


def draw_seed(seed: int, microbatch: int, number: int) -> int:
    """The seed of one random operator for one microbatch: the same on whichever stage and however often it runs."""
    mixed = (seed * 0x9E3779B97F4A7C15 + microbatch * 0xBF58476D1CE4E5B9 + number * 0x94D049BB133111EB + 1) & _MASK
    mixed ^= mixed >> 31
    return (mixed * 0xD6E8FEB86659FD93) & _MASK


@dataclass(frozen=True, slots=True)
class WeightUse:
    """An operator that was run with weights cut off from the rest of the graph, so that their gradients can wait."""

    output: GradientEdge
    """Where the gradient of what came out arrives."""
    weights: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Each as it was, and the leaf that the operator got in its place; they share their memory."""


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
        """With `compiled`, what is run in training is compiled for the device. With `memory_bytes`, a microbatch that
        would take more than that ends with a LentMemoryError before it does."""
        self.graph = graph
        self.device = torch.device(device)
        self._slots = {name: i for i, name in enumerate(graph.given_names())}
        self._given = len(self._slots)
        self._fed = len(graph.inputs) + len(graph.receives)
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
            # Here, because the compiler takes seconds to import, and hardly anybody uses it.
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
        """What the graph sends on, its loss and (in evaluation) its metrics, by value name.

        `values` holds the inputs and receives, `weights` the parameters, constants and states, by name in the graph.
        With a list for `apart`, the uses of weights whose gradients can wait are appended to it, in the order they were
        run in: no gradient reaches those weights through them but by way of the list.
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
        # In training the loss alone: whatever else came back with a gradient would be trained on.
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
        """Runs in training as `run` does, never compiled, and shows every operator before it with its arguments and
        after it with what it yields."""
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
        """Runs the steps once, with their checks, for nothing: what is compiled has none of these."""
        states = {self._slots[state.name] for state in self.graph.states}
        trial = [v.clone() if slot in states else v for slot, v in enumerate(env)]
        for step in self._train:
            step.call(trial, account)
            for slot in step.frees:
                trial[slot] = None

    def _signature(self, env: list[Any], train: bool) -> Any:
        """What the shapes of all values follow from. Weights always have theirs."""
        shapes = [v.shape if isinstance(v, torch.Tensor) else v for v in env[: self._fed]]
        types = [v.dtype for v in env[: self._fed] if isinstance(v, torch.Tensor)]
        return train, torch.is_grad_enabled(), *shapes, *types

    def environment(self, values: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> list[Any]:
        """The slots at the start of a run; GraphError where something the graph needs is not given."""
        env: list[Any] = [None] * len(self._slots)
        for spec in (*self.graph.inputs, *self.graph.receives):
            if spec.name not in values:
                raise GraphError(f"the stage needs the value {spec.name!r} and did not get it")
            env[self._slots[spec.name]] = values[spec.name]
        for weight in self.graph.weights:
            env[self._slots[weight.name]] = weights[weight.name]
        return env

    @property
    def not_compiled(self) -> str:
        """Why it runs uncompiled though it was to be compiled, once that is known."""
        return self._not_compiled if self._compiled is None else self._compiled.failure

    @property
    def train_steps(self) -> "list[Step]":
        return self._train

    @property
    def evaluation_steps(self) -> "list[Step]":
        return self._evaluate

    @property
    def can_split(self) -> bool:
        """Whether there is any weight whose gradient can wait; what is compiled runs as one."""
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
        """The nodes that the outputs depend on, and those that change a value which these or the caller can see."""
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
    """Why these steps must run one by one: a compiled graph has no checks between them. Empty where it may be."""
    for step in steps:
        if step.node.backward is not None:
            return "the model brings a backward pass of its own, which is interpreted"
        if step.needs_its_checks:
            return f"{step.node.op} is checked before each call, which a compiled graph cannot do"
    return ""


def _call_apart(
    step: Step, used: tuple[int, ...], env: list[Any], apart: list[WeightUse], account: MemoryAccount | None
) -> None:
    """Runs the step with a leaf in place of each of these weights."""
    weights = {slot: env[slot] for slot in used if isinstance(env[slot], torch.Tensor) and env[slot].requires_grad}
    leaves = {slot: weight.detach().requires_grad_() for slot, weight in weights.items()}
    for slot, leaf in leaves.items():
        env[slot] = leaf
    step.call(env, account)
    for slot, weight in weights.items():
        env[slot] = weight
    if leaves:
        # The place in the graph and not the tensor: that may be written to later, and then is another place.
        output = get_gradient_edge(env[step.slot])
        apart.append(WeightUse(output, tuple((weight, leaves[slot]) for slot, weight in weights.items())))


def _called_with(node: Node) -> list[str]:
    """The values that the node takes as it is, whatever it takes in evaluation."""
    return list(replace(node, evaluation=None).references())

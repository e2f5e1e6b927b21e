"""Lowering of torch.export's program to a portable graph: names, arguments and operators.

Sub-graphs that export makes for `torch.no_grad()` are inlined, and checks that only export needs are dropped. An
operator that is not on the allow-list is a CaptureError with the user's line.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from ravnest.errors import CaptureError
from ravnest.graph import ops
from ravnest.graph.aliasing import Aliases, written_names
from ravnest.graph.capture.own_backward import (
    ENTER,
    GRADIENT_OF,
    MARKS,
    call_of,
    renamed_references,
    with_backward_passes,
)
from ravnest.graph.capture.users_line import line_of_trace
from ravnest.graph.portable import Argument, Device, Node, PortableGraph, Ref, ValueSpec, WeightSpec
from ravnest.graph.switch import draws_random_numbers, evaluation_form

_DROPPED = frozenset(
    {
        *("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range"),
        *("sym_constrain_range_for_size", "_functional_assert_async"),
    }
)
# Uninitialised memory could show a stranger the data that a provider held there before.
_INSTEAD = {
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
}
_INSTEAD_OF_READING = {
    "aten.item.default": "keep the number in its tensor: the line works without .item(), float() and int()"
}


@dataclass(frozen=True, slots=True)
class Lowered:
    """A portable graph, with the origin of its nodes for error messages and checks."""

    graph: PortableGraph
    weights: Mapping[str, torch.Tensor]
    """By key."""
    lines: Mapping[str, str]
    """The user's line of each node, as ` at file:line (code)`, if known."""
    whole: PortableGraph
    """The graph including nodes whose results are not used, since the model draws random numbers there as well."""
    training_only: frozenset[str] = frozenset()
    """Nodes of `whole` that the model is known to run in training only."""
    evaluation_only: frozenset[str] = frozenset()
    """Nodes of `whole` that the model is known to run in evaluation only."""

    @classmethod
    def of(
        cls,
        whole: PortableGraph,
        weights: Mapping[str, torch.Tensor],
        lines: Mapping[str, str],
        training_only: frozenset[str] = frozenset(),
        evaluation_only: frozenset[str] = frozenset(),
    ) -> "Lowered":
        """From a graph with everything that the model does, the nodes that are used."""
        return cls(_numbered(_states_found(live(whole))), weights, lines, whole, training_only, evaluation_only)


def lower(
    exported: Any,
    calls: Sequence[str],
    input_names: tuple[str, ...],
    output_names: tuple[str, ...],
    trained: frozenset[str],
) -> Lowered:
    """The portable graph of an exported program and its weights by key; CaptureError if it has no portable form.

    `calls` describes its custom backward passes, by the number of their marks.
    """
    lowering = _Lowering(exported, calls, input_names, trained)
    whole = _inputs_kept(_getitems_together(lowering.graph(output_names)))
    return Lowered.of(whole, lowering.weights, lowering.lines)


class _Lowering:
    def __init__(
        self, exported: Any, calls: Sequence[str], input_names: tuple[str, ...], trained: frozenset[str]
    ) -> None:
        self._calls = calls
        self._inside = ""
        """Description of the backward pass that is being read; empty outside of one."""
        self.weights: dict[str, torch.Tensor] = {}
        self._env: dict[FxNode, Argument] = {}
        self._nodes: list[Node] = []
        self._names: set[str] = set(input_names)
        self._inputs: list[ValueSpec] = []
        self._parameters: list[WeightSpec] = []
        self._others: list[WeightSpec] = []
        self._read_placeholders(exported, input_names, trained)
        self._outputs: tuple[Argument, ...] = ()
        self.lines = _Lines()
        self._read_nodes(exported.graph_module, grad=True)

    def graph(self, output_names: tuple[str, ...]) -> PortableGraph:
        refs = [a.name if isinstance(a, Ref) else None for a in self._outputs]
        for name, ref in zip(output_names, refs, strict=True):
            if ref is None:
                raise CaptureError(
                    f"{name} is a constant that does not depend on the batch; compute it from outputs and targets"
                )
        weights = [ValueSpec(w.name, w.dtype, w.shape) for w in (*self._parameters, *self._others)]
        graph = PortableGraph(
            nodes=tuple(with_backward_passes(self._nodes, [*self._inputs, *weights], self._calls)),
            inputs=tuple(self._inputs),
            parameters=tuple(self._parameters),
            constants=tuple(self._others),
            loss=refs[0],
            metrics={n: str(r) for n, r in zip(output_names[1:], refs[1:], strict=True)},
        )
        return graph

    def _read_placeholders(self, exported: Any, input_names: tuple[str, ...], trained: frozenset[str]) -> None:
        placeholders = [n for n in exported.graph.nodes if n.op == "placeholder"]
        free_names = iter(input_names)
        known: dict[int, WeightSpec] = {}
        for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
            if spec.kind == InputKind.USER_INPUT:
                name = next(free_names)
                self._inputs.append(_value_spec(name, node) or ValueSpec(name, None))
                self._env[node] = Ref(name)
                continue
            key = spec.target.removeprefix("model.") if spec.target.startswith("model.") else f"@{spec.target}"
            if spec.kind == InputKind.CONSTANT_TENSOR:
                key = f"@{spec.target}"
                tensor = exported.constants[spec.target]
            elif spec.target in exported.state_dict:
                tensor = exported.state_dict[spec.target]
            else:
                tensor = exported.constants[spec.target]
            if id(tensor) in known:
                # A tied weight is listed under each of its names. It remains one weight, under the first name.
                self._env[node] = Ref(known[id(tensor)].name)
                continue
            if spec.kind == InputKind.PARAMETER and key.startswith("@") and tensor.requires_grad:
                raise CaptureError(
                    f"{key[1:]} is trainable, but it is part of the loss or a metric; move it into the model"
                )
            weight = WeightSpec(self._fresh(node.name), key, tensor.dtype, tuple(tensor.shape))
            known[id(tensor)] = weight
            self.weights[key] = tensor
            self._env[node] = Ref(weight.name)
            is_trained = spec.kind == InputKind.PARAMETER and key in trained
            (self._parameters if is_trained else self._others).append(weight)

    def _read_nodes(self, module: GraphModule, grad: bool) -> tuple[Argument, ...]:
        for node in module.graph.nodes:
            if node.op == "call_function":
                self._read_call(module, node, grad)
            elif node.op == "output":
                self._outputs = tuple(self._argument(a) for a in node.args[0])
        return self._outputs

    def _read_call(self, module: GraphModule, node: FxNode, grad: bool) -> None:
        target = node.target
        if isinstance(target, torch._ops.HigherOrderOperator):
            self._read_subgraph(module, node, grad)
            return
        if str(target).startswith("<built-in function getitem") or getattr(target, "__name__", "") == "getitem":
            source = self._env[node.args[0]] if isinstance(node.args[0], FxNode) else None
            if isinstance(source, tuple):
                self._env[node] = source[int(node.args[1])]  # type: ignore[arg-type]
                return
        plain = ops.without_out(target)
        if plain is not None and "out" in node.kwargs:
            self._read_written(node, plain, grad)
            return
        op = ops.name_of(target)
        if op is not None and not ops.is_python(op) and ops.short_name(op) in _DROPPED:
            return
        op = _INSTEAD.get(op or "", op)
        if op == ENTER:
            self._env[node] = self._argument(node.args[0])
            return
        if op is None or not (ops.is_allowed(op) or op in MARKS):
            user = self._inside or "the model"
            raise CaptureError(
                f"{user} uses the operator {op or target}{self._line(node)}, which a provider may not run; "
                + _INSTEAD_OF_READING.get(
                    op or "", "replace it with operators of torch (docs/portable-graph.md lists them)"
                )
            )
        kwargs = {k: self._argument(v) for k, v in node.kwargs.items() if not (k == "pin_memory" and not v)}
        if op in _INSTEAD.values():
            kwargs.pop("memory_format", None)
        name = self._fresh(node.name)
        self.lines.remember(name, node)
        self._nodes.append(
            Node(name, op, tuple(self._argument(a) for a in node.args), kwargs, grad, output=_value_spec(name, node))
        )
        if op in MARKS:
            self._inside = self._calls[call_of(self._nodes[-1])] if op == GRADIENT_OF else ""
        self._env[node] = Ref(name)

    def _read_written(self, node: FxNode, op: str, grad: bool) -> None:
        """Replace a write through `out=` by a computation and a copy of its result."""
        kwargs = {k: self._argument(v) for k, v in node.kwargs.items() if k != "out"}
        computed, copied = self._fresh(f"{node.name}_computed"), self._fresh(node.name)
        output = _value_spec(copied, node)
        unwritten = None if output is None else replace(output, name=computed)
        args = tuple(self._argument(a) for a in node.args)
        self._nodes.append(Node(computed, op, args, kwargs, grad, output=unwritten))
        written = (self._argument(node.kwargs["out"]), Ref(computed))
        self._nodes.append(Node(copied, "aten.copy_.default", written, {}, grad, output=output))
        self._env[node] = Ref(copied)

    def _read_subgraph(self, module: GraphModule, node: FxNode, grad: bool) -> None:
        """Inline the function that export makes of a `with torch.no_grad()` block in the model."""
        kind = str(node.target)
        if "wrap_with_set_grad_enabled" not in kind:
            raise CaptureError(
                f"{self._inside or 'the model'} uses {kind}{self._line(node)}, which has no portable form; use plain "
                "operators there (precision is set with the job, not with autocast in the model)"
            )
        enabled, attribute, *arguments = node.args
        assert isinstance(attribute, FxNode)
        inner = getattr(module, str(attribute.target))
        placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
        for placeholder, argument in zip(placeholders, arguments, strict=True):
            self._env[placeholder] = self._argument(argument)
        outer = self._outputs
        results = self._read_nodes(inner, bool(enabled))
        self._outputs = outer
        self._env[node] = results

    def _argument(self, value: Any) -> Argument:
        if isinstance(value, FxNode):
            return self._env[value]
        if isinstance(value, list | tuple):
            return tuple(self._argument(v) for v in value)
        if isinstance(value, torch.device):
            return Device()
        if value is None or isinstance(
            value, bool | int | float | str | torch.dtype | torch.memory_format | torch.layout
        ):
            return value
        raise CaptureError(f"the model passes an operator a {type(value).__name__}, which has no portable form")

    def _line(self, node: FxNode) -> str:
        """The user's line of a node in the forward; empty in a backward pass, whose description has the line."""
        return "" if self._inside else line_of_trace(node.meta.get("stack_trace"))

    def _fresh(self, name: str) -> str:
        return _untaken(name, self._names)


def _untaken(name: str, taken: set[str]) -> str:
    """The name, with a number appended if it is taken; the result is marked as taken."""
    fresh, n = name, 1
    while fresh in taken:
        fresh, n = f"{name}_{n}", n + 1
    taken.add(fresh)
    return fresh


def _value_spec(name: str, node: FxNode) -> ValueSpec | None:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return ValueSpec(name, value.dtype, tuple(s if isinstance(s, int) else str(s) for s in value.shape))
    if isinstance(value, int | float | torch.SymInt | torch.SymFloat | torch.SymBool):
        return ValueSpec(name, None)
    return None


class _Lines(Mapping[str, str]):
    """The user's line of each node by the node's name, looked up on demand."""

    def __init__(self) -> None:
        self._traces: dict[str, str | None] = {}

    def remember(self, name: str, node: FxNode) -> None:
        self._traces[name] = node.meta.get("stack_trace")

    def __getitem__(self, name: str) -> str:
        return line_of_trace(self._traces[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._traces)

    def __len__(self) -> int:
        return len(self._traces)


def live(graph: PortableGraph, also: Iterable[str] = ()) -> PortableGraph:
    """The graph without nodes that neither the loss, the metrics, the model's state nor the values in `also` need."""
    needed = {graph.loss, *graph.metrics.values(), *also}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.name in needed or ops.written_arguments(node.op):
            kept.append(node)
            needed.update(node.references())
    kept.reverse()
    return replace(
        graph,
        nodes=tuple(kept),
        parameters=tuple(w for w in graph.parameters if w.name in needed),
        constants=tuple(w for w in graph.constants if w.name in needed),
    )


def _getitems_together(graph: PortableGraph) -> PortableGraph:
    """The graph with each `getitem` moved next to the operator whose results it picks, so that no cut can separate
    them."""
    picks: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "py.getitem" and isinstance(node.args[0], Ref):
            picks.setdefault(node.args[0].name, []).append(node)

    def placed(node: Node) -> list[Node]:
        return [node, *(n for pick in picks.get(node.name, ()) for n in placed(pick))]

    is_pick = {n.name for group in picks.values() for n in group}
    return replace(graph, nodes=tuple(n for node in graph.nodes if node.name not in is_pick for n in placed(node)))


def _inputs_kept(graph: PortableGraph) -> PortableGraph:
    """The graph with a copy of each input that the model changes in place, since another stage may need the input."""
    aliases = Aliases(graph)
    written = {aliases.group(name) for node in graph.nodes for name in written_names(node)}
    changed = [v for v in graph.inputs if aliases.group(v.name) in written]
    if not changed:
        return graph
    taken = {*graph.given_names(), *(n.name for n in graph.nodes)}
    renamed = {v.name: _untaken(f"{v.name}_copy", taken) for v in changed}
    copies = [
        Node(renamed[v.name], "aten.clone.default", (Ref(v.name),), output=replace(v, name=renamed[v.name]))
        for v in changed
    ]
    nodes = [renamed_references(n, renamed) for n in graph.nodes]
    return replace(graph, nodes=(*copies, *nodes))


def _states_found(graph: PortableGraph) -> PortableGraph:
    """The graph with weights that the forward changes as states; CaptureError if one of them is a trained
    parameter."""
    aliases = Aliases(graph)
    written = {aliases.group(name) for node in graph.nodes for name in written_names(node)}
    for parameter in graph.parameters:
        if aliases.group(parameter.name) in written:
            raise CaptureError(
                f"the forward changes the trainable parameter {parameter.key} in place; compute a changed copy instead "
                f"(for example w = self.{parameter.key}.clamp(min=0))"
            )
    states = tuple(w for w in graph.constants if aliases.group(w.name) in written)
    return replace(graph, states=states, constants=tuple(w for w in graph.constants if w not in states))


def _numbered(graph: PortableGraph) -> PortableGraph:
    """The graph with numbered random operators: first those of training, then those of evaluation only."""
    alone = [replace(n, evaluation=None) for n in graph.nodes]
    trained = {n.name for n in live(replace(graph, nodes=tuple(alone), metrics={})).nodes}
    draws = [n.name for n in graph.nodes if draws_random_numbers(n) or draws_random_numbers(evaluation_form(n))]
    numbers = {name: number for number, name in enumerate(sorted(draws, key=lambda name: name not in trained))}
    return replace(graph, nodes=tuple(replace(n, seed=numbers.get(n.name)) for n in graph.nodes))

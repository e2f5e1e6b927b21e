"""From torch.export's program to a portable graph: names, arguments, operators, nothing else.

Sub-graphs that export makes for `torch.no_grad()` are laid out flat, checks that only export needs are dropped, and
every operator is looked up in the allow-list, with the user's line in the message when it is not there.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from ravnest.errors import CaptureError
from ravnest.graph import ops
from ravnest.graph.aliasing import Aliases, written_names
from ravnest.graph.portable import Argument, Device, Node, PortableGraph, Ref, ValueSpec, WeightSpec
from ravnest.graph.switch import draws_random_numbers

_DROPPED = frozenset(
    {
        *("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range"),
        *("sym_constrain_range_for_size", "_functional_assert_async"),
    }
)
# Reading memory that nothing was written to could show a stranger what a provider held there before.
_INSTEAD = {
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
}
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in .*\n\s*(.*)')
_TORCH_HOME = str(Path(torch.__file__).parent)
_INSTEAD_OF_READING = {
    "aten.item.default": "leave the number in its tensor: without .item(), float() and int() the same line works"
}


def lower(
    exported: Any, input_names: tuple[str, ...], output_names: tuple[str, ...], trained: frozenset[str]
) -> tuple[PortableGraph, dict[str, torch.Tensor]]:
    """The portable graph of an exported program and its weights by key; CaptureError where it has no portable form."""
    lowering = _Lowering(exported, input_names, trained)
    graph = lowering.graph(output_names)
    return graph, lowering.weights


class _Lowering:
    def __init__(self, exported: Any, input_names: tuple[str, ...], trained: frozenset[str]) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self._env: dict[FxNode, Argument] = {}
        self._nodes: list[Node] = []
        self._names: set[str] = set(input_names)
        self._inputs: list[ValueSpec] = []
        self._parameters: list[WeightSpec] = []
        self._others: list[WeightSpec] = []
        self._read_placeholders(exported, input_names, trained)
        self._outputs: tuple[Argument, ...] = ()
        self._read_nodes(exported.graph_module, grad=True)

    def graph(self, output_names: tuple[str, ...]) -> PortableGraph:
        refs = [a.name if isinstance(a, Ref) else None for a in self._outputs]
        for name, ref in zip(output_names, refs, strict=True):
            if ref is None:
                raise CaptureError(
                    f"{name} does not depend on the batch: it is a constant; compute it from outputs and targets"
                )
        graph = PortableGraph(
            nodes=tuple(self._nodes),
            inputs=tuple(self._inputs),
            parameters=tuple(self._parameters),
            constants=tuple(self._others),
            loss=refs[0],
            metrics={n: str(r) for n, r in zip(output_names[1:], refs[1:], strict=True)},
        )
        return _numbered(_states_found(_inputs_kept(_getitems_together(_live(graph)))))

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
                # A tied weight is listed under each of its names; it stays one weight, under the first.
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
        op = ops.name_of(target)
        if op is not None and not ops.is_python(op) and ops.short_name(op) in _DROPPED:
            return
        op = _INSTEAD.get(op or "", op)
        if op is None or not ops.is_allowed(op):
            raise CaptureError(
                f"the model uses the operator {op or target}{_line(node)}, which a provider may not run; "
                + _INSTEAD_OF_READING.get(
                    op or "", "replace it by operators of torch (docs/portable-graph.md lists them)"
                )
            )
        kwargs = {k: self._argument(v) for k, v in node.kwargs.items() if not (k == "pin_memory" and not v)}
        if op in _INSTEAD.values():
            kwargs.pop("memory_format", None)
        name = self._fresh(node.name)
        self._nodes.append(
            Node(name, op, tuple(self._argument(a) for a in node.args), kwargs, grad, output=_value_spec(name, node))
        )
        self._env[node] = Ref(name)

    def _read_subgraph(self, module: GraphModule, node: FxNode, grad: bool) -> None:
        """`with torch.no_grad()` inside the model: export made a function of it; here its nodes come in line."""
        kind = str(node.target)
        if "wrap_with_set_grad_enabled" not in kind:
            raise CaptureError(
                f"the model uses {kind}{_line(node)}, which has no portable form; use plain operators there "
                "(precision is set with the job, not with autocast in the model)"
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
        raise CaptureError(f"the model passes a {type(value).__name__} to an operator, which has no portable form")

    def _fresh(self, name: str) -> str:
        return _untaken(name, self._names)


def _untaken(name: str, taken: set[str]) -> str:
    """The name, with a number where it is taken; taken from now on."""
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


def _line(node: FxNode) -> str:
    """` at file:line (code)` of the call in the user's code, or in a library's where that is all there is."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    outside = [f for f in frames if not f[0].startswith(_TORCH_HOME)]
    own = [f for f in outside if "site-packages" not in f[0]] or outside or frames
    return " at {}:{} (`{}`)".format(*own[-1]) if own else ""


def _live(graph: PortableGraph) -> PortableGraph:
    """Without what neither loss nor metrics nor the model's state depend on."""
    needed = {graph.loss, *graph.metrics.values()}
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
    """Each `getitem` right behind the operator whose results it picks, so that no cut can fall between them."""
    picks: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "py.getitem" and isinstance(node.args[0], Ref):
            picks.setdefault(node.args[0].name, []).append(node)

    def placed(node: Node) -> list[Node]:
        return [node, *(n for pick in picks.get(node.name, ()) for n in placed(pick))]

    is_pick = {n.name for group in picks.values() for n in group}
    return replace(graph, nodes=tuple(n for node in graph.nodes if node.name not in is_pick for n in placed(node)))


def _inputs_kept(graph: PortableGraph) -> PortableGraph:
    """A model that changes its input in place changes a copy: the batch itself may be needed by another stage."""
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
    nodes = [
        replace(
            n,
            args=tuple(_renamed(a, renamed) for a in n.args),
            kwargs={k: _renamed(a, renamed) for k, a in n.kwargs.items()},
        )
        for n in graph.nodes
    ]
    return replace(graph, nodes=(*copies, *nodes))


def _renamed(argument: Argument, names: Mapping[str, str]) -> Argument:
    if isinstance(argument, Ref):
        return Ref(names.get(argument.name, argument.name))
    return tuple(_renamed(a, names) for a in argument) if isinstance(argument, tuple) else argument


def _states_found(graph: PortableGraph) -> PortableGraph:
    """Weights that the forward changes become states; a trained parameter must not be among them."""
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
    """Random operators numbered through the whole model."""
    nodes, number = [], 0
    for node in graph.nodes:
        if draws_random_numbers(node):
            nodes.append(replace(node, seed=number))
            number += 1
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))

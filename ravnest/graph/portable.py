"""Portable graph: a model as data, which a provider receives instead of the requester's Python.

A graph is an ordered list of operator calls with names for values. The same type describes a whole model and one stage
of it. Its file format is plain JSON (docs/portable-graph.md). `from_json` checks names, references, operators and
sizes; a graph that fails any check is a GraphError, and nothing is built from it.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ravnest.errors import GraphError
from ravnest.graph import ops
from ravnest.graph.operators.python_numbers import unfit_numbers
from ravnest.graph.operators.signatures import Forms, check_arguments
from ravnest.safe_json import read_json

FORMAT_VERSION = 2
MAX_NODES = 200_000
MAX_DEPTH = 8
MAX_LIST = 100_000
MAX_VALUES = 8_000_000

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_KEY = re.compile(r"[A-Za-z0-9_@][A-Za-z0-9_.@\-]{0,511}")
_SYMBOL = re.compile(r"[A-Za-z0-9_+\-*/(), .]{1,128}")
_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.complex64),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
}
_MEMORY_FORMATS = {
    str(f).removeprefix("torch."): f
    for f in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
}


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that refers to the value of that name."""

    name: str


@dataclass(frozen=True, slots=True)
class Device:
    """An argument that stands for the device of the stage."""


_FORMS = Forms(Ref, Device)

Argument = (
    None | bool | int | float | str | torch.dtype | torch.memory_format | torch.layout | Ref | Device | tuple[Any, ...]
)


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """A tensor (or, with dtype None, a plain number) that crosses into or out of a graph.

    A size given as text is free, as that of the batch is; the same text means the same size.
    """

    name: str
    dtype: torch.dtype | None
    shape: tuple[int | str, ...] = ()
    needs_grad: bool = False


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A tensor that the graph owns: `name` in the graph, `key` (the model's own parameter name) in the weights file."""

    name: str
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EvaluationForm:
    """The operator call that replaces a node in evaluation, if the operator's train/eval switch cannot express it."""

    op: str
    args: tuple[Argument, ...] = ()
    kwargs: Mapping[str, Argument] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward pass of a `py.own_gradient` node: operator calls that replace PyTorch's derivatives.

    It has names of its own. The node's arguments are three lists: the values whose gradients arrive, the values whose
    gradients leave, and the saved values that the backward pass reads.
    """

    gradients: tuple[str, ...]
    """Names of the gradients that arrive, one for each value in the node's first list."""
    saved: tuple[str, ...]
    """Names of the values in the node's third list."""
    nodes: tuple["Node", ...]
    yields: tuple[str | None, ...]
    """For each value in the node's second list, the name of its gradient, or None if it gets none."""


@dataclass(frozen=True, slots=True)
class Node:
    """One operator call. With `grad` False it runs without recording gradients, as inside the model's `no_grad`."""

    name: str
    op: str
    args: tuple[Argument, ...] = ()
    kwargs: Mapping[str, Argument] = field(default_factory=dict)
    grad: bool = True
    seed: int | None = None
    """Number of this random operator in the whole model. Together with the microbatch it seeds the draw, so that the
    cuts do not change it."""
    output: ValueSpec | None = None
    """The result, if it is one tensor or number; None for a list of tensors."""
    evaluation: EvaluationForm | None = None
    """The call that runs in evaluation instead; None if the operator's train/eval switch is enough."""
    backward: Backward | None = None
    """The backward pass of a `py.own_gradient` node; None for every other operator."""

    def references(self) -> Iterator[str]:
        """Names of the values that the node takes, in training or in evaluation."""
        for argument in (*self.args, *self.kwargs.values()):
            yield from _references(argument)
        if self.evaluation is not None:
            for argument in (*self.evaluation.args, *self.evaluation.kwargs.values()):
                yield from _references(argument)

    def references_at(self, position: int) -> list[str]:
        """Names of the values in the argument at this position."""
        if position < len(self.args):
            argument = self.args[position]
        else:
            argument = self.kwargs.get(ops.argument_name(self.op, position))
        items = argument if isinstance(argument, tuple) else (argument,)
        return [item.name for item in items if isinstance(item, Ref)]


@dataclass(frozen=True, slots=True)
class PortableGraph:
    """A model, or one stage of it.

    inputs      fed by the coordinator with every microbatch (model inputs and targets)
    receives    come from the previous stage; sends go to the next stage
    parameters  trained here; constants never change; states change in the forward (batch-norm statistics)
    loss        name of the loss value, in the graph that has it; metrics: metric name -> value name
    """

    nodes: tuple[Node, ...]
    inputs: tuple[ValueSpec, ...] = ()
    receives: tuple[ValueSpec, ...] = ()
    sends: tuple[ValueSpec, ...] = ()
    parameters: tuple[WeightSpec, ...] = ()
    constants: tuple[WeightSpec, ...] = ()
    states: tuple[WeightSpec, ...] = ()
    loss: str | None = None
    metrics: Mapping[str, str] = field(default_factory=dict)

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return (*self.parameters, *self.constants, *self.states)

    def given_names(self) -> list[str]:
        """Names of all values that exist before the first node runs."""
        return [v.name for v in (*self.inputs, *self.receives)] + [w.name for w in self.weights]

    def to_json(self) -> str:
        return json.dumps(
            {
                "format": "ravnest.graph",
                "version": FORMAT_VERSION,
                "inputs": [_value_to_json(v) for v in self.inputs],
                "receives": [_value_to_json(v) for v in self.receives],
                "sends": [_value_to_json(v) for v in self.sends],
                "parameters": [_weight_to_json(w) for w in self.parameters],
                "constants": [_weight_to_json(w) for w in self.constants],
                "states": [_weight_to_json(w) for w in self.states],
                "nodes": [_node_to_json(n) for n in self.nodes],
                "loss": self.loss,
                "metrics": dict(self.metrics),
            },
            allow_nan=False,
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> "PortableGraph":
        """The checked graph in `text`; GraphError if anything in it is wrong."""
        try:
            data = read_json(text, MAX_VALUES)
        except ValueError as error:
            raise GraphError(f"the portable graph is not valid JSON: {error}") from None
        top = _object(data, "graph")
        if top.get("format") != "ravnest.graph":
            raise GraphError("this is not a portable graph (no format 'ravnest.graph')")
        if top.get("version") != FORMAT_VERSION:
            raise GraphError(
                f"the portable graph has format version {str(top.get('version'))[:40]}, but this Ravnest reads version "
                f"{FORMAT_VERSION}; update Ravnest on the older of the two machines"
            )
        graph = cls(
            nodes=tuple(_node_from_json(n) for n in _array(top.get("nodes"), "nodes", MAX_NODES)),
            inputs=tuple(_value_from_json(v) for v in _array(top.get("inputs"), "inputs")),
            receives=tuple(_value_from_json(v) for v in _array(top.get("receives"), "receives")),
            sends=tuple(_value_from_json(v) for v in _array(top.get("sends"), "sends")),
            parameters=tuple(_weight_from_json(w) for w in _array(top.get("parameters"), "parameters")),
            constants=tuple(_weight_from_json(w) for w in _array(top.get("constants"), "constants")),
            states=tuple(_weight_from_json(w) for w in _array(top.get("states"), "states")),
            loss=None if top.get("loss") is None else _name(top["loss"]),
            metrics={_name(k): _name(v) for k, v in _object(top.get("metrics"), "metrics").items()},
        )
        check(graph)
        return graph


def check(graph: PortableGraph) -> None:
    """GraphError unless every name is defined once and before its use, and every operator is on the allow-list with
    arguments that fit it."""
    known: set[str] = set()
    for name in graph.given_names():
        if name in known:
            raise GraphError(f"the portable graph defines {name!r} twice")
        known.add(name)
    count = 0
    for node in graph.nodes:
        _check_node(node, known)
        if node.evaluation is not None:
            form = node.evaluation
            if form.op == ops.OWN_GRADIENT:
                raise GraphError(f"node {node.name!r} of the portable graph has a backward pass in evaluation")
            check_node(replace(node, op=form.op, args=form.args, kwargs=form.kwargs))
        if node.backward is not None:
            _check_backward(node, node.backward)
            count += len(node.backward.nodes)
        known.add(node.name)
    if count + len(graph.nodes) > MAX_NODES:
        raise GraphError(f"the portable graph has more than {MAX_NODES:,} nodes, including those of backward passes")
    wanted = [v.name for v in graph.sends] + list(graph.metrics.values()) + ([graph.loss] if graph.loss else [])
    for name in wanted:
        if name not in known:
            raise GraphError(f"the portable graph should yield {name!r}, but never computes it")


def _check_node(node: Node, known: set[str]) -> None:
    """The checks of every operator call, in a forward or a backward pass."""
    if (node.op == ops.OWN_GRADIENT) != (node.backward is not None):
        raise GraphError(f"node {node.name!r} of the portable graph must be {ops.OWN_GRADIENT} to have a backward pass")
    check_node(node)
    for reference in node.references():
        if reference not in known:
            raise GraphError(f"node {node.name!r} of the portable graph uses {reference!r} before it exists")
    if node.name in known:
        raise GraphError(f"the portable graph defines {node.name!r} twice")


def check_node(node: Node) -> None:
    """GraphError unless the operator is on the allow-list and its arguments fit its signature."""
    operator = ops.resolve(node.op)
    if node.op == ops.OWN_GRADIENT:
        # _check_backward compares its three lists with its backward pass.
        return
    if not ops.is_python(node.op):
        check_arguments(node.name, node.op, operator, node.args, node.kwargs, _FORMS)
        return
    reason = unfit_numbers(node.op, node.args, node.kwargs, Ref)
    if reason:
        raise GraphError(f"node {node.name!r} of the portable graph: {reason}")


def _check_backward(node: Node, backward: Backward) -> None:
    """GraphError unless a backward pass defines each name once and before its use, is not nested, draws no random
    numbers, and writes into no value that it did not make itself."""
    where = f"the backward pass of node {node.name!r} of the portable graph"
    sizes = (len(backward.gradients), len(backward.yields), len(backward.saved))
    lists = [a for a in node.args if isinstance(a, tuple) and all(isinstance(item, Ref) for item in a)]
    if node.kwargs or node.evaluation or len(node.args) != 3 or tuple(len(a) for a in lists) != sizes:
        raise GraphError(f"{where} does not have the gradients and values that the node has")
    given = (*backward.gradients, *backward.saved)
    known = set(given)
    if len(known) != len(given):
        raise GraphError(f"{where} defines a name twice")
    foreign = {name: True for name in given}
    for inner in backward.nodes:
        _check_node(inner, known)
        if inner.backward is not None or inner.evaluation is not None or ops.is_random(inner.op):
            raise GraphError(f"{where} has the node {inner.name!r}, which is not allowed in a backward pass")
        if any(foreign[name] for position in ops.written_arguments(inner.op) for name in inner.references_at(position)):
            raise GraphError(f"{where} changes a value in place that it did not make")
        shared = [name for position in ops.aliased_arguments(inner.op) for name in inner.references_at(position)]
        foreign[inner.name] = any(foreign[name] for name in shared)
        known.add(inner.name)
    for name in backward.yields:
        if name is not None and name not in known:
            raise GraphError(f"{where} should yield {name!r}, but never computes it")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: object) -> torch.dtype:
    if not isinstance(name, str) or name not in _DTYPES:
        raise GraphError(f"{str(name)[:80]!r} is not a tensor type that a portable graph may use")
    return _DTYPES[name]


def _references(argument: Argument) -> Iterator[str]:
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, tuple):
        for item in argument:
            yield from _references(item)


def _argument_to_json(argument: Argument) -> Any:
    if isinstance(argument, Ref):
        return {"ref": argument.name}
    if isinstance(argument, Device):
        return {"device": "stage"}
    if isinstance(argument, torch.dtype):
        return {"dtype": dtype_name(argument)}
    if isinstance(argument, torch.memory_format):
        return {"memory_format": str(argument).removeprefix("torch.")}
    if isinstance(argument, torch.layout):
        return {"layout": "strided"}
    if isinstance(argument, float) and not math.isfinite(argument):
        return {"float": str(argument)}
    if isinstance(argument, tuple):
        return [_argument_to_json(a) for a in argument]
    return argument


def _argument_from_json(data: Any, depth: int = 0) -> Argument:
    if data is None or isinstance(data, bool | int | float | str):
        if isinstance(data, str) and len(data) > 256:
            raise GraphError("an argument of the portable graph is text of more than 256 characters")
        if isinstance(data, int) and not isinstance(data, bool) and not -(2**63) <= data < 2**63:
            raise GraphError("an argument of the portable graph is an integer of more than 64 bits")
        return data
    if depth >= MAX_DEPTH:
        raise GraphError(f"an argument of the portable graph is nested more than {MAX_DEPTH} deep")
    if isinstance(data, list):
        return tuple(_argument_from_json(d, depth + 1) for d in _array(data, "argument list"))
    if isinstance(data, dict) and len(data) == 1:
        ((kind, value),) = data.items()
        if kind == "ref":
            return Ref(_name(value))
        if kind == "device" and value == "stage":
            return Device()
        if kind == "dtype":
            return dtype_named(value)
        if kind == "memory_format" and isinstance(value, str) and value in _MEMORY_FORMATS:
            return _MEMORY_FORMATS[value]
        if kind == "layout" and value == "strided":
            return torch.strided
        if kind == "float" and value in ("inf", "-inf", "nan"):
            return float(value)
    raise GraphError(f"the portable graph has an argument of an unknown form: {str(data)[:80]!r}")


def _value_to_json(value: ValueSpec) -> dict[str, Any]:
    return {
        "name": value.name,
        "dtype": None if value.dtype is None else dtype_name(value.dtype),
        "shape": list(value.shape),
        "needs_grad": value.needs_grad,
    }


def _value_from_json(data: Any) -> ValueSpec:
    item = _object(data, "value")
    dtype = item.get("dtype")
    sizes = _array(item.get("shape"), "shape", 64)
    shape = tuple(s if isinstance(s, str) and _SYMBOL.fullmatch(s) else _size(s) for s in sizes)
    return ValueSpec(
        _name(item.get("name")), None if dtype is None else dtype_named(dtype), shape, item.get("needs_grad") is True
    )


def _weight_to_json(weight: WeightSpec) -> dict[str, Any]:
    return {"name": weight.name, "key": weight.key, "dtype": dtype_name(weight.dtype), "shape": list(weight.shape)}


def _weight_from_json(data: Any) -> WeightSpec:
    item = _object(data, "weight")
    key = item.get("key")
    if not isinstance(key, str) or not _KEY.fullmatch(key) or ".." in key:
        raise GraphError(f"{str(key)[:80]!r} is not a valid name for a weight")
    shape = tuple(_size(s) for s in _array(item.get("shape"), "shape", 64))
    return WeightSpec(_name(item.get("name")), key, dtype_named(item.get("dtype")), shape)


def _node_to_json(node: Node) -> dict[str, Any]:
    data: dict[str, Any] = {"name": node.name, "op": node.op, "args": [_argument_to_json(a) for a in node.args]}
    if node.kwargs:
        data["kwargs"] = {k: _argument_to_json(v) for k, v in node.kwargs.items()}
    if not node.grad:
        data["grad"] = False
    if node.seed is not None:
        data["seed"] = node.seed
    if node.evaluation is not None:
        form = node.evaluation
        data["evaluation"] = {"op": form.op, "args": [_argument_to_json(a) for a in form.args]}
        if form.kwargs:
            data["evaluation"]["kwargs"] = {k: _argument_to_json(v) for k, v in form.kwargs.items()}
    if node.backward is not None:
        data["backward"] = {
            "gradients": list(node.backward.gradients),
            "saved": list(node.backward.saved),
            "nodes": [_node_to_json(n) for n in node.backward.nodes],
            "yields": list(node.backward.yields),
        }
    return data


def _node_from_json(data: Any, inner: bool = False) -> Node:
    item = _object(data, "node")
    op, args, kwargs = _call_from_json(item)
    seed = item.get("seed")
    if seed is not None:
        seed = _size(seed)
    evaluation, backward = item.get("evaluation"), item.get("backward")
    if inner and backward is not None:
        raise GraphError("a backward pass of the portable graph has a node with a backward pass of its own")
    return Node(
        name=_name(item.get("name")),
        op=op,
        args=args,
        kwargs=kwargs,
        grad=item.get("grad", True) is not False,
        seed=seed,
        evaluation=None if evaluation is None else EvaluationForm(*_call_from_json(_object(evaluation, "evaluation"))),
        backward=None if backward is None else _backward_from_json(_object(backward, "backward pass")),
    )


def _call_from_json(item: dict[str, Any]) -> tuple[str, tuple[Argument, ...], dict[str, Argument]]:
    op = item.get("op")
    if not isinstance(op, str) or len(op) > 128:
        raise GraphError("a node of the portable graph has no operator name")
    args = tuple(_argument_from_json(a) for a in _array(item.get("args"), "args"))
    kwargs = {_name(k): _argument_from_json(v) for k, v in _object(item.get("kwargs", {}), "kwargs").items()}
    return op, args, kwargs


def _backward_from_json(item: dict[str, Any]) -> Backward:
    return Backward(
        gradients=tuple(_name(n) for n in _array(item.get("gradients"), "gradients")),
        saved=tuple(_name(n) for n in _array(item.get("saved"), "saved values")),
        nodes=tuple(_node_from_json(n, inner=True) for n in _array(item.get("nodes"), "nodes", MAX_NODES)),
        yields=tuple(None if n is None else _name(n) for n in _array(item.get("yields"), "yields")),
    )


def _object(data: Any, what: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise GraphError(f"the portable graph has no valid {what} (a JSON object)")
    return data


def _array(data: Any, what: str, limit: int = MAX_LIST) -> list[Any]:
    if not isinstance(data, list) or len(data) > limit:
        raise GraphError(f"the portable graph has no valid {what} (a JSON array of at most {limit} items)")
    return data


def _name(data: Any) -> str:
    if not isinstance(data, str) or not _NAME.fullmatch(data):
        raise GraphError(f"{str(data)[:80]!r} is not a valid name for a value")
    return data


def _size(data: Any) -> int:
    if not isinstance(data, int) or isinstance(data, bool) or not 0 <= data < 2**40:
        raise GraphError(f"{str(data)[:80]!r} is not a valid size of a tensor")
    return data

"""Reader of portable graphs in their JSON form (docs/portable-graph.md).

Sizes are limited while reading, and the graph is checked before it is returned. Invalid text is a GraphError, and
nothing is built from it.
"""

import re
from typing import Any

import torch

from ravnest.errors import GraphError
from ravnest.graph.portable import (
    FORMAT_VERSION,
    Argument,
    Backward,
    Device,
    EvaluationForm,
    Node,
    PortableGraph,
    Ref,
    ValueSpec,
    WeightSpec,
)
from ravnest.graph.portable_check import MAX_NODES, check
from ravnest.safe_json import read_json

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


def read_graph(text: str | bytes) -> PortableGraph:
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
    graph = PortableGraph(
        nodes=tuple(_node_from_json(n) for n in _array(top.get("nodes"), "nodes", MAX_NODES)),
        inputs=tuple(_value_from_json(v) for v in _array(top.get("inputs"), "inputs")),
        receives=tuple(_value_from_json(v) for v in _array(top.get("receives"), "receives")),
        sends=tuple(_value_from_json(v) for v in _array(top.get("sends"), "sends")),
        rows=tuple(_value_from_json(v) for v in _array(top.get("rows", []), "rows")),
        lookups=tuple(_value_from_json(v) for v in _array(top.get("lookups", []), "lookups")),
        parameters=tuple(_weight_from_json(w) for w in _array(top.get("parameters"), "parameters")),
        constants=tuple(_weight_from_json(w) for w in _array(top.get("constants"), "constants")),
        states=tuple(_weight_from_json(w) for w in _array(top.get("states"), "states")),
        loss=None if top.get("loss") is None else _name(top["loss"]),
        metrics={_name(k): _name(v) for k, v in _object(top.get("metrics"), "metrics").items()},
    )
    check(graph)
    return graph


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


def _value_from_json(data: Any) -> ValueSpec:
    item = _object(data, "value")
    dtype = item.get("dtype")
    sizes = _array(item.get("shape"), "shape", 64)
    shape = tuple(s if isinstance(s, str) and _SYMBOL.fullmatch(s) else _size(s) for s in sizes)
    return ValueSpec(
        _name(item.get("name")), None if dtype is None else dtype_named(dtype), shape, item.get("needs_grad") is True
    )


def _weight_from_json(data: Any) -> WeightSpec:
    item = _object(data, "weight")
    key = item.get("key")
    if not isinstance(key, str) or not _KEY.fullmatch(key) or ".." in key:
        raise GraphError(f"{str(key)[:80]!r} is not a valid name for a weight")
    shape = tuple(_size(s) for s in _array(item.get("shape"), "shape", 64))
    return WeightSpec(_name(item.get("name")), key, dtype_named(item.get("dtype")), shape)


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


def dtype_named(name: object) -> torch.dtype:
    if not isinstance(name, str) or name not in _DTYPES:
        raise GraphError(f"{str(name)[:80]!r} is not a tensor type that a portable graph may use")
    return _DTYPES[name]

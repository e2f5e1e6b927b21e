"""Portable graph: a model as data, which a provider receives instead of the requester's Python.

A graph is an ordered list of operator calls with names for values. The same type describes a whole model and one stage
of it. `to_json` writes it as plain JSON (docs/portable-graph.md), and portable_reader.py reads and checks that.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ravnest.graph import ops

FORMAT_VERSION = 3


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that refers to the value of that name."""

    name: str


@dataclass(frozen=True, slots=True)
class Device:
    """An argument that stands for the device of the stage."""


Argument = (
    None | bool | int | float | str | torch.dtype | torch.memory_format | torch.layout | Ref | Device | tuple[Any, ...]
)


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """A tensor (or, with dtype None, a plain number) that crosses into or out of a graph.

    A size given as text may differ from batch to batch, like the batch size; equal texts are equal sizes.
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
    rows        come to a root from the leaf, which looks them up in a parameter of its own before a microbatch begins;
                lookups are the leaf's side of it
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
    rows: tuple[ValueSpec, ...] = ()
    lookups: tuple[ValueSpec, ...] = ()

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return (*self.parameters, *self.constants, *self.states)

    @property
    def from_stages(self) -> tuple[ValueSpec, ...]:
        """The values that another stage sends for a forward: the stage before, or the leaf for a root."""
        return (*self.rows, *self.receives)

    def given_names(self) -> list[str]:
        """Names of all values that exist before the first node runs."""
        return [v.name for v in (*self.inputs, *self.from_stages)] + [w.name for w in self.weights]

    def to_json(self) -> str:
        return json.dumps(
            {
                "format": "ravnest.graph",
                "version": FORMAT_VERSION,
                "inputs": [_value_to_json(v) for v in self.inputs],
                "receives": [_value_to_json(v) for v in self.receives],
                "sends": [_value_to_json(v) for v in self.sends],
                "rows": [_value_to_json(v) for v in self.rows],
                "lookups": [_value_to_json(v) for v in self.lookups],
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


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


def _value_to_json(value: ValueSpec) -> dict[str, Any]:
    return {
        "name": value.name,
        "dtype": None if value.dtype is None else dtype_name(value.dtype),
        "shape": list(value.shape),
        "needs_grad": value.needs_grad,
    }


def _weight_to_json(weight: WeightSpec) -> dict[str, Any]:
    return {"name": weight.name, "key": weight.key, "dtype": dtype_name(weight.dtype), "shape": list(weight.shape)}


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

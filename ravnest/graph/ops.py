"""Operators that a portable graph may use, by name, and the properties that partition has to respect.

A provider runs a stranger's graph, so an operator is allowed only as an exact overload of the table in
`operators/allowed.py`, named `aten.<name>.<overload>`. Any other name is a GraphError.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ravnest.errors import GraphError
from ravnest.graph.operators.allowed import OVERLOADS
from ravnest.graph.operators.python_numbers import FUNCTIONS, TARGETS

OWN_GRADIENT = "py.own_gradient"
"""Operator that returns its first list of values, with the backward pass that the node carries (own_gradient.py)."""


def _without_gradient(outputs: Any, inputs: Any, saved: Any) -> Any:
    return outputs


_PYTHON: dict[str, Callable[..., Any]] = {**FUNCTIONS, OWN_GRADIENT: _without_gradient}

_HEAVY = frozenset(
    """
    addbmm addmm baddbmm bilinear bmm cdist conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    convolution einsum gru linear lstm matmul mm rnn_relu rnn_tanh scaled_dot_product_attention tensordot
    """.split()
)

_RANDOM = frozenset(
    """
    alpha_dropout alpha_dropout_ bernoulli bernoulli_ dropout dropout_ feature_alpha_dropout feature_alpha_dropout_
    feature_dropout feature_dropout_ gru lstm multinomial normal normal_ rand rand_like randint randint_like randn
    randn_like randperm rnn_relu rnn_tanh rrelu scaled_dot_product_attention uniform uniform_
    """.split()
)

# These may return their argument or a view of it, although their schema does not say so.
_MAY_ALIAS = frozenset(
    """
    alpha_dropout atleast_1d atleast_2d atleast_3d broadcast_tensors channel_shuffle dropout einsum
    feature_alpha_dropout feature_dropout meshgrid pad pixel_shuffle pixel_unshuffle type_as
    """.split()
)


# These change the shape of a tensor in place, but not its values. If another kernel had saved the tensor for its
# backward, that would change as well. So they run as the view of the same name, which later nodes get in any case.
_AS_VIEWS = {
    "aten.detach_.default": "aten.detach.default",
    "aten.squeeze_.default": "aten.squeeze.default",
    "aten.squeeze_.dim": "aten.squeeze.dim",
    "aten.squeeze_.dims": "aten.squeeze.dims",
    "aten.t_.default": "aten.t.default",
    "aten.transpose_.default": "aten.transpose.int",
    "aten.unsqueeze_.default": "aten.unsqueeze.default",
}


def short_name(op: str) -> str:
    """`aten.conv2d.default` -> `conv2d`."""
    return op.split(".")[1]


def is_python(op: str) -> bool:
    return op in _PYTHON


@cache
def resolve(op: str) -> Callable[..., Any]:
    """The callable behind an operator name; GraphError when the name is not on the allow-list."""
    if op in _PYTHON:
        return _PYTHON[op]
    if op not in OVERLOADS:
        raise GraphError(f"operator {op!r} is not on the allow-list; a graph may only compute tensors from tensors")
    parts = _AS_VIEWS.get(op, op).split(".")
    packet = getattr(torch.ops.aten, parts[1], None)
    if packet is None or parts[2] not in packet.overloads():
        raise GraphError(f"operator {op!r} is unknown to torch {torch.__version__}; the two machines' versions differ")
    overload: Callable[..., Any] = getattr(packet, parts[2])
    return overload


def name_of(target: object) -> str | None:
    """The portable name of a captured call target, or None where it has none."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        return f"{namespace}.{name}.{target._overloadname}"
    for name, function in TARGETS.items():
        if target is function:
            return name
    return None


def is_allowed(op: str) -> bool:
    return op in _PYTHON or op in OVERLOADS


def compilable(op: str) -> Callable[..., Any]:
    """The callable for a compiler, without our own checks of plain numbers, because a compiler traces them as symbols.
    GraphError for a node with a backward pass of its own, which can only be interpreted."""
    if op == OWN_GRADIENT:
        raise GraphError(f"{OWN_GRADIENT} cannot be compiled: the backward pass of its node is interpreted")
    return TARGETS[op] if op in TARGETS else resolve(op)


@cache
def without_out(target: object) -> str | None:
    """The operator that computes the value which this one writes into its `out=`. None if this operator has no `out=`,
    or the other operator is not on the allow-list."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.name.startswith("aten::"):
        return None
    arguments = target._schema.arguments
    written = [a.name for a in arguments if a.is_out]
    if written != ["out"]:
        return None
    name = target._schema.name.replace("::", ".")
    wanted = [(a.name, str(a.type)) for a in arguments if not a.is_out]
    for op in sorted(op for op in OVERLOADS if op.rpartition(".")[0] == name):
        if wanted == [(a.name, str(a.type)) for a in resolve(op)._schema.arguments]:  # type: ignore[attr-defined]
            return op
    return None


def is_heavy(op: str) -> bool:
    """Whether recomputing this operator on several stages would take considerable time."""
    return not is_python(op) and short_name(op) in _HEAVY


def is_random(op: str) -> bool:
    """Whether this operator may draw random numbers."""
    return not is_python(op) and short_name(op) in _RANDOM


@cache
def argument_name(op: str, position: int) -> str:
    """The keyword of the argument at this position. Some arguments, such as `out`, can be given by keyword only."""
    if is_python(op):
        return ""
    arguments = resolve(op)._schema.arguments  # type: ignore[attr-defined]
    return str(arguments[position].name) if position < len(arguments) else ""


@cache
def written_arguments(op: str) -> tuple[int, ...]:
    """Positions of the arguments that this operator changes in place (batch norm's running statistics included)."""
    if is_python(op):
        return ()
    if short_name(op) in ("batch_norm", "instance_norm"):
        return (3, 4)
    schema = resolve(op)._schema  # type: ignore[attr-defined]
    return tuple(i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)


@cache
def aliased_arguments(op: str) -> tuple[int, ...]:
    """Positions of the arguments whose memory the result may share: views, in-place results, getitem of a list."""
    if op in ("py.getitem", OWN_GRADIENT):
        return (0,)
    if is_python(op):
        return ()
    schema = resolve(op)._schema  # type: ignore[attr-defined]
    positions = {i for i, a in enumerate(schema.arguments) if a.alias_info is not None}
    if not any(r.alias_info is not None for r in schema.returns):
        positions = set()
    if short_name(op) in _MAY_ALIAS:
        positions.add(1 if short_name(op) == "einsum" else 0)
    return tuple(sorted(positions))

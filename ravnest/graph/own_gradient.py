"""Interpreter of a backward pass that the model defines itself: a custom autograd function or a hook on a tensor.

A `py.own_gradient` node returns its outputs unchanged. When their gradients arrive, autograd calls the function below,
which runs the node's list of operators on the gradients and the saved values. A backward pass is therefore data for a
provider, like a forward pass, and the same steps interpret it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ravnest.errors import GraphError
from ravnest.graph.portable import Node

Run = Callable[[Sequence[Any]], list[Any]]
"""Runs a backward pass: from incoming gradients followed by saved values to outgoing gradients."""


def with_own_gradient(node: Node, run: Run) -> Callable[..., list[torch.Tensor]]:
    """The function that a `py.own_gradient` node calls with its three lists; `run` is its backward pass."""

    def call(outputs: Any, inputs: Any, saved: Any) -> list[torch.Tensor]:
        if not all(isinstance(value, torch.Tensor) for value in (*outputs, *inputs)):
            raise GraphError(f"node {node.name!r} of the portable graph gives a gradient to a value that is no tensor")
        # Autograd does not see outputs inside a list. Otherwise their own history would be differentiated as well.
        results = _OwnGradient.apply(run, list(outputs), list(saved), *inputs)  # type: ignore[no-untyped-call]
        return list(results)

    return call


class _OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, outputs: list[Any], saved: list[Any], *inputs: Any) -> tuple[Any, ...]:
        ctx.run = run
        ctx.plain = [None if isinstance(value, torch.Tensor) else value for value in saved]
        ctx.save_for_backward(*(value if isinstance(value, torch.Tensor) else None for value in saved))
        # A detached value is no view, so the model may change it in place like the result of any operator.
        return tuple(value.detach() for value in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        values = [
            plain if tensor is None else tensor for tensor, plain in zip(ctx.saved_tensors, ctx.plain, strict=True)
        ]
        found = ctx.run([*gradients, *values])
        needed = ctx.needs_input_grad[3:]
        return (None, None, None, *(g if wanted else None for g, wanted in zip(found, needed, strict=True)))

"""Interpreter of a backward pass that the model brings along: a custom autograd function, a hook on a tensor.

A `py.own_gradient` node yields its outputs as they are. When their gradients arrive, autograd calls the one function
below, which runs the node's list of operators on these gradients and on the values that were saved. So a backward pass
is data for a provider too, interpreted by the same steps as a forward pass.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ravnest.errors import GraphError
from ravnest.graph.portable import Node

Run = Callable[[Sequence[Any]], list[Any]]
"""Runs a backward pass: gradients that arrive, then saved values, become the gradients that leave."""


def with_own_gradient(node: Node, run: Run) -> Callable[..., list[torch.Tensor]]:
    """The function that a `py.own_gradient` node calls with its three lists. `run` is its backward pass."""

    def call(outputs: Any, inputs: Any, saved: Any) -> list[torch.Tensor]:
        if not all(isinstance(value, torch.Tensor) for value in (*outputs, *inputs)):
            raise GraphError(f"node {node.name!r} of the portable graph gives a gradient to what is no tensor")
        # In a list, autograd does not see the outputs: what they were computed from must not count a second time.
        results = _OwnGradient.apply(run, list(outputs), list(saved), *inputs)  # type: ignore[no-untyped-call]
        return list(results)

    return call


class _OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, outputs: list[Any], saved: list[Any], *inputs: Any) -> tuple[Any, ...]:
        ctx.run = run
        ctx.plain = [None if isinstance(value, torch.Tensor) else value for value in saved]
        ctx.save_for_backward(*(value if isinstance(value, torch.Tensor) else None for value in saved))
        # A detached value is no view, so the model may change it in place as it may any result of an operator.
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

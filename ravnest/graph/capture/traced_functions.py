"""Custom autograd functions while a model is exported: their backward passes are traced next to their forward.

A function runs as in autograd, without gradients inside. Its backward runs directly after its forward, on stand-ins for
the gradients and with the same saved tensors. A function that cannot be traced is a CaptureError.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.function import FunctionCtx, _SingleLevelFunction

from ravnest.errors import CaptureError
from ravnest.graph.capture.gradient_marks import marks, numbered, refuse, told_as
from ravnest.graph.capture.users_line import line_of_caller, line_of_function

Tensor = torch.Tensor


def traced_apply(cls: Any, *args: Any, **named: Any) -> Any:
    """Replacement for the `apply` of every custom function."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    plain = super(_SingleLevelFunction, cls).apply
    if cls is _Inline:
        return plain(*args)
    if cls is torch.utils.checkpoint.CheckpointFunction:
        # It recomputes the forward to save memory, which the pipeline does itself: (function, flag, *arguments).
        return args[0](*args[2:])
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        return plain(*args, **named)
    if named:
        refuse(f"{cls.__name__}{line_of_caller()}", "it has keyword-only arguments")
    function = _Function(cls, args)
    marked = _Inline.apply(function.run, *(t for t in tensors if t.requires_grad))  # type: ignore[no-untyped-call]
    return function.result(marked if isinstance(marked, tuple) else (marked,))


class _Context(FunctionCtx):
    """The `ctx` of a custom function: the same as autograd's, with the same tensors as were saved."""

    to_save: tuple[Any, ...] = ()
    non_differentiable: tuple[Tensor, ...] = ()
    dirty_tensors: tuple[Tensor, ...] = ()
    materialize_grads: bool = True
    needs_input_grad: tuple[bool, ...] = ()

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self.to_save


class _Inline(torch.autograd.Function):
    """Runs a callable as autograd runs a custom forward: without gradients inside, but with one for the result."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Any], *_: Tensor) -> Any:
        return run()


@dataclass
class _Function:
    """One call of a custom function: its forward, followed by its backward."""

    cls: Any
    args: tuple[Any, ...]
    outputs: Any = None
    differentiable: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        backward = inspect.unwrap(self.cls.backward)
        self.what = f"the backward pass of {self.cls.__name__}{line_of_function(backward)}"

    def run(self) -> tuple[Tensor, ...]:
        """Run both passes. Returns the outputs that have a gradient, marked."""
        with _without_gradients():
            entered = [marks.enter(a) if isinstance(a, Tensor) else a for a in self.args]
            ctx = _Context()
            ctx.needs_input_grad = tuple(isinstance(a, Tensor) and a.requires_grad for a in self.args)
            outputs = self._forward(ctx, entered)
            if getattr(ctx, "dirty_tensors", None):
                refuse(f"{self.cls.__name__}{line_of_caller()}", "it changes its arguments in place (ctx.mark_dirty)")
            inputs = [e for e, needed in zip(entered, ctx.needs_input_grad, strict=True) if needed]
            call = numbered(self.what)
            gradients = {i: marks.gradient_of(outputs[i], call) for i in self.differentiable}
            found = self._backward(ctx, outputs, gradients)
            found = [f for f, needed in zip(found, ctx.needs_input_grad, strict=True) if needed]
            results = [outputs[i] for i in self.differentiable]
            return tuple(marks.own_gradient(results, inputs, found, call))

    def result(self, marked: Sequence[Tensor]) -> Any:
        """The result for the caller, with the marked outputs in place of those that have a gradient."""
        if isinstance(self.outputs, Tensor):
            return marked[0] if self.differentiable else self.outputs
        values = list(self.outputs)
        for position, value in zip(self.differentiable, marked, strict=True):
            values[position] = value
        return tuple(values)

    def _forward(self, ctx: _Context, args: Sequence[Any]) -> tuple[Any, ...]:
        if self.cls.setup_context is _SingleLevelFunction.setup_context:
            self.outputs = self.cls.forward(ctx, *args)
        else:
            self.outputs = self.cls.forward(*args)
            self.cls.setup_context(ctx, tuple(args), self.outputs)
        outputs = tuple(self.outputs) if isinstance(self.outputs, tuple | list) else (self.outputs,)
        constant = {id(t) for t in ctx.non_differentiable}
        self.differentiable = tuple(
            i
            for i, value in enumerate(outputs)
            if isinstance(value, Tensor)
            and (value.is_floating_point() or value.is_complex())
            and id(value) not in constant
        )
        return outputs

    def _backward(self, ctx: _Context, outputs: Sequence[Any], gradients: dict[int, Tensor]) -> list[Tensor | None]:
        if not gradients:
            return [None] * len(self.args)
        given: list[Tensor | None] = []
        for i, value in enumerate(outputs):
            zeros = isinstance(value, Tensor) and ctx.materialize_grads
            given.append(gradients[i] if i in gradients else torch.zeros_like(value) if zeros else None)
        backward = self.cls.backward
        if backward is _SingleLevelFunction.backward:
            backward = self.cls.vjp
        with told_as(self.what):
            found = backward(ctx, *given)
        found = list(found) if isinstance(found, tuple | list) else [found]
        if len(found) < len(self.args) or any(f is not None for f in found[len(self.args) :]):
            raise CaptureError(
                f"{self.what} returns {len(found)} gradients for {len(self.args)} arguments{line_of_caller()}"
            )
        return found[: len(self.args)]


@contextmanager
def _without_gradients() -> Iterator[None]:
    """Like torch.no_grad, but visible to the export: autograd turns gradients off inside a custom function without the
    export's notice, so this records it at the beginning and at the end of the block."""
    torch.set_grad_enabled(False)
    yield
    torch.set_grad_enabled(True)

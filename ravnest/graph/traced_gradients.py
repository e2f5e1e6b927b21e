"""Interceptor of custom backward passes and gradient hooks while a model is exported.

torch.export follows the forward alone: what an `autograd.Function` or a hook does to a gradient leaves no trace in it.
While `traced` is open, both are run as the model calls them, and their backward passes at once after that, on stand-ins
for the gradients. Three operators of our own mark in the exported program which operators belong to such a backward
pass; `own_backward.py` takes it from there. Nothing of this is left when the block ends.

What cannot be followed is refused by its name and line: a hook that returns nothing (it would run the user's Python on
a provider), hooks that run after a gradient was added up, and functions that change what they are given.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.nn.modules.module
import torch.utils.checkpoint
from torch import nn
from torch.autograd.function import FunctionCtx, _SingleLevelFunction
from torch.utils.hooks import RemovableHandle

from ravnest.errors import CaptureError
from ravnest.graph.users_line import line_of_caller, line_of_error, line_of_function

Tensor = torch.Tensor

_library: Any = torch.library.Library("ravnest", "DEF")  # type: ignore[no-untyped-call]
_MARKS: dict[str, Callable[..., Any]] = {
    "enter(Tensor value) -> Tensor": torch.empty_like,
    "gradient_of(Tensor value, int call) -> Tensor": lambda value, _: torch.empty_like(value),
    "own_gradient(Tensor[] outputs, Tensor[] inputs, Tensor?[] found, int call) -> Tensor[]": (
        lambda outputs, *_: [torch.empty_like(o) for o in outputs]
    ),
    "hooked(Tensor[] values, Tensor?[] found, int call) -> ()": lambda *_: None,
}
"""What goes into a function; a stand-in for the gradient of a value; values that have a backward pass of their own; and
values whose gradients a hook changes. The number of the call says what belongs together."""
for _schema, _on_shapes in _MARKS.items():
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _on_shapes, "CompositeExplicitAutograd")
# Nothing uses what a hook's mark yields: without this it would be dropped as dead.
torch.fx.node._side_effectful_functions.add(torch.ops.ravnest.hooked.default)

_ops: Any = torch.ops.ravnest
_calls: list[str] = []
"""What each call is, by its number, while something is traced."""


@contextmanager
def traced() -> Iterator[list[str]]:
    """Within the block, custom backward passes and hooks become part of what is traced; CaptureError where they
    cannot. Yields what each of them is, in words, in the order in which the marks number them."""
    with ExitStack() as stack:
        calls: list[str] = []
        stack.enter_context(patch(f"{__name__}._calls", calls))
        # Every way to `apply` ends here, also one that a user keeps under another name.
        stack.enter_context(patch.object(_SingleLevelFunction, "apply", classmethod(_apply), create=True))
        stack.enter_context(patch.object(Tensor, "register_hook", _register_hook))
        refused = {
            "register_post_accumulate_grad_hook": "it runs Python of yours after a gradient was added up",
        }
        for name, reason in refused.items():
            stack.enter_context(patch.object(Tensor, name, _refusal(name, reason)))
        stack.enter_context(
            patch.object(
                *(torch.autograd.graph, "register_multi_grad_hook"),
                _refusal("register_multi_grad_hook", "it runs Python of yours on several gradients"),
            )
        )
        stack.enter_context(patch.object(torch.nn.modules.module, "BackwardHook", _ModuleHooks))
        yield calls


def _numbered(what: str) -> int:
    _calls.append(what)
    return len(_calls) - 1


def refuse_hooks(model: nn.Module) -> None:
    """CaptureError for the hooks on a model that have no form as a graph, by the parameter or module they are on."""
    for name, parameter in model.named_parameters():
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            _refuse(
                f"the post-accumulate-grad hook {_name(hook)}{line_of_function(hook)} on {name}",
                "it runs Python of yours after a gradient was added up",
            )
    modules = torch.nn.modules.module
    if modules._global_backward_hooks and not modules._global_is_full_backward_hook:
        _refuse("a backward hook on all modules", "it is not a full one; use register_module_full_backward_hook")
    for name, module in model.named_modules():
        if module._backward_hooks and module._is_full_backward_hook is False:
            hook = next(iter(module._backward_hooks.values()))
            _refuse(
                f"the backward hook {_name(hook)}{line_of_function(hook)} on the module {name or 'model'}",
                "register_backward_hook gives it other gradients than the module's; use register_full_backward_hook",
            )


def hooks_of_parameters(model: nn.Module) -> list[tuple[str, list[Callable[..., Any]]]]:
    """The hooks on trained parameters, by the parameter's name, in the order they run."""
    found = []
    for name, parameter in model.named_parameters():
        hooks = list((getattr(parameter, "_backward_hooks", None) or {}).values())
        if hooks and parameter.requires_grad:
            found.append((name, hooks))
    return found


def trace_parameter_hooks(model: nn.Module, hooks: Sequence[tuple[str, list[Callable[..., Any]]]]) -> None:
    """Traces the hooks on parameters, which must be the first that a traced forward does."""
    for name, each in hooks:
        for hook in each:
            _trace_hook(model.get_parameter(name), hook, f"the parameter {name}")


# Custom functions.


class _Context(FunctionCtx):
    """What a custom function gets as `ctx`: the same as from autograd, with the very tensors that were saved."""

    to_save: tuple[Any, ...] = ()
    non_differentiable: tuple[Tensor, ...] = ()
    dirty_tensors: tuple[Tensor, ...] = ()
    materialize_grads: bool = True
    needs_input_grad: tuple[bool, ...] = ()

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self.to_save


class _Inline(torch.autograd.Function):
    """Runs something as autograd runs a custom forward: without gradients inside, and with one outside."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Any], *_: Tensor) -> Any:
        return run()


def _apply(cls: Any, *args: Any, **named: Any) -> Any:
    tensors = [a for a in args if isinstance(a, Tensor)]
    plain = super(_SingleLevelFunction, cls).apply
    if cls is _Inline:
        return plain(*args)
    if cls is torch.utils.checkpoint.CheckpointFunction:
        # It computes the forward again to save memory, which the pipeline does by itself: (function, flag, *arguments).
        return args[0](*args[2:])
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        return plain(*args, **named)
    if named:
        _refuse(f"{cls.__name__}{line_of_caller()}", "it has arguments that can be given by name alone")
    function = _Function(cls, args)
    marked = _Inline.apply(function.run, *(t for t in tensors if t.requires_grad))  # type: ignore[no-untyped-call]
    return function.result(marked if isinstance(marked, tuple) else (marked,))


@dataclass
class _Function:
    """One call of a custom function: its forward, and its backward behind it."""

    cls: Any
    args: tuple[Any, ...]
    outputs: Any = None
    differentiable: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        backward = inspect.unwrap(self.cls.backward)
        self.what = f"the backward pass of {self.cls.__name__}{line_of_function(backward)}"

    def run(self) -> tuple[Tensor, ...]:
        """The outputs that have a gradient, marked. Runs both passes."""
        with _without_gradients():
            entered = [_ops.enter(a) if isinstance(a, Tensor) else a for a in self.args]
            ctx = _Context()
            ctx.needs_input_grad = tuple(isinstance(a, Tensor) and a.requires_grad for a in self.args)
            outputs = self._forward(ctx, entered)
            if getattr(ctx, "dirty_tensors", None):
                _refuse(f"{self.cls.__name__}{line_of_caller()}", "it changes what it is given (ctx.mark_dirty)")
            inputs = [e for e, needed in zip(entered, ctx.needs_input_grad, strict=True) if needed]
            call = _numbered(self.what)
            gradients = {i: _ops.gradient_of(outputs[i], call) for i in self.differentiable}
            found = self._backward(ctx, outputs, gradients)
            found = [f for f, needed in zip(found, ctx.needs_input_grad, strict=True) if needed]
            results = [outputs[i] for i in self.differentiable]
            return tuple(_ops.own_gradient(results, inputs, found, call))

    def result(self, marked: Sequence[Tensor]) -> Any:
        """What the caller gets: with the marked outputs in the place of those that have a gradient."""
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
        with _told_as(self.what):
            found = backward(ctx, *given)
        found = list(found) if isinstance(found, tuple | list) else [found]
        if len(found) < len(self.args) or any(f is not None for f in found[len(self.args) :]):
            raise CaptureError(
                f"{self.what} returns {len(found)} gradients for {len(self.args)} arguments{line_of_caller()}"
            )
        return found[: len(self.args)]


@contextmanager
def _without_gradients() -> Iterator[None]:
    """As torch.no_grad. Autograd has turned gradients off itself for what runs inside a custom function, unseen by
    the export: so this says it, and says it again at the end."""
    torch.set_grad_enabled(False)
    yield
    torch.set_grad_enabled(True)


@contextmanager
def _told_as(what: str) -> Iterator[None]:
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CaptureError(
            f"{what} cannot be captured{line_of_error(error)}: {reason[:300]}; use torch operators there whose path "
            "does not depend on the values in a tensor"
        ) from error


# Hooks.


def _register_hook(tensor: Tensor, hook: Callable[..., Any]) -> RemovableHandle:
    if not tensor.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    if tensor.is_leaf:
        _refuse(
            f"the hook {_name(hook)} on a parameter{line_of_caller()}",
            "the forward registers it, one more each time it runs; register it once, where the model is made",
        )
    _trace_hook(tensor, hook, "a tensor")
    return _Fixed(OrderedDict())


def _trace_hook(tensor: Tensor, hook: Callable[..., Any], where: str) -> None:
    what = f"the hook {_name(hook)}{line_of_function(hook)} on {where}"
    if getattr(hook, "__module__", None) == "torch.autograd.graph":
        _refuse(f"register_multi_grad_hook on {where}", "it runs Python of yours on several gradients")
    with torch.no_grad(), _told_as(what):
        call = _numbered(what)
        found = hook(_ops.gradient_of(tensor, call))
        if found is None:
            _refuse_watching(what)
        _ops.hooked([tensor], [found], call)


class _Fixed(RemovableHandle):
    """The handle of a hook that has become part of the graph."""

    def remove(self) -> None:
        _refuse(f"the removal of a hook{line_of_caller()}", "a hook is part of the captured model; register none there")


class _ModuleHooks:
    """In place of torch's BackwardHook: what the full backward hooks of a module do becomes part of the trace."""

    def __init__(self, module: nn.Module, user_hooks: Sequence[Any], user_pre_hooks: Sequence[Any]) -> None:
        self._module = module
        self._hooks, self._pre_hooks = user_hooks, user_pre_hooks
        self._inputs: tuple[Any, ...] | None = None

    def setup_input_hook(self, args: Any) -> Any:
        if any(isinstance(a, Tensor) and a.requires_grad for a in args) and torch.is_grad_enabled():
            # Only what the module itself does with its inputs counts, so it gets aliases of them.
            args = self._inputs = tuple(_alias(a) for a in args)
        return args

    def setup_output_hook(self, result: Any) -> Any:
        outputs = result if isinstance(result, tuple) else (result,)
        if not torch.is_grad_enabled() or not any(isinstance(o, Tensor) and o.requires_grad for o in outputs):
            return result
        outputs = tuple(_alias(o) for o in outputs)
        with torch.no_grad():
            call = _numbered(f"a backward hook on a module {type(self._module).__name__}")
            given = changed = _stand_ins(outputs, call)
            for hook in self._pre_hooks:
                changed = self._called(hook, changed, changed)
            if self._hooks and self._inputs is None:
                _refuse_watching(self._what(self._hooks[0]))
            if self._inputs is not None and self._hooks:
                other = _numbered(self._what(self._hooks[0]))
                received = found = _stand_ins(self._inputs, other)
                for hook in self._hooks:
                    found = self._called(hook, found, found, changed)
                self._mark(self._inputs, received, found, other)
            if self._pre_hooks:
                self._mark(outputs, given, changed, call)
        return outputs if isinstance(result, tuple) else outputs[0]

    def _called(self, hook: Callable[..., Any], before: tuple[Any, ...], *gradients: Any) -> tuple[Any, ...]:
        what = self._what(hook)
        with _told_as(what):
            found = hook(self._module, *gradients)
        if found is None:
            _refuse_watching(what)
        found = found if isinstance(found, tuple | list) else (found,)
        if len(found) != len(before):
            raise CaptureError(f"{what} returns {len(found)} gradients where {len(before)} are to be returned")
        return tuple(found)

    def _what(self, hook: Callable[..., Any]) -> str:
        return f"the backward hook {_name(hook)}{line_of_function(hook)} on a module {type(self._module).__name__}"

    @staticmethod
    def _mark(values: Sequence[Any], received: Sequence[Any], found: Sequence[Any], call: int) -> None:
        kept = [i for i, gradient in enumerate(received) if gradient is not None]
        _ops.hooked([values[i] for i in kept], [found[i] for i in kept], call)


def _alias(value: Any) -> Any:
    return torch.ops.aten.alias.default(value) if isinstance(value, Tensor) else value


def _stand_ins(values: Sequence[Any], call: int) -> tuple[Tensor | None, ...]:
    return tuple(_ops.gradient_of(v, call) if isinstance(v, Tensor) and v.requires_grad else None for v in values)


def _refusal(name: str, reason: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        _refuse(f"{name}{line_of_caller()}", reason)

    return refuse


def _refuse(what: str, reason: str) -> NoReturn:
    raise CaptureError(f"{what} cannot be captured: {reason}, and providers run tensors, never your Python")


def _refuse_watching(what: str) -> NoReturn:
    _refuse(
        what, "it returns no gradient, so all it can do is run Python of yours (return the new gradient, or remove it)"
    )


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))

"""Gradient hooks while a model is exported: a hook that returns a new gradient is traced as a backward pass.

A hook that returns nothing could only run the user's Python on a provider, and a hook that runs after the accumulation
of a gradient has no place in a graph. Both are a CaptureError that names the hook.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import torch
import torch.nn.modules.module
from torch import nn
from torch.utils.hooks import RemovableHandle

from ravnest.errors import CaptureError
from ravnest.graph.capture.gradient_marks import marks, numbered, refuse, told_as
from ravnest.graph.capture.users_line import line_of_caller, line_of_function

Tensor = torch.Tensor

AFTER_ADDING: Final = "it runs your Python after the gradient is accumulated, and providers run tensor operators only"
ON_SEVERAL: Final = "it runs your Python on several gradients, and providers run tensor operators only"


def refuse_hooks(model: nn.Module) -> None:
    """CaptureError for a hook on the model that has no form in a graph; it names the parameter or module."""
    for name, parameter in model.named_parameters():
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            refuse(
                f"the post-accumulate-grad hook {_name(hook)}{line_of_function(hook)} on {name}",
                AFTER_ADDING,
            )
    modules = torch.nn.modules.module
    if modules._global_backward_hooks and not modules._global_is_full_backward_hook:
        refuse("a backward hook on all modules", "it is not a full one; use register_module_full_backward_hook")
    for name, module in model.named_modules():
        if module._backward_hooks and module._is_full_backward_hook is False:
            hook = next(iter(module._backward_hooks.values()))
            refuse(
                f"the backward hook {_name(hook)}{line_of_function(hook)} on the module {name or 'model'}",
                "register_backward_hook passes it gradients other than the module's; use register_full_backward_hook",
            )


def hooks_of_parameters(model: nn.Module) -> list[tuple[str, list[Callable[..., Any]]]]:
    """The hooks on trained parameters by the parameter's name, in the order in which they run."""
    found = []
    for name, parameter in model.named_parameters():
        hooks = list((getattr(parameter, "_backward_hooks", None) or {}).values())
        if hooks and parameter.requires_grad:
            found.append((name, hooks))
    return found


def trace_parameter_hooks(model: nn.Module, hooks: Sequence[tuple[str, list[Callable[..., Any]]]]) -> None:
    """Trace the hooks on parameters. A traced forward has to call this first."""
    for name, each in hooks:
        for hook in each:
            _trace_hook(model.get_parameter(name), hook, f"the parameter {name}")


def traced_register_hook(tensor: Tensor, hook: Callable[..., Any]) -> RemovableHandle:
    """Replacement for `Tensor.register_hook`."""
    if not tensor.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    if tensor.is_leaf:
        refuse(
            f"the hook {_name(hook)} on a parameter{line_of_caller()}",
            "each forward registers it again; register it once, when the model is constructed",
        )
    _trace_hook(tensor, hook, "a tensor")
    return _Fixed(OrderedDict())


def _trace_hook(tensor: Tensor, hook: Callable[..., Any], where: str) -> None:
    what = f"the hook {_name(hook)}{line_of_function(hook)} on {where}"
    if getattr(hook, "__module__", None) == "torch.autograd.graph":
        refuse(f"register_multi_grad_hook on {where}", ON_SEVERAL)
    with torch.no_grad(), told_as(what):
        call = numbered(what)
        found = hook(marks.gradient_of(tensor, call))
        if found is None:
            _refuse_watching(what)
        marks.hooked([tensor], [found], call)


class _Fixed(RemovableHandle):
    """The handle of a hook that has become part of the graph."""

    def remove(self) -> None:
        refuse(f"the removal of a hook{line_of_caller()}", "the hook is part of the captured model; do not remove it")


class TracedModuleHooks:
    """Replacement for torch's BackwardHook that traces the full backward hooks of a module."""

    def __init__(self, module: nn.Module, user_hooks: Sequence[Any], user_pre_hooks: Sequence[Any]) -> None:
        self._module = module
        self._hooks, self._pre_hooks = user_hooks, user_pre_hooks
        self._inputs: tuple[Any, ...] | None = None

    def setup_input_hook(self, args: Any) -> Any:
        if any(isinstance(a, Tensor) and a.requires_grad for a in args) and torch.is_grad_enabled():
            # The module gets aliases of its inputs, so that only its own use of them counts.
            args = self._inputs = tuple(_alias(a) for a in args)
        return args

    def setup_output_hook(self, result: Any) -> Any:
        outputs = result if isinstance(result, tuple) else (result,)
        if not torch.is_grad_enabled() or not any(isinstance(o, Tensor) and o.requires_grad for o in outputs):
            return result
        outputs = tuple(_alias(o) for o in outputs)
        with torch.no_grad():
            call = numbered(f"a backward hook on a module {type(self._module).__name__}")
            given = changed = _stand_ins(outputs, call)
            for hook in self._pre_hooks:
                changed = self._called(hook, changed, changed)
            if self._hooks and self._inputs is None:
                _refuse_watching(self._what(self._hooks[0]))
            if self._inputs is not None and self._hooks:
                other = numbered(self._what(self._hooks[0]))
                received = found = _stand_ins(self._inputs, other)
                for hook in self._hooks:
                    found = self._called(hook, found, found, changed)
                self._mark(self._inputs, received, found, other)
            if self._pre_hooks:
                self._mark(outputs, given, changed, call)
        return outputs if isinstance(result, tuple) else outputs[0]

    def _called(self, hook: Callable[..., Any], before: tuple[Any, ...], *gradients: Any) -> tuple[Any, ...]:
        what = self._what(hook)
        with told_as(what):
            found = hook(self._module, *gradients)
        if found is None:
            _refuse_watching(what)
        found = found if isinstance(found, tuple | list) else (found,)
        if len(found) != len(before):
            raise CaptureError(f"{what} returns {len(found)} gradients instead of {len(before)}")
        return tuple(found)

    def _what(self, hook: Callable[..., Any]) -> str:
        return f"the backward hook {_name(hook)}{line_of_function(hook)} on a module {type(self._module).__name__}"

    @staticmethod
    def _mark(values: Sequence[Any], received: Sequence[Any], found: Sequence[Any], call: int) -> None:
        kept = [i for i, gradient in enumerate(received) if gradient is not None]
        marks.hooked([values[i] for i in kept], [found[i] for i in kept], call)


def _alias(value: Any) -> Any:
    return torch.ops.aten.alias.default(value) if isinstance(value, Tensor) else value


def _stand_ins(values: Sequence[Any], call: int) -> tuple[Tensor | None, ...]:
    return tuple(marks.gradient_of(v, call) if isinstance(v, Tensor) and v.requires_grad else None for v in values)


def refusal(name: str, reason: str) -> Callable[..., NoReturn]:
    """Replacement for a function that registers hooks without a form in a graph."""

    def refused(*_: Any, **__: Any) -> NoReturn:
        refuse(f"{name}{line_of_caller()}", reason)

    return refused


def _refuse_watching(what: str) -> NoReturn:
    refuse(
        what,
        "it returns no gradient, so it can only run your Python, and providers run tensor operators only; return the "
        "new gradient, or remove the hook",
    )


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))

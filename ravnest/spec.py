"""Optimizers and schedules as data: the name of a class of torch.optim, and plain arguments.

A provider receives a specification over the network and builds the optimizer from it, so both ends check the same
rules: the name is one of torch.optim's own classes, every argument is a plain value, and torch itself accepts them on a
tiny parameter. Nothing else of the specification reaches a constructor.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from ravnest.errors import GraphError
from ravnest.safe_json import read_json

Plain = bool | int | float | str | None | tuple[float, ...]
"""Type of an argument: a number, a flag, a string, None, or a tuple of numbers."""

MadeT = TypeVar("MadeT")


@dataclass(frozen=True)
class _Spec:
    name: str
    arguments: Mapping[str, Plain] = field(default_factory=dict)

    def to_json(self) -> str:
        """The specification as JSON text, which `from_json` reads back equal."""
        return json.dumps({"name": self.name, "arguments": dict(self.arguments)}, allow_nan=False)


class OptimizerSpec(_Spec):
    """A torch.optim optimizer by name, with its keyword arguments."""

    def build(self, parameters: Iterable[torch.Tensor]) -> Optimizer:
        """Builds the optimizer for `parameters`, which may be empty; raises GraphError if torch refuses it."""
        # As a parameter group: torch refuses an empty list, and a stage may have nothing to train.
        return _built("optimizer", self, [{"params": list(parameters)}], Optimizer)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parses the output of `to_json`; raises GraphError for anything that is not an allowed optimizer."""
        spec = cls(*_from_json("optimizer", text))
        _raise_refusal("optimizer", optimizer_refusal(spec))
        return spec


class ScheduleSpec(_Spec):
    """A torch.optim.lr_scheduler class by name, with its keyword arguments. It is stepped once per update."""

    def build(self, optimizer: Optimizer) -> LRScheduler:
        """Builds the schedule for `optimizer`; raises GraphError if torch refuses it."""
        return _built("schedule", self, optimizer, LRScheduler)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parses the output of `to_json`; raises GraphError for anything that is not an allowed schedule.

        Whether the arguments fit the optimizer is checked only by `build`.
        """
        spec = cls(*_from_json("schedule", text))
        _raise_refusal("schedule", _refused_name("schedule", spec.name))
        return spec


def optimizer_refusal(spec: OptimizerSpec, dimensions: Sequence[int] = (2,)) -> str | None:
    """Why `spec` is refused for parameters with these numbers of dimensions, or None if it is valid.

    The check builds the optimizer and makes a step, because torch refuses some arguments only then.
    """
    return _refused_name("optimizer", spec.name) or _refused_in_practice(spec, None, dimensions)


def schedule_refusal(spec: ScheduleSpec, optimizer: OptimizerSpec) -> str | None:
    """Why `spec` is refused for `optimizer`, which is itself valid; None if it is valid."""
    return _refused_name("schedule", spec.name) or _refused_in_practice(optimizer, spec, (2,))


def split_partial(kind: str, given: object) -> tuple[str, dict[str, Plain]] | str:
    """The name and plain arguments of a torch.optim class or a functools.partial of one.

    `kind` is "optimizer" or "schedule". If the value is neither, the result is a str with the reason.
    """
    example = _EXAMPLES[kind]
    positional: tuple[object, ...] = ()
    keywords: Mapping[str, object] = {}
    cls = given
    if isinstance(given, partial):
        cls, positional, keywords = given.func, given.args, given.keywords
    if isinstance(cls, Optimizer | LRScheduler):
        return (
            f"is an instance, which is bound to parameters that no provider has: pass {example}, "
            "a class and its arguments"
        )
    if not isinstance(cls, type):
        return f"is {_described(given)}, not a class of {_HOMES[kind]}: pass {example}"
    refusal = _refused_name(kind, cls.__name__)
    if refusal is not None:
        return refusal
    if cls is not _class(kind, cls.__name__):
        return (
            f"{cls.__module__}.{cls.__qualname__} is not {_HOMES[kind]}.{cls.__name__}: providers never run "
            f"the requester's Python, pass one of {_HOMES[kind]}'s own classes"
        )
    if positional:
        return f"{cls.__name__} has positional arguments: give them by keyword, as in {example}"
    arguments: dict[str, Plain] = {}
    for key, value in keywords.items():
        plain = _as_plain(value)
        if isinstance(plain, _NotPlain):
            return (
                f"{cls.__name__}'s argument {key} is {_described(value)}: give a finite number, True, False, "
                "None, a string or a list of numbers, because it is sent to providers as data"
            )
        arguments[key] = plain
    return cls.__name__, arguments


class _NotPlain:
    """Result of `_as_plain` for a value that cannot be sent; None is a value that can."""


_HOMES = {"optimizer": "torch.optim", "schedule": "torch.optim.lr_scheduler"}

_EXAMPLES = {
    "optimizer": "partial(torch.optim.AdamW, lr=1e-3)",
    "schedule": "partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=1000)",
}

_FUNCTION = "needs a Python function, which providers never run: use MultiStepLR, LinearLR or OneCycleLR"
_OTHERS = "combines other schedules: use one schedule that has both phases, such as OneCycleLR"

_REASONS = {
    "LBFGS": "evaluates the model several times per update, which a pipeline cannot do: use AdamW or SGD",
    "SparseAdam": "needs sparse gradients, and stages have dense ones: use Adam or AdamW",
    "LambdaLR": _FUNCTION,
    "MultiplicativeLR": _FUNCTION,
    "SequentialLR": _OTHERS,
    "ChainedScheduler": _OTHERS,
    "ReduceLROnPlateau": "waits for an evaluation's result, which a stage does not have at its updates: "
    "use CosineAnnealingLR or MultiStepLR",
    "SWALR": "belongs to weight averaging, which stages do not do: use CosineAnnealingLR or LinearLR",
}

# Exceptions that torch raises for invalid arguments; it has no common one.
_CONSTRUCTION_ERRORS = (TypeError, ValueError, RuntimeError, LookupError, ArithmeticError, AssertionError)


def _registry(kind: str) -> dict[str, type]:
    module, base = (torch.optim, Optimizer) if kind == "optimizer" else (lr_scheduler, LRScheduler)
    found: dict[str, type] = {}
    for name, value in vars(module).items():
        if isinstance(value, type) and issubclass(value, base) and value is not base:
            public = not name.startswith("_") and name == value.__name__
            if public and name not in _REASONS:
                found[name] = value
    return found


def _class(kind: str, name: str) -> Callable[..., object]:
    return _registry(kind)[name]


def _refused_name(kind: str, name: str) -> str | None:
    if name in _REASONS:
        return f"{name} {_REASONS[name]}"
    names = _registry(kind)
    if name not in names:
        return f"{name[:80]} is not in {_HOMES[kind]}: use one of {', '.join(sorted(names))}"
    return None


def _built(kind: str, spec: _Spec, over: object, base: type[MadeT]) -> MadeT:
    _raise_refusal(kind, _refused_name(kind, spec.name))
    try:
        made = _class(kind, spec.name)(over, **spec.arguments)
    except _CONSTRUCTION_ERRORS as error:
        raise GraphError(f"{kind} {spec.name} cannot be built: {str(error)[:300]}") from error
    assert isinstance(made, base)
    return made


def _refused_in_practice(
    optimizer: OptimizerSpec, schedule: ScheduleSpec | None, dimensions: Sequence[int]
) -> str | None:
    at_fault: OptimizerSpec | ScheduleSpec = schedule or optimizer
    parameters = [nn.Parameter(torch.zeros((1,) * count)) for count in dimensions]
    try:
        made = _class("optimizer", optimizer.name)(parameters, **optimizer.arguments)
        assert isinstance(made, Optimizer)
        stepper: object = None
        if schedule is not None:
            stepper = _class("schedule", schedule.name)(made, **schedule.arguments)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        made.step()
        if isinstance(stepper, LRScheduler):
            stepper.step()
    except _CONSTRUCTION_ERRORS as error:
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        given = ", ".join(f"{key}={value!r}" for key, value in at_fault.arguments.items())
        return f"{at_fault.name}({given[:300]}) is refused by torch ({said[:300]}): correct its arguments"
    return None


def _as_plain(value: object) -> Plain | _NotPlain:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value if len(value) <= _MAX_CHARACTERS else _NotPlain()
    if isinstance(value, int | float):
        return value if _is_ordinary(value) else _NotPlain()
    if isinstance(value, list | tuple):
        numbers = [entry for entry in value if isinstance(entry, int | float) and _is_ordinary(entry)]
        return tuple(numbers) if len(numbers) == len(value) else _NotPlain()
    return _NotPlain()


_MAX_CHARACTERS = 256
"""Maximum length of a string argument and of an argument's name; those of torch have a dozen or two."""


def _is_ordinary(number: float) -> bool:
    # JSON can hold an int of any size, and arithmetic on a huge one would take a very long time.
    return abs(number) < 2**63 if isinstance(number, int) else math.isfinite(number)


def _described(value: object) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if callable(value) and not isinstance(value, type):
        return f"the function {getattr(value, '__name__', type(value).__name__)}"
    return f"a {type(value).__name__}"


def _from_json(kind: str, text: str | bytes) -> tuple[str, dict[str, Plain]]:
    try:
        data: Any = read_json(text)
    except ValueError as error:
        raise GraphError(f"{kind} specification is not JSON: {error}") from error
    if not isinstance(data, dict) or data.keys() != {"name", "arguments"}:
        raise GraphError(f"{kind} specification must hold exactly a name and arguments")
    name, given = data["name"], data["arguments"]
    if not isinstance(name, str) or not isinstance(given, dict):
        raise GraphError(f"{kind} specification must hold a name and a table of arguments")
    arguments: dict[str, Plain] = {}
    for key, value in given.items():
        plain = _as_plain(value)
        if len(key) > _MAX_CHARACTERS or isinstance(plain, _NotPlain):
            raise GraphError(f"{kind} specification: argument {key[:80]!r} is not a plain value")
        arguments[key] = plain
    return name, arguments


def _raise_refusal(kind: str, refusal: str | None) -> None:
    if refusal is not None:
        raise GraphError(f"{kind} specification: {refusal}")

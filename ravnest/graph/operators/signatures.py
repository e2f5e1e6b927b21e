"""Check of a node's arguments against the operator's signature when a graph is read.

torch converts arguments implicitly: a plain number to an element type, text to a device. Kernels would then run with
values that no Python code can pass. So each argument must have the type that the schema names, and a number must be in
the argument's range. Otherwise a GraphError names the node, the argument and the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from ravnest.errors import GraphError
from ravnest.graph.operators import enumerations

MAX_SIZE: Final = 1 << 40
"""Maximum of a size or of a number of repetitions."""
MAX_WINDOW: Final = 1 << 24
"""Maximum of a kernel size, stride, padding, dilation or shift: torch multiplies them in 64 bits."""
MAX_LAYERS: Final = 4096
MAX_DIMENSIONS: Final = 64
_INT64: Final = 1 << 63

_SIZES: Final = frozenset(
    """
    size sizes shape output_size repeats normalized_shape num_classes dims_repeat minlength bins steps n m row col
    window_length split_size split_sizes chunks sections k indices
    """.split()
)
_WINDOWS: Final = frozenset(
    """
    kernel_size stride padding dilation output_padding pad groups num_groups upscale_factor downscale_factor step
    divisor_override offset diagonal shifts decimals
    """.split()
)
_DIMENSIONS: Final = frozenset(
    """
    dim dims dim0 dim1 dim2 axis0 axis1 start_dim end_dim dimension source destination dims_self dims_other
    """.split()
)
_LONG_LISTS: Final = frozenset({"input_lengths", "target_lengths", "split_size", "split_sizes", "indices", "params"})
"""Lists with an entry for each sample, part or layer. Every other list of numbers has one for each dimension."""
MAX_LONG_LIST: Final = 100_000


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of an operator, as its schema defines it."""

    name: str
    kind: str
    """Tensor, number, int, float, bool, str, ScalarType, Layout, MemoryFormat, Device or Generator."""
    optional: bool
    is_list: bool
    entries_optional: bool
    """Whether an entry of a list may be None."""
    spreads: bool
    """Whether one number may stand for a list of equal ones."""
    required: bool
    positional: bool
    minimum: int
    maximum: int
    """Bounds of an integer, both inclusive."""


@cache
def parameters_of(overload: Callable[..., Any]) -> tuple[Parameter, ...]:
    """The arguments that the operator takes, in order."""
    schema = overload._schema  # type: ignore[attr-defined]
    name = schema.name.removeprefix("aten::")
    return tuple(_parameter(name, argument) for argument in schema.arguments)


def check_arguments(
    node_name: str, op: str, overload: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, forms: "Forms"
) -> None:
    """GraphError unless the arguments fit the signature of the operator."""
    short_name = op.split(".")[1]
    parameters = parameters_of(overload)
    places = [p for p in parameters if p.positional]
    if len(args) > len(places):
        raise GraphError(f"node {node_name!r} gives {op} {len(args)} positional arguments, but it takes {len(places)}")
    given = dict(zip((p.name for p in places), args, strict=False))
    for keyword, value in kwargs.items():
        if keyword in given:
            raise GraphError(f"node {node_name!r} gives {op} the argument {keyword!r} twice")
        given[keyword] = value
    for parameter in parameters:
        if parameter.name not in given:
            if parameter.required:
                raise GraphError(f"node {node_name!r} gives {op} no argument {parameter.name!r}")
            continue
        reason = _misfit(short_name, parameter, given.pop(parameter.name), forms)
        if reason:
            raise GraphError(f"node {node_name!r} gives {op} as {parameter.name!r} {reason}")
    for keyword in given:
        raise GraphError(f"node {node_name!r} gives {op} the argument {keyword!r}, which it does not have")


@dataclass(frozen=True, slots=True)
class Forms:
    """The types by which a graph represents arguments that are not plain values."""

    reference: type
    device: type


def _misfit(short_name: str, parameter: Parameter, value: Any, forms: Forms) -> str:
    """Why the value is invalid; empty if it is valid."""
    if value is None:
        # torch.export writes None for an argument that the model left at its default.
        return "" if parameter.optional or parameter.kind == "Generator" else "nothing, but it is required"
    if parameter.kind == "Generator":
        return "a generator, but a stage uses its own"
    if parameter.name == "pin_memory":
        return "" if value is False else "true, but the stage itself decides about pinned memory"
    if isinstance(value, forms.reference):
        known = ("Tensor", "number", "int", "float", "bool")
        return "" if parameter.kind in known else f"a computed value; it must be a fixed {_words(parameter)}"
    if not parameter.is_list:
        return _entry_misfit(short_name, parameter, value, forms)
    if not isinstance(value, tuple):
        return _entry_misfit(short_name, parameter, value, forms) if parameter.spreads else "no list"
    maximum = MAX_LONG_LIST if parameter.name in _LONG_LISTS or parameter.kind == "Tensor" else MAX_DIMENSIONS
    if len(value) > maximum:
        return f"a list of {len(value)} entries; it takes at most {maximum}"
    for entry in value:
        if isinstance(entry, forms.reference):
            continue
        if entry is None:
            if not parameter.entries_optional:
                return "a list with a missing entry"
            continue
        reason = _entry_misfit(short_name, parameter, entry, forms)
        if reason:
            return f"a list that contains {reason}"
    return ""


def _entry_misfit(short_name: str, parameter: Parameter, value: Any, forms: Forms) -> str:
    kind = parameter.kind
    if kind in ("Tensor", "number"):
        fits = isinstance(value, bool | int | float) and not (kind == "Tensor" and parameter.is_list)
        if fits and kind == "Tensor" and parameter.name == "self":
            fits = False
        if fits and isinstance(value, int) and not -_INT64 <= value < _INT64:
            return f"{_told(value)}, which has more than 64 bits"
        return "" if fits else f"{_told(value)}, which is no {_words(parameter)}"
    if kind == "Device":
        # Any other value would name a device of the provider's machine.
        return "" if isinstance(value, forms.device) else f"{_told(value)}, which names a device; the stage chooses it"
    expected = _TYPES[kind]
    fits = isinstance(value, expected) and (kind == "bool" or not isinstance(value, bool))
    if not fits:
        return f"{_told(value)}, which is no {_words(parameter)}"
    if kind == "Layout" and value is not torch.strided:
        return f"{_told(value)}; the only layout is strided"
    if kind == "int" and not parameter.minimum <= value <= parameter.maximum:
        return f"{_told(value)}; it takes {parameter.minimum} to {parameter.maximum}"
    if kind in ("int", "str") and not enumerations.is_known(short_name, parameter.name, value):
        return f"{_told(value)}, which the operator does not know"
    return ""


_TYPES: Final[dict[str, Any]] = {
    "int": int,
    "float": float | int,
    "bool": bool,
    "str": str,
    "ScalarType": torch.dtype,
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
}
_WORDS: Final = {
    "Tensor": "tensor",
    "number": "number",
    "int": "integer",
    "float": "number",
    "bool": "true or false",
    "str": "text",
    "ScalarType": "element type",
    "Layout": "layout",
    "MemoryFormat": "memory format",
    "Device": "device",
    "Generator": "generator",
}


def _words(parameter: Parameter) -> str:
    return _WORDS[parameter.kind]


def _told(value: Any) -> str:
    return repr(value)[:60] if isinstance(value, bool | int | float | str) else f"a {type(value).__name__}"


def _parameter(operator: str, argument: Any) -> Parameter:
    kind, optional, is_list, entries_optional = str(argument.real_type), False, False, False
    if kind.startswith("Optional["):
        kind, optional = kind[9:-1], True
    if kind.startswith("List["):
        kind, is_list = kind[5:-1], True
    if kind.startswith("Optional["):
        kind, entries_optional = kind[9:-1], True
    if kind not in _WORDS:
        raise GraphError(f"operator {operator!r} takes a {kind}, which a portable graph cannot give")
    minimum, maximum = _range(operator, argument.name) if kind == "int" else (0, 0)
    return Parameter(
        name=argument.name,
        kind=kind,
        optional=optional,
        is_list=is_list,
        entries_optional=entries_optional,
        spreads=is_list and kind in ("int", "float"),
        required=not argument.has_default_value(),
        positional=not argument.kwarg_only,
        minimum=minimum,
        maximum=maximum,
    )


def _range(operator: str, name: str) -> tuple[int, int]:
    if operator == "tile" and name == "dims":
        return 0, MAX_SIZE
    if name in _DIMENSIONS:
        return -MAX_DIMENSIONS, MAX_DIMENSIONS - 1
    if name == "num_layers":
        return 1, MAX_LAYERS
    if name in _WINDOWS:
        return -MAX_WINDOW, MAX_WINDOW
    if name in _SIZES:
        return -MAX_SIZE, MAX_SIZE
    return -_INT64, _INT64 - 1

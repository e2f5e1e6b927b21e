"""Check of arguments that the running graph computed: a tensor for a tensor, a number within its range."""

from typing import Any, Final

import torch

from ravnest.graph.operators.calls import Call
from ravnest.graph.operators.signatures import Parameter

_NUMBERS: Final = {"int": (int,), "float": (float, int), "number": (bool, int, float), "bool": (bool,)}


def misfit(call: Call) -> str:
    """The first invalid argument of the call, in words; empty if all are valid."""
    for parameter, value in call.values():
        if value is None or parameter.kind not in ("Tensor", *_NUMBERS):
            continue
        entries = value if parameter.is_list and isinstance(value, list | tuple) else (value,)
        if parameter.is_list and parameter.kind == "Tensor" and entries is not value:
            return f"{parameter.name!r} is not a list of tensors"
        for entry in entries:
            reason = _entry_misfit(parameter, entry)
            if reason:
                return f"{parameter.name!r} is {reason}"
    return ""


def _entry_misfit(parameter: Parameter, entry: Any) -> str:
    if parameter.kind == "Tensor":
        if entry is None or isinstance(entry, torch.Tensor | bool | int | float):
            return ""
        return f"a {type(entry).__name__} instead of a tensor"
    if type(entry) not in _NUMBERS[parameter.kind]:
        return f"a {type(entry).__name__} instead of a plain number"
    if parameter.kind == "int" and not parameter.minimum <= entry <= parameter.maximum:
        return f"{entry}; it takes {parameter.minimum} to {parameter.maximum}"
    return ""

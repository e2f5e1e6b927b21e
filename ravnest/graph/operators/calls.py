"""Arguments of one operator call by name, with the operator's defaults for arguments that are not given."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ravnest.graph.operators.signatures import Parameter


class Call:
    """One call of an operator: its arguments by name."""

    __slots__ = ("_given", "_parameters", "op", "short_name")

    def __init__(
        self, op: str, parameters: Sequence[Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.op = op
        self.short_name = op.split(".")[1]
        self._parameters = parameters
        self._given = dict(zip((p.name for p in parameters if p.positional), args, strict=False)) | dict(kwargs)

    def __getitem__(self, name: str) -> Any:
        return self._given.get(name)

    def first(self) -> Any:
        """The first argument, which for most operators is the main input."""
        return self._given.get(self._parameters[0].name)

    def number(self, name: str, default: int) -> int:
        value = self._given.get(name)
        return default if value is None else int(value)

    def numbers(self, name: str, count: int, default: int) -> list[int]:
        """A list with an entry for each dimension. One number stands for all dimensions, and an empty list for the
        default."""
        value = self._given.get(name)
        if value is None or (isinstance(value, list | tuple) and not value):
            return [default] * count
        if isinstance(value, int):
            return [value] * count
        return [int(v) for v in value] * (count if len(value) == 1 else 1)

    def tensors(self) -> Iterator[torch.Tensor]:
        for value in self._given.values():
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, list | tuple):
                for entry in value:
                    if isinstance(entry, torch.Tensor):
                        yield entry

    def values(self) -> Iterator[tuple[Parameter, Any]]:
        """The arguments that are given, each with its parameter of the signature."""
        for parameter in self._parameters:
            if parameter.name in self._given:
                yield parameter, self._given[parameter.name]

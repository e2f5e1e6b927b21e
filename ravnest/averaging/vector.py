"""Layout of a ring's tensors in one flat float32 vector: the coded section, then the plain section.

The coded section holds the parameters and travels in the codec of the run. The plain section holds float buffers and
moments of the inner optimizer, and always travels as float32.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a ring."""

    name: str
    shape: tuple[int, ...]

    @property
    def values(self) -> int:
        return math.prod(self.shape)


class RingVector:
    """The order of a ring's tensors, which is the same in every cluster for any device and element type."""

    def __init__(self, parameters: Sequence[Entry], plain: Sequence[Entry] = ()) -> None:
        self.parameters = tuple(parameters)
        self.plain = tuple(plain)
        self.coded_values = sum(entry.values for entry in self.parameters)
        self.values = self.coded_values + sum(entry.values for entry in self.plain)
        names = [entry.name for entry in (*self.parameters, *self.plain)]
        assert len(set(names)) == len(names), "a tensor is in a ring only once"

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The tensors copied into one new vector on the CPU; they may be on any device and of any float type."""
        vector = torch.empty(self.values)
        for name, view in self.views(vector).items():
            tensor = tensors[name].detach()
            assert tensor.shape == view.shape, f"{name} has the shape {tuple(tensor.shape)}, not {tuple(view.shape)}"
            view.copy_(tensor)
        return vector

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Every tensor by name and in its shape, over the memory of `vector`."""
        assert vector.numel() == self.values
        coded = self.parameter_views(vector[: self.coded_values])
        return {**coded, **self.plain_views(vector[self.coded_values :])}

    def parameter_views(self, coded: Tensor) -> dict[str, Tensor]:
        """The parameters by name and in their shape, over the memory of the coded section alone."""
        return _views(self.parameters, coded)

    def plain_views(self, plain: Tensor) -> dict[str, Tensor]:
        """The plain tensors by name and in their shape, over the memory of the plain section alone."""
        return _views(self.plain, plain)


def _views(entries: Sequence[Entry], section: Tensor) -> dict[str, Tensor]:
    views: dict[str, Tensor] = {}
    start = 0
    for entry in entries:
        views[entry.name] = section[start : start + entry.values].view(entry.shape)
        start += entry.values
    return views

"""Saved tensors of a forward that are read as the current weights when the backward runs.

Autograd saves for the backward the tensors that an operator read, and a weight among them is saved without a copy, by
itself or as a view. A forward with predicted weights would thereby keep a copy of all weights alive until its backward.
Within `CurrentWeights.saving` autograd keeps only the position of such a tensor in its weight, and the backward reads
the same position of the current weights. Other tensors are kept as usual, with autograd's check that they were not
changed in place.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class _Position:
    """A view of a weight; the offset counts elements from the weight's first one."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor that is kept, and the number of writes in place that it had seen by then."""

    tensor: torch.Tensor
    writes: int


class CurrentWeights:
    """The weights of one forward, and the current weights that its backward reads in their place."""

    def __init__(
        self, used: Mapping[str, torch.Tensor], current: Callable[[], Mapping[str, torch.Tensor]]
    ) -> None:
        """`current` returns weights of the same names and layouts as `used`, at any time."""
        self._types = {name: weight.dtype for name, weight in used.items()}
        self._spans = sorted((w.data_ptr(), w.data_ptr() + w.nbytes, name) for name, w in used.items() if w.nbytes)
        self._starts = [start for start, _, _ in self._spans]
        self._current = current

    def saving(self) -> AbstractContextManager[object]:
        """Context of the forward. Its backward raises RuntimeError if another saved tensor was changed in place."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def replace(self, tensors: Iterable[torch.Tensor]) -> None:
        """Makes those of the tensors that share memory with a used weight share it with the current one instead."""
        for tensor in tensors:
            position = self._position(tensor)
            if position is not None:
                tensor.data = self._at(position)

    def _pack(self, tensor: torch.Tensor) -> _Position | _Kept:
        return self._position(tensor) or _Kept(tensor, tensor._version)

    def _unpack(self, packed: _Position | _Kept) -> torch.Tensor:
        if isinstance(packed, _Position):
            return self._at(packed)
        if packed.tensor._version != packed.writes:
            raise RuntimeError("a value that the backward needs was changed in place after its forward")
        return packed.tensor

    def _position(self, tensor: torch.Tensor) -> _Position | None:
        if tensor.layout is not torch.strided or not tensor.numel():
            return None
        address = tensor.data_ptr()
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        start, end, name = self._spans[index]
        if address >= end or tensor.dtype is not self._types[name]:
            return None
        return _Position(name, tuple(tensor.shape), tensor.stride(), (address - start) // tensor.element_size())

    def _at(self, position: _Position) -> torch.Tensor:
        weight = self._current()[position.name].detach()
        return weight.as_strided(position.size, position.stride, weight.storage_offset() + position.offset)

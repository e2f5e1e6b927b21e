"""Weights that autograd saves in a forward, without the memory of the weights that the forward used.

Autograd saves for the backward the tensors that an operator read, and a weight among them is saved without a copy, by
itself or as a view. So a forward keeps all its weights alive until its backward. Within `SavedWeights.saving` autograd
keeps only the position of such a tensor in its weight, and the backward gets the tensor at this position of another
weight: the current one (`CurrentWeights`), or the forward's own, which was kept in 8 bits (`CodedWeights`). Weights
that no operator saves, such as an embedding's, are not kept at all. Other tensors are kept as usual, with autograd's
check that they were not changed in place.

Computed tensors are no views of a weight and are kept as usual: in mixed precision, the 16-bit copies of weights.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from ravnest.codecs.codec import codec_named

CODEC: Final = codec_named("int8")
"""With a scale for every 256 values: the error is 0.4 % of the largest of them at most."""
MIN_CODED: Final = 4096
"""Weights with fewer values are kept in float32."""


class KeptWeights(Protocol):
    """The weights that the backward of a forward gets."""

    def keep(self, name: str) -> None:
        """Called in the forward for a weight that the backward will need."""

    def weight(self, name: str) -> torch.Tensor:
        """Called in the backward; has the shape and the strides of the weight that the forward used."""


class CurrentWeights:
    """The weights that are current when the backward runs."""

    def __init__(self, current: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._current = current

    def keep(self, name: str) -> None:
        pass

    def weight(self, name: str) -> torch.Tensor:
        return self._current()[name].detach()


class CodedWeights:
    """The weights of one version as far as its backwards need them, in 8 bits from `settle` on; several forwards may
    share it."""

    def __init__(self, used: Mapping[str, torch.Tensor]) -> None:
        """`used` must not change before `settle`."""
        self._used: Mapping[str, torch.Tensor] = used
        self._needed: set[str] = set()
        self._coded: dict[str, tuple[torch.Tensor, torch.Size]] = {}
        self._whole: dict[str, torch.Tensor] = {}

    def keep(self, name: str) -> None:
        self._needed.add(name)

    def keep_all(self) -> None:
        """Keeps every weight, for a forward that is to be recomputed."""
        self._needed.update(self._used)

    def settle(self) -> None:
        """Copies the weights that are needed, so that `used` may change or be freed. No forward may follow."""
        for name in self._needed & self._used.keys():
            weight = self._used[name].detach()
            if weight.dtype is torch.float32 and weight.numel() >= MIN_CODED and weight.is_contiguous():
                self._coded[name] = CODEC.encode(weight.view(-1)), weight.shape
            else:
                self._whole[name] = weight.clone()
        self._used = {}

    def weight(self, name: str) -> torch.Tensor:
        if name in self._coded:
            data, shape = self._coded[name]
            return CODEC.decode(data, shape.numel()).view(shape)
        return self._whole[name] if name in self._whole else self._used[name]

    def leaves(self) -> dict[str, torch.Tensor]:
        """The weights that are needed, as leaves for a forward and its backward."""
        return {name: self.weight(name).detach().requires_grad_() for name in self._needed}


@dataclass(frozen=True, slots=True)
class _Position:
    """A view of a weight; the offset counts elements from the weight's first one."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor that is kept, and the number of writes in place that it had seen by then."""

    tensor: torch.Tensor
    writes: int


class SavedWeights:
    """The weights of one forward, and those that its backward gets in their place."""

    def __init__(self, used: Mapping[str, torch.Tensor], kept: KeptWeights) -> None:
        self._types = {name: weight.dtype for name, weight in used.items()}
        self._spans = sorted((w.data_ptr(), w.data_ptr() + w.nbytes, name) for name, w in used.items() if w.nbytes)
        self._starts = [start for start, _, _ in self._spans]
        self._kept = kept

    def saving(self) -> AbstractContextManager[object]:
        """Context of the forward. Its backward raises RuntimeError if another saved tensor was changed in place."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def release(self, tensors: Iterable[torch.Tensor], instead: Mapping[str, torch.Tensor]) -> None:
        """Makes those of the tensors that share memory with a used weight share it with the weight in `instead`."""
        for tensor in tensors:
            position = self._position(tensor)
            if position is not None:
                tensor.data = _at(instead[position.name], position)

    def _pack(self, tensor: torch.Tensor) -> _Position | _Tensor:
        position = self._position(tensor)
        if position is None:
            return _Tensor(tensor, tensor._version)
        self._kept.keep(position.name)
        return position

    def _unpack(self, packed: _Position | _Tensor) -> torch.Tensor:
        if isinstance(packed, _Position):
            return _at(self._kept.weight(packed.name), packed)
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


def _at(weight: torch.Tensor, position: _Position) -> torch.Tensor:
    weight = weight.detach()
    return weight.as_strided(position.size, position.stride, weight.storage_offset() + position.offset)

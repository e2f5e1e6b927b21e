"""Conversion of the requester's batches to named tensors and back.

A batch is `(inputs, targets)`, each a tensor, a tuple or list of tensors, or a dict of tensors. The model is called as
`model(x)`, `model(*inputs)` or `model(**inputs)`. The first batch determines the structure; a later batch with another
structure, shape or dtype is a JobError.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ravnest.errors import JobError
from ravnest.graph.portable import ValueSpec
from ravnest.graph.sizes import misfit, sizes_of

_SHAPE_FIX = "make every item a tensor, or a tuple, list or dict of tensors"


@dataclass(frozen=True, slots=True)
class Structure:
    """Structure of a batch. Inputs and targets are each 'tensor', a number of items, or the keys of a dict."""

    inputs: str | int | tuple[str, ...]
    targets: str | int | tuple[str, ...]

    @classmethod
    def of(cls, batch: Any) -> "Structure":
        inputs, targets = _pair(batch)
        return cls(_layout(inputs, "inputs"), _layout(targets, "targets"))

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each tensor in the graph, inputs first."""
        return (*_names("inputs", self.inputs), *_names("targets", self.targets))

    def flatten(self, batch: Any) -> dict[str, torch.Tensor]:
        """The batch's tensors by name; JobError if its structure differs from that of the first batch."""
        inputs, targets = _pair(batch)
        return {**_flatten("inputs", self.inputs, inputs), **_flatten("targets", self.targets, targets)}

    def unflatten(self, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, Any]:
        count = len(_names("inputs", self.inputs))
        return _unflatten(self.inputs, tensors[:count]), _unflatten(self.targets, tensors[count:])

    def call(self, model: Any, inputs: Any) -> Any:
        """Call the model with inputs of this structure."""
        if self.inputs == "tensor":
            return model(inputs)
        return model(*inputs) if isinstance(self.inputs, int) else model(**inputs)


def samples_in(tensors: Mapping[str, torch.Tensor]) -> int:
    """The number of samples in a batch: the first dimension of its first tensor that has dimensions."""
    for tensor in tensors.values():
        if tensor.dim():
            return int(tensor.shape[0])
    return 1


def check_shapes(tensors: Mapping[str, torch.Tensor], specs: tuple[ValueSpec, ...], where: str) -> None:
    """JobError if a batch does not fit the captured graph. The error names the tensor, both shapes and the fix."""
    free: dict[str, tuple[str, int]] = {}
    for spec in specs:
        tensor = tensors[spec.name]
        fits = len(spec.shape) == tensor.dim() and all(
            isinstance(want, str) or want == have for want, have in zip(spec.shape, tensor.shape, strict=True)
        )
        if not fits:
            wanted = "x".join("any" if isinstance(s, str) else str(s) for s in spec.shape)
            have = "x".join(str(s) for s in tensor.shape)
            raise JobError(
                f"{where}: {spec.name} has shape {have or 'scalar'}, but the model was captured for "
                f"{wanted or 'scalar'}; "
                "pad or crop the data to one shape (a size may vary if it differs within the first two batches)"
            )
        for size, count in zip(spec.shape, tensor.shape, strict=True):
            other, equal = free.setdefault(size, (spec.name, count)) if isinstance(size, str) else ("", count)
            if count != equal:
                raise JobError(
                    f"{where}: a dimension of {spec.name} is {count} and that of {other} is {equal}, "
                    "but they were equal in the first batch; give each sample its target"
                )
        if tensor.dtype != spec.dtype:
            raise JobError(
                f"{where}: {spec.name} is {str(tensor.dtype).removeprefix('torch.')}, but the first batch had "
                f"{str(spec.dtype).removeprefix('torch.')}; convert the data to one type"
            )
    if wrong := misfit(specs, tensors, sizes_of(specs, tensors)):
        raise JobError(f"{where}: {wrong}, as in the first batches; pad or crop the data so that every batch fits")


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        kind = (
            f"{type(batch).__name__} of {len(batch)} items" if isinstance(batch, tuple | list) else type(batch).__name__
        )
        raise JobError(f"train_data and eval_data must yield (inputs, targets), but they yield a {kind}")
    return batch[0], batch[1]


def _layout(value: Any, what: str) -> str | int | tuple[str, ...]:
    if isinstance(value, torch.Tensor) or hasattr(value, "__array__"):
        return "tensor"
    if isinstance(value, tuple | list):
        return len(value)
    if isinstance(value, Mapping):
        if not all(isinstance(k, str) and k.isidentifier() for k in value):
            raise JobError(f"the keys of {what} must be Python identifiers, not {sorted(map(str, value))}")
        return tuple(value)
    raise JobError(f"the {what} of a batch are a {type(value).__name__}; {_SHAPE_FIX}")


def _names(prefix: str, layout: str | int | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(layout, str):
        return (prefix,)
    if isinstance(layout, int):
        return tuple(f"{prefix}_{i}" for i in range(layout))
    return tuple(f"{prefix}_{key}" for key in layout)


def _flatten(prefix: str, layout: str | int | tuple[str, ...], value: Any) -> dict[str, torch.Tensor]:
    if isinstance(layout, str):
        items = [value]
    elif isinstance(layout, int):
        if not isinstance(value, tuple | list) or len(value) != layout:
            raise JobError(f"the {prefix} of the first batch had {layout} items, but now they are {_described(value)}")
        items = list(value)
    else:
        if not isinstance(value, Mapping) or set(value) != set(layout):
            raise JobError(
                f"the {prefix} of the first batch had the keys {sorted(layout)}, but now they are {_described(value)}"
            )
        items = [value[key] for key in layout]
    return {name: _tensor(name, item) for name, item in zip(_names(prefix, layout), items, strict=True)}


def _tensor(name: str, item: Any) -> torch.Tensor:
    if isinstance(item, torch.Tensor):
        return item.detach().cpu()
    if hasattr(item, "__array__"):
        return torch.as_tensor(item)
    raise JobError(f"{name} of a batch is a {type(item).__name__}; {_SHAPE_FIX}")


def _unflatten(layout: str | int | tuple[str, ...], tensors: tuple[torch.Tensor, ...]) -> Any:
    if isinstance(layout, str):
        return tensors[0]
    return tuple(tensors) if isinstance(layout, int) else dict(zip(layout, tensors, strict=True))


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict with {sorted(map(str, value))}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")

"""What a stage may upload of itself for a checkpoint: its own parameters and states, and no more than those can take.

A provider may send anything. A part that holds another stage's parameter would decide what the whole model is, and one
without end would fill the disk: both are refused as they come, before the checkpoint counts.
"""

import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from ravnest.errors import RefusedError
from ravnest.graph.portable import PortableGraph, WeightSpec
from ravnest.graph.weights import DTYPES
from ravnest.safe_json import read_json

_SPARE_BYTES = 64 << 20
_STATE_FACTOR = 16
"""A part may take so many bytes beyond its stage's weights, and so many times these. Optimizers keep one to three
tensors for each parameter."""
_MAX_VALUES = 4_000_000


class BadPartError(RefusedError):
    """A stage has uploaded what is not its own to upload."""


@dataclass(frozen=True, slots=True)
class StagePart:
    """What one stage's part of a checkpoint holds."""

    stage: int
    tensors: Mapping[str, WeightSpec]
    """By their names in the part: each is there, with this type and shape."""
    parameters: frozenset[str]
    """The keys that the optimizer may have state of."""
    max_bytes: int
    min_bytes: int = 0
    """Of the weights alone."""

    @classmethod
    def of(cls, stage: int, graph: PortableGraph) -> Self:
        named = {f"param:{spec.key}": spec for spec in graph.parameters}
        named |= {f"buffer:{spec.key}": spec for spec in graph.states}
        weights = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in named.values())
        keys = frozenset(spec.key for spec in graph.parameters)
        return cls(stage, named, keys, _SPARE_BYTES + _STATE_FACTOR * weights, weights)

    async def bounded(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The same chunks; BadPartError as soon as they are more than the stage can need."""
        received = 0
        async for chunk in chunks:
            received += len(chunk)
            if received > self.max_bytes:
                raise BadPartError(
                    f"the part of stage {self.stage} has more than the {self.max_bytes} bytes its state can need"
                )
            yield chunk

    def check(self, path: Path) -> None:
        """BadPartError unless the file holds this stage's state, all of it and nothing else."""
        try:
            with safe_open(path, framework="pt") as file:
                found = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  (it is no mapping)
                self._check_tensors(found)
                self._check_values(file.metadata() or {})
        except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            words = f"{type(error).__name__}: {error}"[:300]
            raise BadPartError(f"the part of stage {self.stage} cannot be used: {words}") from None

    def _check_tensors(self, found: Mapping[str, Any]) -> None:
        # What rounds remember of a parameter is as long as that.
        outer = {
            f"{kind}:{spec.key}": replace(spec, dtype=torch.float32)
            for name, spec in self.tensors.items()
            if name.startswith("param:")
            for kind in ("outer", "anchor")
        }
        missing = self.tensors.keys() - found.keys()
        if missing:
            raise BadPartError(f"the part of stage {self.stage} lacks {_named(missing)}")
        for name, tensor in found.items():
            spec = self.tensors.get(name) or outer.get(name)
            if spec is None:
                self._check_owner(name)
            elif (DTYPES.get(tensor.get_dtype()), tuple(tensor.get_shape())) != (spec.dtype, spec.shape):
                raise BadPartError(
                    f"the part of stage {self.stage} has {name[:80]} as {tensor.get_dtype()} of the shape "
                    f"{tuple(tensor.get_shape())}, which is {spec.dtype} of {spec.shape}"
                )

    def _check_values(self, metadata: Mapping[str, str]) -> None:
        """What of the optimizer's state is no tensor; the names are those of the tensors without their kind."""
        for name in read_json(metadata["optimizer"], _MAX_VALUES)["values"]:
            self._check_owner(f"optim:{name}")

    def _check_owner(self, name: str) -> None:
        kind, _, rest = name.partition(":")
        if kind != "optim" or rest.rpartition(":")[0] not in self.parameters:
            raise BadPartError(f"the part of stage {self.stage} holds {_named({name})}, which is not that stage's")


def _named(names: set[str]) -> str:
    return ", ".join(repr(name[:80]) for name in sorted(names)[:8])

"""Check of an uploaded part: it may hold the stage's own parameters and states, and no more bytes than these need.

A provider may send anything. A part with another stage's parameter would change the model elsewhere, and an endless
part would fill the disk. Both are refused while they arrive, before the checkpoint counts.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from ravnest.errors import RefusedError
from ravnest.graph.portable import PortableGraph, WeightSpec
from ravnest.graph.state_size import MAX_STATE_VALUES, max_state_bytes, weight_bytes
from ravnest.graph.weights import DTYPES
from ravnest.safe_json import read_json


class BadPartError(RefusedError):
    """A stage has uploaded a part that is not its own, or that cannot be used."""


@dataclass(frozen=True, slots=True)
class StagePart:
    """The expected contents of one stage's part."""

    stage: int
    tensors: Mapping[str, WeightSpec]
    """By name in the part: each must be there, with this type and shape."""
    parameters: frozenset[str]
    """The keys that may have optimizer state."""
    max_bytes: int
    min_bytes: int = 0
    """Bytes of the weights alone."""

    @classmethod
    def of(cls, stage: int, graph: PortableGraph) -> Self:
        named = {f"param:{spec.key}": spec for spec in graph.parameters}
        named |= {f"buffer:{spec.key}": spec for spec in graph.states}
        keys = frozenset(spec.key for spec in graph.parameters)
        return cls(stage, named, keys, max_state_bytes(graph), weight_bytes(graph))

    async def bounded(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The same chunks; BadPartError as soon as they exceed `max_bytes`."""
        received = 0
        async for chunk in chunks:
            received += len(chunk)
            if received > self.max_bytes:
                raise BadPartError(
                    f"the part of stage {self.stage} has more than the {self.max_bytes} bytes its state can need"
                )
            yield chunk

    def check(self, path: Path) -> None:
        """BadPartError unless the file holds the whole state of this stage, and nothing else."""
        try:
            with safe_open(path, framework="pt") as file:
                found = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  (it is no mapping)
                self._check_tensors(found)
                self._check_values(file.metadata() or {})
        except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            words = f"{type(error).__name__}: {error}"[:300]
            raise BadPartError(f"the part of stage {self.stage} cannot be used: {words}") from None

    def _check_tensors(self, found: Mapping[str, Any]) -> None:
        # The state that averaging keeps of a parameter has its shape.
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
        """Checks the optimizer state that is not a tensor. Its names are those of the tensors, without their kind."""
        for name in read_json(metadata["optimizer"], MAX_STATE_VALUES)["values"]:
            self._check_owner(f"optim:{name}")

    def _check_owner(self, name: str) -> None:
        kind, _, rest = name.partition(":")
        if kind != "optim" or rest.rpartition(":")[0] not in self.parameters:
            raise BadPartError(f"the part of stage {self.stage} holds {_named({name})}, which is not that stage's")


def _named(names: set[str]) -> str:
    return ", ".join(repr(name[:80]) for name in sorted(names)[:8])

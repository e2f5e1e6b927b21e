"""Row lookups: rows that a leaf takes out of its own weights for the root, and the gradients of these rows.

The root needs the rows before the microbatch begins, and their gradients come back when it ends
(graph/cutting/lookups.py). The rows are copies of the current weights. Their gradients need no weights, only the
numbers of the rows.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch

from ravnest.engine.weights.row_gradients import RowGradient
from ravnest.errors import TrainingError
from ravnest.graph.cutting.lookups import indices_of, looked_up, name_ahead, padding_of
from ravnest.graph.portable import PortableGraph, ValueSpec
from ravnest.graph.program import Program

_REMEMBERED: Final = 1024


class RowLookups:
    """The lookups of one stage, and the microbatches whose gradients of rows have not come back."""

    def __init__(self, graph: PortableGraph, device: torch.device, memory_bytes: int | None = None) -> None:
        nodes, needed = {node.name: node for node in graph.nodes}, {name_ahead(value.name) for value in graph.lookups}
        for node in reversed(graph.nodes):
            if node.name in needed:
                needed.update(node.references())
        self._nodes = {value.name: nodes[name_ahead(value.name)] for value in graph.lookups}
        numbers = dict.fromkeys(indices_of(node) for node in self._nodes.values())
        wanted = [node.name for node in self._nodes.values()] + list(numbers)
        # Nothing else of the stage: a norm would change its states, and needs the activations of a forward.
        own_nodes = tuple(node for node in graph.nodes if node.name in needed)
        own = PortableGraph(
            own_nodes,
            inputs=graph.inputs,
            sends=tuple(ValueSpec(name, None) for name in wanted),
            parameters=graph.parameters,
            constants=graph.constants,
        )
        self._program = Program(own, device, memory_bytes=memory_bytes)
        self._numbers: dict[int, dict[str, torch.Tensor]] = {}
        self._versions: dict[int, int] = {}
        """The version that was looked up in for the latest microbatches."""

    @property
    def in_flight(self) -> int:
        """Microbatches of training whose gradients of rows have not come back."""
        return len(self._numbers)

    def look_up(
        self,
        microbatch: int,
        values: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        *,
        version: int = 0,
        train: bool,
    ) -> dict[str, torch.Tensor]:
        """The rows for a microbatch, by the name of their value; `version` is that of the weights."""
        with torch.no_grad():
            found = self._program.run(values, weights, train=train, microbatch=microbatch)
        if train:
            self._versions[microbatch] = version
            while len(self._versions) > _REMEMBERED:
                # With several microbatches in an update, only the last one of each is asked for.
                self._versions.pop(next(iter(self._versions)))
            self._numbers[microbatch] = {name: found[indices_of(node)] for name, node in self._nodes.items()}
        return {name: found[node.name] for name, node in self._nodes.items()}

    def version_of(self, microbatch: int) -> int:
        """The version that was looked up in for a microbatch whose own gradients are applied now."""
        return self._versions.pop(microbatch, 0)

    def gradients(self, microbatch: int, given: Mapping[str, torch.Tensor]) -> list[RowGradient]:
        """The gradients of the rows of a microbatch. TrainingError if nothing was looked up for it."""
        numbers = self._numbers.pop(microbatch, None)
        if numbers is None:
            raise TrainingError(f"gradients of rows came for microbatch {microbatch}, for which none were looked up")
        # From last to first, as in a backward pass: sums are then the same to the last digit.
        return [self._gradient(name, numbers[name], given[name]) for name in reversed(numbers) if name in given]

    def forget(self) -> None:
        """Discards every microbatch whose gradients of rows have not come back."""
        self._numbers.clear()
        self._versions.clear()

    def _gradient(self, name: str, numbers: torch.Tensor, gradient: torch.Tensor) -> RowGradient:
        node = self._nodes[name]
        flat, rows = numbers.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
        padding = padding_of(node)
        if padding is not None:
            trained = flat != padding
            flat, rows = flat[trained], rows[trained]
        return RowGradient.summed(looked_up(node), flat, rows)

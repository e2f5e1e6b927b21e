"""Format of a stage's part of a replica: tensors under the names of `Stage.state`, and metadata.

If the stage has rings, there are also `outer:KEY`, the state of the outer optimizer for a parameter, and `anchor:KEY`,
its value in all clusters after the last round. The metadata has `applied`, the microbatches that the stage contains,
and `rings`, the round of each ring's anchor and the samples since.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ravnest.engine.inbox.applied import REMEMBERED, Applied
from ravnest.errors import GraphError
from ravnest.graph.portable import PortableGraph
from ravnest.graph.state_size import MAX_STATE_VALUES
from ravnest.safe_json import read_json

Keep = Callable[[int, Mapping[str, Tensor], Mapping[str, str]], None]
"""Takes the number, tensors and metadata of a replica. The tensors may change once it returns."""

_MAX_NUMBER = 2**63
_APPLIED = ("applied", "without_rows")
"""Metadata with the microbatches that a stage contains."""


@dataclass(frozen=True, slots=True)
class RingStand:
    """Position of an owner in a ring: the round of its anchor, and the samples that it trained on since then."""

    committed: int = 0
    samples: int = 0


@dataclass(slots=True)
class Restored:
    """The state of a stage besides its weights; empty for a new one."""

    optimizer: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    outer: dict[str, Tensor] = field(default_factory=dict)
    anchors: dict[str, Tensor] = field(default_factory=dict)
    """By parameter key, like `outer`; empty if the weights themselves are the anchors."""
    rings: dict[int, RingStand] = field(default_factory=dict)
    applied: Applied = field(default_factory=Applied)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> "Restored":
        """The state in these tensors and metadata of a checkpoint or replica; GraphError when the metadata is
        invalid."""
        found = cls()
        for name, tensor in tensors.items():
            kind, _, key = name.partition(":")
            if kind == "optim":
                key, _, entry = key.rpartition(":")
                found.optimizer.setdefault(key, {})[entry] = tensor
            elif kind in ("outer", "anchor"):
                (found.outer if kind == "outer" else found.anchors)[key] = tensor
        try:
            applied, without_rows = (_numbers(read_json(metadata.get(name, "[]"))) for name in _APPLIED)
            found.applied = Applied(applied, without_rows=without_rows)
            for ring, stand in read_json(metadata.get("rings", "{}")).items():
                committed, samples = _numbers(stand)
                found.rings[int(ring)] = RingStand(committed, samples)
        except (ValueError, TypeError, AttributeError) as error:
            raise GraphError(f"the metadata of a part of a replica cannot be read: {error}") from None
        return found


def with_part(
    graph: PortableGraph, weights: Mapping[str, Tensor], part: tuple[Mapping[str, Tensor], Mapping[str, str]]
) -> dict[str, Tensor]:
    """All weights of a stage by key, with the trained ones from the part of a replica. KeyError names a missing one."""
    tensors, _ = part
    found = {spec.key: weights[f"weight:{spec.key}"] for spec in graph.constants}
    found |= {spec.key: tensors[f"param:{spec.key}"] for spec in graph.parameters}
    return found | {spec.key: tensors[f"buffer:{spec.key}"] for spec in graph.states}


def joined(parts: Sequence[tuple[Mapping[str, Tensor], Mapping[str, str]]]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parts of several stages of one replica as one, for a stage with another cut. Their positions in rings and their
    applied microbatches are dropped, because they belong to those stages. GraphError when the metadata is invalid.

    A tensor that several parts have (of a tied parameter) is taken from the first.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, object] = {}
    optimizer: dict[str, object] = {}
    try:
        for of_part, metadata in reversed(parts):
            tensors |= {name: tensor for name, tensor in of_part.items() if not name.startswith("anchor:")}
            optimizer = read_json(metadata["optimizer"], MAX_STATE_VALUES)
            values |= dict(optimizer["values"])  # type: ignore[call-overload]
    except (LookupError, TypeError, ValueError) as error:
        raise GraphError(f"the optimizer's state in a part of a replica cannot be read: {error}") from None
    rest = {name: value for name, value in parts[0][1].items() if name not in ("rings", *_APPLIED)}
    return tensors, {**rest, "optimizer": json.dumps({**optimizer, "values": values})}


def rings_in_words(stands: Mapping[int, RingStand]) -> str:
    """Positions in rings as text, for the metadata of a part."""
    return json.dumps({str(ring): [stand.committed, stand.samples] for ring, stand in stands.items()})


def _numbers(values: object) -> list[int]:
    if not isinstance(values, list) or len(values) > REMEMBERED:
        raise ValueError("it is not a short list of numbers")
    if not all(type(value) is int and 0 <= value < _MAX_NUMBER for value in values):
        raise ValueError("it contains something other than counts")
    return values

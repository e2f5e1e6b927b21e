"""What a provider must fetch when it gets another stage: the parameters it does not hold yet, and their state."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ravnest.planner.cluster import Cluster
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Provider

Piece = tuple[int, int]
"""From one place of the model to another, as `split` counts them."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """One piece of the model that one provider takes over."""

    provider: str
    start: int
    """The place in the model where it begins, as `split` counts them."""
    end: int
    bytes_to_move: float
    """Of its parameters, and of what the optimizer keeps for them."""


def held_pieces(clusters: Iterable[Cluster]) -> dict[str, Piece]:
    """What each provider of these clusters holds."""
    return {stage.provider: (stage.start, stage.end) for cluster in clusters for stage in cluster.stages}


def fetches(model: ModelCosts, held: Mapping[str, Piece], cluster: Cluster) -> tuple[Fetch, ...]:
    """What the providers of a cluster must fetch that hold these pieces already, from root to leaf."""
    index = {place: i for i, place in enumerate(model.places)}
    found = []
    for stage in cluster.stages:
        for start, end in _missing((stage.start, stage.end), held.get(stage.provider)):
            size = float(model.parameter_bytes[index[end]] - model.parameter_bytes[index[start]])
            if size > 0:
                found.append(Fetch(stage.provider, start, end, size * (1.0 + model.state_bytes_per_byte)))
    return tuple(found)


def moving_seconds(moves: Iterable[Fetch], providers: Mapping[str, Provider]) -> float:
    """Until the last of these has arrived, each over the line of who fetches it; all fetch at the same time."""
    sizes: dict[str, float] = {}
    for move in moves:
        sizes[move.provider] = sizes.get(move.provider, 0.0) + move.bytes_to_move
    return max((size / providers[name].down_bytes_per_second for name, size in sizes.items()), default=0.0)


def _missing(wanted: Piece, held: Piece | None) -> list[Piece]:
    if held is None or held[1] <= wanted[0] or wanted[1] <= held[0]:
        return [wanted]
    pieces = [(wanted[0], held[0]), (held[1], wanted[1])]
    return [(start, end) for start, end in pieces if start < end]

"""Bounds of benchmarks.scale: the memory that a stage may take, the bytes that a link may carry, and the cuts of peers.

Pure functions of figures that the processes of the benchmark measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

SHARE_FACTOR = 1.3
LARGEST_SHARES = {2: 0.75, 3: 0.55, 4: 0.45}
"""By the number of stages, the largest share of the plain peak that a stage may take."""


@dataclass(frozen=True, slots=True)
class StageFigures:
    """One stage of a cut model, counted from its graph, for one microbatch."""

    begins: str
    """The first parameter that it owns."""
    saved_bytes: int
    """Values that autograd keeps until the backward."""
    received_bytes: int
    """Activations from the stage before."""
    sent_bytes: int
    """Activations for the stage after."""
    returned_bytes: int
    """Gradients from the stage after."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """Bytes that the two directions of a link carried in a run, without its codec, and the microbatches that did."""

    forward_bytes: int
    backward_bytes: int
    forwards: int
    """Training and evaluation."""
    backwards: int


def in_flight_bytes(stage: StageFigures, flying: int, limit: int) -> int:
    """Activations in flight at a stage that has had `flying` microbatches between forward and backward.

    `limit` is the largest number in flight in the cluster: as many may have arrived, or be on their way out.
    """
    crossing = stage.received_bytes + stage.sent_bytes
    return flying * stage.saved_bytes + limit * crossing


def allowed_bytes(plain_peak_bytes: float, stages: int, activation_bytes: int) -> float:
    """The largest peak that a stage may have."""
    return SHARE_FACTOR * plain_peak_bytes / stages + activation_bytes


def link_ratio(use: LinkUse, stage: StageFigures) -> float:
    """Bytes that the link after this stage carried, relative to the activations and gradients that cross there."""
    needed = use.forwards * stage.sent_bytes + use.backwards * stage.returned_bytes
    return (use.forward_bytes + use.backward_bytes) / needed


def peer_cuts(begins: Sequence[str], pieces: Sequence[Sequence[str]]) -> list[int]:
    """The first pieces of all stages but the first, as near as possible to stages that begin with these parameters.

    `pieces` has the beginnings of the parameter names of each piece. Every stage gets at least one piece.
    """
    cuts: list[int] = []
    for number, begin in enumerate(begins):
        own = next(i for i, names in enumerate(pieces) if any(begin.startswith(name) for name in names))
        lowest = cuts[-1] + 1 if cuts else 1
        cuts.append(min(max(own, lowest), len(pieces) - (len(begins) - number)))
    return cuts

"""Version policies: which weights a backward uses, and what a stage keeps of a microbatch until then.

The engine trains by these policies, and the planner estimates memory and time by the same table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

CODED_SHARE: Final = 0.254
"""Size of a coded version: one byte for each value, and a scale of four bytes for each 256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPolicy:
    """Data that a stage keeps between the forward and the backward of a microbatch; applies to every stage but the
    leaf.

    On a leaf the backward follows immediately: under every policy it keeps everything and recomputes nothing.
    """

    name: str
    keeps_weights: bool
    """True: the weights of the forward are kept until the backward. False: the backward uses the current weights."""
    keeps_activations: bool
    """False: only the inputs of the stage are kept, and the forward is recomputed for the backward."""
    within_accumulate: bool = False
    """True: at most `accumulate` microbatches are in flight, so that there are never more than two versions."""
    coded: bool = False
    """True: weights that are kept are in 8 bits, so the backward uses them with a small error."""
    loss_cost: float = 0.0
    """Final loss above that of "stash" with the default correction at 8 stages, in nats: the character GPT of
    `python -m benchmarks.quality`. A cost within its noise of 0.01 is 0."""

    @property
    def writes_in_place(self) -> bool:
        """Whether updates write into the weights that forwards in flight have used."""
        return self.coded or not self.keeps_weights

    def version_copies(self, in_flight: float, *, predicts: bool) -> float:
        """Maximum memory of versions besides the current weights, in copies of the weights, at a stage with `in_flight`
        microbatches in flight. `predicts`: forwards use predicted weights, so the newest has a version of its own."""
        if in_flight <= 1 or not self.keeps_weights:
            # Predicted weights are freed after the forward, and the gradients of the backward take as much memory.
            return 0.0
        older = min(in_flight - 1.0, 1.0) if self.within_accumulate else in_flight - 1.0
        return (older + (1.0 if predicts else 0.0)) * (CODED_SHARE if self.coded else 1.0)


_ALL: Final = (
    VersionPolicy(name="stash", keeps_weights=True, keeps_activations=True),
    VersionPolicy(name="double", keeps_weights=True, keeps_activations=True, within_accumulate=True),
    VersionPolicy(name="stash_8bit", keeps_weights=True, keeps_activations=True, coded=True),
    VersionPolicy(name="recompute", keeps_weights=True, keeps_activations=False),
    VersionPolicy(name="in_place", keeps_weights=False, keeps_activations=True, loss_cost=0.03),
    VersionPolicy(name="latest", keeps_weights=False, keeps_activations=False, loss_cost=0.04),
)

POLICIES: Final[Mapping[str, VersionPolicy]] = {policy.name: policy for policy in _ALL}
"""Policies by name, in order of preference: by the loss that they cost, then by the precision of their gradients."""

DEFAULT_POLICY: Final = _ALL[0].name

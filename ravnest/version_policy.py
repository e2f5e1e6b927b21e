"""Which weights a backward sees, and what a stage keeps of a microbatch for it: the policies, as data.

The engine trains by these, and the planner counts memory and time by these: both read the same lines.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPolicy:
    """What is kept between the forward and the backward of a microbatch, on every stage but the leaf.

    On a leaf the backward follows at once: it keeps everything and computes nothing twice, whatever the policy.
    """

    name: str
    keeps_weights: bool
    """The version of the forward is kept until the backward. Otherwise the backward uses the weights of now."""
    keeps_activations: bool
    """Otherwise what came in is kept, and the forward is computed a second time for the backward."""
    within_accumulate: bool = False
    """No more microbatches are in flight than make an update, so that there are never more than two versions."""

    def older_versions(self, in_flight: float) -> float:
        """How many versions beside the newest a stage holds at most, with so many in flight there."""
        if not self.keeps_weights:
            return 0.0
        return min(in_flight - 1.0, 1.0) if self.within_accumulate else in_flight - 1.0


_ALL: Final = (
    VersionPolicy(name="stash", keeps_weights=True, keeps_activations=True),
    VersionPolicy(name="double", keeps_weights=True, keeps_activations=True, within_accumulate=True),
    VersionPolicy(name="recompute", keeps_weights=True, keeps_activations=False),
    VersionPolicy(name="latest", keeps_weights=False, keeps_activations=False),
)

POLICIES: Final[Mapping[str, VersionPolicy]] = {policy.name: policy for policy in _ALL}
"""By name, in the order in which they are preferred: those that cost the gradient or the rate nothing come first."""

DEFAULT_POLICY: Final = _ALL[0].name

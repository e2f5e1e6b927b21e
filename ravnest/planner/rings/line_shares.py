"""Shares of each line that rounds of averaging get next to training.

Activations and gradients go first. A round takes what they leave, and never less than a floor, so that it is not
starved. How often there are rounds follows from a budget: the share of a line that state may take over a long time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ravnest.planner.cluster import Cluster
from ravnest.planner.problem import Network

STATE_BUDGET: Final = 0.15
"""Maximum share of a line for state, over a long time."""
STATE_FLOOR: Final = 0.03
"""Minimum share of a line for a round, also on a line that training fills."""
_USABLE: Final = 0.9
"""Share of what training leaves that a round can use, because training does not leave it evenly."""


def round_share(training: float) -> float:
    """The share of a line that a round gets where training takes this share of it."""
    return max(STATE_FLOOR, _USABLE * (1.0 - training))


@dataclass(frozen=True, slots=True)
class LineShares:
    """The shares of their lines that rounds get: of each provider's, and of the requester's for what it relays."""

    others: float = 1.0
    """Share of the lines that are not named."""
    up: Mapping[str, float] = field(default_factory=dict)
    down: Mapping[str, float] = field(default_factory=dict)
    relay_up: float = 1.0
    relay_down: float = 1.0

    def up_of(self, provider: str) -> float:
        return self.up.get(provider, self.others)

    def down_of(self, provider: str) -> float:
        return self.down.get(provider, self.others)


WHOLE_LINES: Final = LineShares()
"""For rounds with nothing else on the lines."""
IN_BUDGET: Final = LineShares(STATE_BUDGET, relay_up=STATE_BUDGET, relay_down=STATE_BUDGET)
"""The most that rounds get over a long time."""


def shares_next_to_training(clusters: Sequence[Cluster], rates: Sequence[float], network: Network) -> LineShares:
    """The shares that rounds get of each line while these clusters train at these rates, in samples per second."""
    up: dict[str, float] = {}
    down: dict[str, float] = {}
    relay_up = relay_down = 0.0
    requester = network.requester
    for cluster, rate in zip(clusters, rates, strict=True):
        microbatches = rate / cluster.samples
        for stage in cluster.stages:
            up[stage.provider] = round_share(microbatches * stage.up_seconds)
            down[stage.provider] = round_share(microbatches * stage.down_seconds)
            relay_up += microbatches * (stage.fed_bytes + stage.relayed_bytes) / requester.up_bytes_per_second
            relay_down += microbatches * stage.relayed_bytes / requester.down_bytes_per_second
    return LineShares(round_share(0.0), up, down, round_share(relay_up), round_share(relay_down))

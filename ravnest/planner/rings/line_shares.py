"""Shares of each line that rounds of averaging get next to training.

Activations and gradients go first. A round takes what they leave, and never less than a floor, so that it is not
starved. How often there are rounds follows from a budget: the share of a line that state may take over a long time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ravnest.planner.cluster import Cluster
from ravnest.planner.problem import Network
from ravnest.state_budget import BUDGET_SHARE, FLOOR_SHARE, LEFT_SHARE


def round_share(training: float) -> float:
    """The share of a line that a round gets where training takes this share of it."""
    return max(FLOOR_SHARE, LEFT_SHARE * (1.0 - training))


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
IN_BUDGET: Final = LineShares(BUDGET_SHARE, relay_up=BUDGET_SHARE, relay_down=BUDGET_SHARE)
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

"""Rate of state on a line: what the foreground leaves, within a budget, and never nothing. Pure functions.

Activations, gradients and control are the foreground. Replicas, checkpoints, rounds, parts and artifacts are state.
"""

from dataclasses import dataclass
from typing import Final, Literal

from ravnest.state_budget import BUDGET_SHARE, FLOOR_SHARE, LEFT_SHARE
from ravnest.units import megabits

StateKind = Literal["round", "replica", "checkpoint", "part", "artifact"]

PRIORITIES: Final[dict[StateKind, int]] = {"round": 0, "replica": 1, "checkpoint": 2, "part": 3, "artifact": 4}
"""Order in which waiting transfers are served. The other clusters wait for a round; a replica bounds what a fault
costs; a checkpoint may take as long as it takes."""


@dataclass(frozen=True, slots=True)
class PacingSettings:
    """Shares of a line; the defaults suit every swarm."""

    budget_share: float = BUDGET_SHARE
    """Largest share of the line that state takes, rounds excepted."""
    floor_share: float = FLOOR_SHARE
    """Share that state gets however busy the line is, so that no transfer starves."""
    transfer_share: float = 0.01
    """Share that each waiting transfer gets of it, whatever its priority: the other end waits for every transfer."""
    left_share: float = LEFT_SHARE
    """Largest share of what the foreground leaves."""
    burst_seconds: float = 0.025
    """Largest piece, as time on the line: an activation waits for no more."""
    min_piece_bytes: int = 4 << 10
    max_piece_bytes: int = 256 << 10
    """Bounds of a piece, whatever the line: each has a header, and passes queues of limited size."""


DEFAULT_SETTINGS: Final = PacingSettings()


def state_rate(
    line_bytes_per_second: float,
    foreground_bytes_per_second: float,
    settings: PacingSettings = DEFAULT_SETTINGS,
    *,
    has_budget: bool = True,
) -> tuple[float, str]:
    """Bytes per second that state may take of a line at present, and why.

    Without `has_budget` state takes whatever the foreground leaves. So do rounds, whose interval is planned with what
    they take of the line, and all state of a machine that does not train at present.
    """
    left = settings.left_share * max(0.0, line_bytes_per_second - foreground_bytes_per_second)
    floor = settings.floor_share * line_bytes_per_second
    budget = settings.budget_share * line_bytes_per_second if has_budget else line_bytes_per_second
    line = megabits(line_bytes_per_second)
    used = f"the foreground takes {megabits(foreground_bytes_per_second)} of {line} Mbit/s"
    if left <= floor:
        return floor, f"{used}; state keeps {settings.floor_share:.0%} of the line"
    if left < budget or not has_budget:
        return left, f"{used}; state takes {settings.left_share:.0%} of the rest"
    return budget, f"state takes {settings.budget_share:.0%} of {line} Mbit/s"


def piece_bytes(line_bytes_per_second: float, settings: PacingSettings = DEFAULT_SETTINGS) -> int:
    """Size of a piece of state that occupies the line for an acceptable moment."""
    size = min(line_bytes_per_second * settings.burst_seconds, settings.max_piece_bytes)
    return max(settings.min_piece_bytes, int(size))

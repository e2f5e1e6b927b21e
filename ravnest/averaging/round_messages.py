"""Messages between the owners of a ring and the coordinator's decisions about a round: values only."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Join:
    """An owner's report when it has taken its snapshot."""

    samples: int
    norm: float
    """The length of the coded section of its contribution."""
    finite: bool
    committed: int
    """The round of its anchor."""
    counters: tuple[int, ...] = ()
    refusal: str = ""
    """The reason why it does not take part; empty if it does."""


@dataclass(frozen=True, slots=True)
class RoundMember:
    """One of the members of an attempt, in ring order."""

    node: str
    weight: float
    """Its share; the shares of all members sum to 1."""
    norm: float
    """The length of its difference after clipping. A member whose difference is longer clips itself to this."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Tell all members to reduce."""

    attempt: int
    members: tuple[RoundMember, ...]
    counters: tuple[int, ...]
    """For each counter the largest value of all members."""


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Tell `donor` to send its anchor and outer state to `node`."""

    node: str
    donor: str
    committed: int
    """The round of the donor's anchor."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Tell `nodes` to take the step of this attempt."""

    attempt: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Tell `nodes` that this round is over for them: they drop their snapshots and keep everything else."""

    nodes: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Notice:
    """An event for the log of the run."""

    kind: Literal["left_out", "dropped", "bounded", "clipped", "retry", "disagreed", "behind"]
    reason: str
    node: str | None = None


Action = Begin | CatchUp | Commit | Abort | Notice

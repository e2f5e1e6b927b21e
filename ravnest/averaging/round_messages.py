"""What the owners of a ring tell the coordinator about a round, and what it is to do then. Values only."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Join:
    """What an owner says when its snapshot is taken."""

    samples: int
    norm: float
    """Of the coded section of its contribution."""
    finite: bool
    committed: int
    """The round of its anchor."""
    counters: tuple[int, ...] = ()
    refusal: str = ""
    """Why it does not take part."""


@dataclass(frozen=True, slots=True)
class RoundMember:
    """One of those who reduce, in ring order."""

    node: str
    weight: float
    """Its share; all of them sum to 1."""
    norm: float
    """How long its difference is, after clipping: a member that has more clips itself to this."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Tell all members to reduce."""

    attempt: int
    members: tuple[RoundMember, ...]
    counters: tuple[int, ...]
    """The largest of anybody's, one by one."""


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Tell `donor` to send where it stands to `node`."""

    node: str
    donor: str


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
    """For the events of the run."""

    kind: Literal["left_out", "dropped", "bounded", "clipped", "retry", "disagreed", "behind"]
    reason: str
    node: str | None = None


Action = Begin | CatchUp | Commit | Abort | Notice

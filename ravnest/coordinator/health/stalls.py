"""Who holds a cluster up in which nothing moves though all its stages are heard: whose thread is stuck, whose line.

Pure functions of what the stages report.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ravnest.coordinator.health.lease import STILL_SECONDS, Replacement

_LONGEST: Final = 4.0
"""A cluster has not stopped before it has stood still for so many times as long as it lately did between two pieces."""
_LINK: Final = 1.5
"""A link finds another way by itself, over the relay, a few seconds after its connection has died."""
_FADING: Final = 0.95
_ORDER: Final[tuple[Replacement, ...]] = ("standby", "reform", "none")


@dataclass(frozen=True, slots=True)
class LinkView:
    """One end's view of the link to a neighbour."""

    node_id: str
    connected: bool
    unconfirmed: int = 0
    """Frames that the neighbour has not confirmed."""


@dataclass(frozen=True, slots=True)
class StageView:
    """What a stage reports."""

    node_id: str
    still_seconds: float
    """Since it last finished a piece of work, as far as is known."""
    ready: int = 0
    """Pieces of work that lie there while it works on one."""
    links: tuple[LinkView, ...] = ()
    sends: str = ""
    """What it says that it uploads of its state, and what has come of that. One that really sends does not stand still:
    see `state_traffic.is_at_work`."""


class Blame(NamedTuple):
    nodes: tuple[str, ...]
    """Whose absence would help, in the order of the cluster; none where nobody can be named."""
    reason: str
    heals: bool = False
    """Whether it may well go on by itself."""


class Stall(NamedTuple):
    """A cluster stands still because of this provider, which is to be given up once that has lasted long enough."""

    node_id: str
    reason: str
    is_over: bool
    """Whether it has lasted long enough."""


def who_blocks(stages: Sequence[StageView]) -> Blame:
    """Whom a cluster waits for that stands still, and why. The stages are in order."""
    order = [stage.node_id for stage in stages]
    down = _pairs(stages, lambda link: not link.connected)
    if down:
        blamed = _named_most_often(down, order)
        return Blame(blamed, f"there is no connection {_between(down, order)}", heals=True)
    stuck = _pairs(stages, lambda link: link.unconfirmed > 0)
    if stuck:
        return Blame(_named_most_often(stuck, order), f"nothing passes {_between(stuck, order)}", heals=True)
    busy = [stage for stage in stages if stage.ready]
    if busy:
        # It was at work before those that it gave something to do.
        first = max(busy, key=lambda stage: stage.still_seconds)
        if first.sends:
            return Blame((first.node_id,), f"{first.node_id} {first.sends}")
        many = "a piece" if first.ready == 1 else f"{first.ready} pieces"
        return Blame((first.node_id,), f"{first.node_id} has had {many} of work for {first.still_seconds:.0f} s")
    return Blame((), "no stage has anything to do")


def judge_stall(
    stages: Sequence[StageView], longest_seconds: float, replacement: Callable[[str], Replacement]
) -> Stall | None:
    """Whether a cluster in which something is under way stands still, because of whom, and whether to wait on.

    `longest_seconds` is how long it lately was between two pieces of work. Of several that may be to blame, the one
    that is replaced most easily is named; None where there is nobody to blame, or nobody could take the place of the
    one that is.
    """
    still = min((stage.still_seconds for stage in stages), default=0.0)
    blame = who_blocks(stages)
    if not blame.nodes or still < STILL_SECONDS["standby"] / 2:
        return None
    # Of two that are equal, the later one: what it has done is known to nobody yet.
    named = min(reversed(blame.nodes), key=lambda node: _ORDER.index(replacement(node)))
    who_else = replacement(named)
    if who_else == "none":
        return None
    limit = max(STILL_SECONDS[who_else], _LONGEST * longest_seconds) * (_LINK if blame.heals else 1.0)
    if still < limit / 2:
        return None
    helps = "a standby is ready" if who_else == "standby" else "the others can go on without it"
    reason = f"the cluster has stood still for {still:.0f} s: {blame.reason}, and {helps}"
    return Stall(named, reason, still >= limit)


def longest_after(longest_seconds: float, gap_seconds: float) -> float:
    """How long a cluster lately stood still at the most, after one more pause: what is long ago counts for less."""
    return max(gap_seconds, _FADING * longest_seconds)


def _pairs(stages: Sequence[StageView], holds: Callable[[LinkView], bool]) -> set[frozenset[str]]:
    """Between which two it holds, as either of them sees it."""
    among = {stage.node_id for stage in stages}
    return {
        frozenset((stage.node_id, link.node_id))
        for stage in stages
        for link in stage.links
        if link.node_id in among and link.node_id != stage.node_id and holds(link)
    }


def _named_most_often(pairs: set[frozenset[str]], order: Sequence[str]) -> tuple[str, ...]:
    counts = Counter(node for pair in pairs for node in pair)
    most = max(counts.values())
    return tuple(node for node in order if counts[node] == most)


def _between(pairs: set[frozenset[str]], order: Sequence[str]) -> str:
    named = sorted((sorted(pair, key=order.index) for pair in pairs), key=lambda pair: order.index(pair[0]))
    return " and ".join(f"between {one} and {other}" for one, other in named)

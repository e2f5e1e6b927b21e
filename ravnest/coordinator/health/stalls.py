"""Detector for a cluster that stalls although all of its stages are heard: it names the stage or link that blocks it.

Pure functions of the stages' reports.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ravnest.coordinator.health.lease import Replacement

_MIN_GAPS: Final = 4.0
"""A cluster has stalled after this multiple of its longest recent time between two tasks."""
_LINK_FACTOR: Final = 1.5
"""Factor of the timeout for a link, which moves to the relay by itself a few seconds after its connection has died."""
_LINE_FACTOR: Final = 2.0
"""Factor of the time that a slow line needs for the frames on it: other traffic shares it. A slow line is no fault."""
MAX_LINE_SECONDS: Final = 120.0
"""Longest time on a line that counts: the rates and the bytes are what providers say."""
_FADING: Final = 0.95
_ORDER: Final[tuple[Replacement, ...]] = ("standby", "reform", "none")


@dataclass(frozen=True, slots=True)
class StallTimeouts:
    """Time in which a provider that is heard may finish nothing, though work waits for it, by its replacement."""

    standby_seconds: float = 10.0
    reform_seconds: float = 20.0
    first_task_seconds: float = 15.0
    """Estimated time of the first task of a cluster, before any has been measured."""

    def seconds(self, replacement: Replacement) -> float:
        return self.standby_seconds if replacement == "standby" else self.reform_seconds


DEFAULT_TIMEOUTS: Final = StallTimeouts()


@dataclass(frozen=True, slots=True)
class LinkView:
    """One end's view of the link to a neighbour."""

    node_id: str
    connected: bool
    unconfirmed: int = 0
    """Frames that the neighbour has not confirmed."""
    line_seconds: float = 0.0
    """Time that the measured lines need for these frames; 0 where a line was not measured."""


@dataclass(frozen=True, slots=True)
class StageView:
    """The report of a stage."""

    node_id: str
    still_seconds: float
    """Time since the stage last finished a task, as far as is known."""
    ready: int = 0
    """Tasks that wait while it works on one."""
    links: tuple[LinkView, ...] = ()
    claim: str = ""
    """The upload of its state that it reports, and how much of it has arrived; empty without one. A stage whose upload
    makes progress has not stood still, see `uploads.is_progressing`."""


class StallCause(NamedTuple):
    """The cause of a stall."""

    nodes: tuple[str, ...]
    """Providers whose loss would help, in the order of the cluster; empty where none can be named."""
    reason: str
    heals: bool = False
    """Whether the cluster may well go on by itself."""
    line_seconds: float = 0.0
    """Time that the slowest line needs for what is on its way."""


class Stall(NamedTuple):
    """A stalled cluster, and the provider to give up for it."""

    node_id: str
    reason: str
    is_over: bool
    """Whether the stall has lasted long enough to give the provider up."""


def find_cause(stages: Sequence[StageView]) -> StallCause:
    """The cause of a stall of these stages, which are in order."""
    order = [stage.node_id for stage in stages]
    down = _links(stages, lambda link: not link.connected)
    if down:
        return StallCause(_ends_of_most(down, order), f"there is no connection {_between(down, order)}", heals=True)
    stuck = _links(stages, lambda link: link.unconfirmed > 0)
    if stuck:
        seconds = max(link.line_seconds for stage in stages for link in stage.links if link.unconfirmed)
        reason = f"nothing passes {_between(stuck, order)}"
        return StallCause(_ends_of_most(stuck, order), reason, heals=True, line_seconds=seconds)
    busy = [stage for stage in stages if stage.ready]
    if busy:
        # It was at work before the stages that wait for its results.
        first = max(busy, key=lambda stage: stage.still_seconds)
        if first.claim:
            return StallCause((first.node_id,), f"{first.node_id} {first.claim}")
        tasks = "a task" if first.ready == 1 else f"{first.ready} tasks"
        return StallCause((first.node_id,), f"{first.node_id} has had {tasks} to do for {first.still_seconds:.0f} s")
    return StallCause((), "no stage has anything to do")


def judge_stall(
    stages: Sequence[StageView],
    longest_seconds: float,
    replacement: Callable[[str], Replacement],
    timeouts: StallTimeouts = DEFAULT_TIMEOUTS,
) -> Stall | None:
    """Whether a cluster with something in flight stalls, because of which provider, and whether to give that one up.

    `longest_seconds` is the longest recent time between two tasks. If several providers may be the cause, the one that
    is easiest to replace is named. None if no provider can be named, or if the named one has no replacement.
    """
    still = min((stage.still_seconds for stage in stages), default=0.0)
    cause = find_cause(stages)
    if not cause.nodes or still < timeouts.standby_seconds / 2:
        return None
    # On a tie, the later stage: its newest results have not reached any other stage.
    named = min(reversed(cause.nodes), key=lambda node: _ORDER.index(replacement(node)))
    by = replacement(named)
    if by == "none":
        return None
    limit = max(timeouts.seconds(by), _MIN_GAPS * longest_seconds) * (_LINK_FACTOR if cause.heals else 1.0)
    limit += _LINE_FACTOR * min(cause.line_seconds, MAX_LINE_SECONDS)
    if still < limit / 2:
        return None
    helps = "a standby is ready" if by == "standby" else "the others can go on without it"
    reason = f"the cluster has stood still for {still:.0f} s: {cause.reason}, and {helps}"
    return Stall(named, reason, still >= limit)


def longest_after(longest_seconds: float, gap_seconds: float) -> float:
    """The longest recent time between two tasks, after one more; older ones fade."""
    return max(gap_seconds, _FADING * longest_seconds)


def _links(stages: Sequence[StageView], holds: Callable[[LinkView], bool]) -> set[frozenset[str]]:
    """The links between these stages for which the condition holds at either end."""
    among = {stage.node_id for stage in stages}
    return {
        frozenset((stage.node_id, link.node_id))
        for stage in stages
        for link in stage.links
        if link.node_id in among and link.node_id != stage.node_id and holds(link)
    }


def _ends_of_most(links: set[frozenset[str]], order: Sequence[str]) -> tuple[str, ...]:
    """The providers that are at an end of the most of these links."""
    counts = Counter(node for link in links for node in link)
    most = max(counts.values())
    return tuple(node for node in order if counts[node] == most)


def _between(links: set[frozenset[str]], order: Sequence[str]) -> str:
    named = sorted((sorted(link, key=order.index) for link in links), key=lambda link: order.index(link[0]))
    return " and ".join(f"between {one} and {other}" for one, other in named)

"""How many microbatches a cluster should have in flight: the smallest number that keeps its slowest stage or line busy.

A pure decision from what was measured in a window of time with the number of now, and from what came of the decisions
before. By Little's law, as many are on their way as microbatches begin within the time that one takes. With too few the
slowest stage waits for the next; too many queue in front of it, or of a line, and only make one another stale.

While the slowest stage waits, more are tried, and kept if that made the cluster faster. If it did not, something else
is the limit, a line most likely, and the number is as good as before. While the slowest stage is always busy, fewer are
tried, down to what the way without any waiting takes, and the step that cost something is taken back. What was found
counts until stages or lines change.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from ravnest.planner.cluster import Cluster, memory_bytes
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.providers import Goal, Provider

BUSY: Final = 0.985
"""A stage that works for such a share of the time does not wait for microbatches."""

IDLE: Final = 0.97
"""One that works less than that does."""

CHANGED: Final = 0.1
"""A stage that is so much slower or faster than before has changed, and so has a period that is so much longer: what
was found no longer counts."""

FULL_WINDOW: Final = 24
"""Microbatches in a window, or twice those in flight, that tell small differences."""

_SLOWER: Final = 0.015
"""By which a period is longer where something may have changed in the middle of its window."""
_AGAIN: Final = 60
"""Decisions after which it is tried again whether more bring something; longer, the more often they did not."""


@dataclass(frozen=True, slots=True)
class FlightMeasures:
    """What a cluster did in a window of time in which it had the same number in flight."""

    limit: int
    seconds: tuple[float, ...]
    """Of each stage, what it computed for one microbatch."""
    delays: tuple[float, ...]
    """Of each link, what a microbatch spent on the way there and back without waiting for the line."""
    period_seconds: float
    """From one microbatch to the next."""
    flying: float
    """How many were between forward and backward at the root, on average."""
    microbatches: int
    """In the window."""

    @property
    def slowest_seconds(self) -> float:
        return max(self.seconds)

    @property
    def busy(self) -> float:
        """Of the slowest stage, the share of the time that it worked."""
        return min(1.0, self.slowest_seconds / self.period_seconds)

    @property
    def noise(self) -> float:
        """By which share rates of this window may be wrong: one microbatch more or less, and more where they come in
        bursts, all that are in flight one behind the other and then none for a while."""
        return max(1.0, (1 - self.busy) * self.limit / 2) / self.microbatches

    @property
    def is_full(self) -> bool:
        """Whether it tells small differences."""
        return self.microbatches >= max(FULL_WINDOW, 2 * self.limit)

    @property
    def is_long(self) -> bool:
        """Whether it is as clear as it gets."""
        return self.microbatches >= max(2 * FULL_WINDOW, 4 * self.limit)

    @property
    def is_idle(self) -> bool:
        """Whether the slowest stage clearly waits at times."""
        return self.busy < IDLE - (self.noise / 2 if self.is_long else self.noise)

    @property
    def is_busy(self) -> bool:
        """Whether it clearly does not."""
        return self.is_full and self.busy >= BUSY - self.noise / 2

    @property
    def is_starved(self) -> bool:
        """Whether the root often had fewer in flight than it might: it is not fed as fast as it could go on."""
        root = min(1.0, self.seconds[0] / self.period_seconds)
        return self.flying < 0.9 * (self.limit - root) - 0.3


@dataclass(frozen=True, slots=True)
class Trial:
    """Another number is tried: the one before, and how long the period and the delays of links were with it."""

    limit: int
    period_seconds: float
    delays: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class FlightMemory:
    """What decisions before have found, while stages are as fast as they were."""

    seconds: tuple[float, ...] = ()
    """Of each stage for one microbatch."""
    delays: tuple[float, ...] = ()
    """Of each link, the least: what the way takes when nothing waits for the line."""
    best_seconds: float = math.inf
    """The shortest period with the number of now, as far as that is certain."""
    trial: Trial | None = None
    enough: int = 1
    """Fewer have cost something."""
    way_seconds: float = 0.0
    """How long the way was then."""
    most: int | None = None
    """More have brought nothing."""
    most_seconds: float = 0.0
    """The period then."""
    since: int = 0
    """Decisions ago that this was found."""
    verdicts: int = 0
    """And how often."""


@dataclass(frozen=True, slots=True)
class FlightDecision:
    """So many from now on, and why; `memory` goes into the next decision."""

    limit: int
    reason: str
    memory: FlightMemory = field(default_factory=FlightMemory)
    afresh: bool = False
    """Nothing of what was measured so far is to count any more."""


def decide_flight(seen: FlightMeasures, memory: FlightMemory, most: int) -> FlightDecision:
    """How many are to be in flight, at most `most`, which memory and the bound on staleness allow."""
    limit, period = seen.limit, seen.period_seconds
    if limit > most:
        return _go(memory, most, f"no more than {most} may be in flight")
    changed = _changed(seen, memory)
    if changed:
        return FlightDecision(limit, changed, FlightMemory(), afresh=True)
    was_busy = memory.best_seconds * BUSY <= seen.slowest_seconds
    if memory.trial is None and seen.is_idle and was_busy and period > memory.best_seconds * (1 + _SLOWER):
        # Perhaps something has just changed: then this window is of both.
        memory = replace(memory, best_seconds=math.inf, delays=())
        return FlightDecision(limit, "it was faster a moment ago: looking again", memory, afresh=True)
    memory = _looked(seen, memory)
    if memory.trial is not None:
        judged = _fewer_tried(seen, memory) if limit < memory.trial.limit else _more_tried(seen, memory)
        if judged is None:
            return _keep(seen, memory, f"{limit} in flight are being tried instead of {memory.trial.limit}")
        if isinstance(judged, FlightDecision):
            return judged
        memory = judged
    on_way = _way(seen, memory.delays) / period
    working = f"the slowest stage works {seen.busy:.0%} of the time"
    if not seen.is_idle:
        return _when_busy(seen, memory, on_way, working)
    if seen.is_starved:
        return _keep(seen, memory, f"{working}, and the root has {seen.flying:.1f} of {limit}: it is fed no faster")
    queued, fewer = limit - on_way, max(memory.enough, _spare(on_way))
    # Others may queue at stages that take now more and now less time, and keep these busy.
    at_lines = (sum(seen.delays) - sum(memory.delays)) / period
    if queued >= max(2.0, 0.25 * limit) and at_lines >= queued / 2 and fewer < limit:
        why = f"{queued:.1f} of {limit} wait for a line, which takes {period:.3g} s for each"
        return _try(seen, memory, fewer, f"{working}, and {why}")
    if memory.most is not None and limit >= memory.most:
        return _when_line_is_limit(seen, memory, on_way, f"{working}, and more in flight did not make it faster")
    if limit >= most:
        return _keep(seen, memory, f"{working}, and no more than {most} may be in flight")
    # Without any queue the rate grows with the number; where some wait already, it may not.
    in_one_go = queued < 1 and not memory.verdicts
    if not in_one_go and not seen.is_full:
        return _keep(seen, memory, working)
    wanted = math.ceil(limit / max(seen.busy, 0.25)) if in_one_go else limit + math.ceil(limit / 10)
    wanted = min(wanted, most, memory.most or most)
    return _try(seen, memory, wanted, f"{working}: {limit} are too few for a way of {on_way * period:.3g} s")


def most_in_flight(model: ModelCosts, goal: Goal, providers: Mapping[str, Provider], cluster: Cluster) -> int:
    """As many as the bound on staleness allows and the memory of every stage's provider holds."""
    at = {place: index for index, place in enumerate(model.places)}
    for number in range(goal.most_in_flight, cluster.in_flight, -1):
        held = memory_bytes(model, goal, number)
        if all(held[at[s.start], at[s.end]] <= providers[s.provider].memory_bytes for s in cluster.stages):
            return number
    return cluster.in_flight


def _changed(seen: FlightMeasures, memory: FlightMemory) -> str:
    """Why what was found before no longer holds; empty while it does."""
    for stage, (now, then) in enumerate(zip(seen.seconds, memory.seconds, strict=False)):
        if abs(now - then) > CHANGED * max(seen.slowest_seconds, *memory.seconds):
            return f"stage {stage} takes {now:.3g} s for a microbatch, and took {then:.3g} s"
    if memory.trial is None and seen.period_seconds > memory.best_seconds * (1 + CHANGED / 2 + seen.noise):
        # The way may have become longer, or a line slower.
        return f"a microbatch takes {seen.period_seconds:.3g} s, and took {memory.best_seconds:.3g} s"
    before = memory.trial
    faster = (1 - CHANGED - seen.noise) * before.period_seconds if before is not None else 0.0
    if before is not None and seen.limit < before.limit and seen.period_seconds < faster:
        return f"a microbatch takes {seen.period_seconds:.3g} s, and took {before.period_seconds:.3g} s with more"
    return ""


def _looked(seen: FlightMeasures, memory: FlightMemory) -> FlightMemory:
    """The memory, with what is seen now and without what is out of date."""
    delays = tuple(map(min, memory.delays or seen.delays, seen.delays))
    if _way(seen, delays) < (1 - CHANGED) * memory.way_seconds:
        memory = replace(memory, enough=1, way_seconds=0.0)
    if memory.since > _AGAIN * 2 ** min(memory.verdicts, 4):
        memory = replace(memory, most=None)
    if seen.period_seconds < (1 - CHANGED - seen.noise) * memory.most_seconds:
        memory = replace(memory, most=None, most_seconds=0.0, verdicts=0)
    best = min(memory.best_seconds, seen.period_seconds * (1 + seen.noise))
    seconds = memory.seconds or seen.seconds
    return replace(memory, seconds=seconds, delays=delays, best_seconds=best, since=memory.since + 1)


def _fewer_tried(seen: FlightMeasures, memory: FlightMemory) -> FlightDecision | FlightMemory | None:
    """What came of fewer: whether they are enough, or how many to go back to; None while that is not clear."""
    assert memory.trial is not None
    limit, before, period = seen.limit, memory.trial, seen.period_seconds
    was_busy = seen.slowest_seconds >= before.period_seconds * (BUSY - CHANGED)
    if was_busy:
        lost, clear = not seen.is_busy, seen.is_idle or seen.is_busy or seen.is_long
    else:
        lost = period > before.period_seconds * (1 + max(0.02, 0.4 / before.limit))
        clear = seen.is_full or (lost and period > before.period_seconds * (1 + 3 * seen.noise))
    if not clear:
        return None
    if not lost:
        memory = replace(memory, trial=None)
        # Where no stage is the limit, more have brought nothing.
        return memory if was_busy else _found_most(memory, limit, period)
    back = limit + 1 if before.limit - limit == 1 else math.ceil((limit + before.limit) / 2)
    # What was taken for a queue was the way.
    memory = replace(memory, enough=limit + 1, delays=seen.delays, way_seconds=_way(seen, seen.delays))
    return _go(memory, back, f"{limit} in flight cost {1 - before.period_seconds / period:.1%} of the rate")


def _more_tried(seen: FlightMeasures, memory: FlightMemory) -> FlightDecision | FlightMemory | None:
    """The same of more."""
    assert memory.trial is not None
    limit, before = seen.limit, memory.trial
    gained = before.period_seconds / seen.period_seconds - 1
    # Some of what as many more would bring if nothing at all queued; of many more, the last may bring nothing.
    enough = min(0.05, 0.2 * (limit / before.limit - 1))
    # A line that is the limit has a queue, and those that were added wait in it.
    added = (limit - before.limit) * seen.period_seconds
    queues = sum(seen.delays) - sum(before.delays) >= added / 2
    if not (seen.is_long or (seen.is_full and (queues or seen.is_busy)) or gained >= enough + seen.noise):
        return None
    if gained >= enough or not seen.is_idle:
        if gained >= enough + seen.noise and before.limit >= memory.enough:
            memory = replace(memory, enough=before.limit + 1, way_seconds=_way(seen, memory.delays))
        return replace(memory, trial=None)
    memory = _found_most(memory, before.limit, seen.period_seconds)
    return _go(memory, before.limit, f"{limit} in flight are not faster than {before.limit}: no stage is the limit")


def _found_most(memory: FlightMemory, limit: int, period_seconds: float) -> FlightMemory:
    return replace(memory, most=limit, most_seconds=period_seconds, since=0, verdicts=memory.verdicts + 1)


def _when_busy(seen: FlightMeasures, memory: FlightMemory, on_way: float, working: str) -> FlightDecision:
    """Nothing is to be gained with more: are there more than it takes?"""
    limit, least = seen.limit, max(memory.enough, math.ceil(on_way - 0.5), 1)
    if limit <= least:
        return _keep(seen, memory, f"{working}, and fewer would not be enough for a way of {on_way:.1f} periods")
    wanted = max(least, min(_halfway(limit, on_way), _spare(on_way)))
    if not seen.is_busy and limit - wanted < 3:
        return _keep(seen, memory, working)
    return _try(seen, memory, wanted, f"{working}, and {limit - on_way:.1f} of {limit} wait for their turn")


def _when_line_is_limit(seen: FlightMeasures, memory: FlightMemory, on_way: float, why: str) -> FlightDecision:
    """Its queue hides how long the way is: one fewer shows it."""
    least = max(memory.enough, math.ceil(sum(seen.seconds) / seen.period_seconds))
    if seen.limit <= least or not seen.is_full:
        return _keep(seen, memory, why)
    return _try(seen, memory, max(least, _halfway(seen.limit, on_way)), f"{why}: perhaps fewer are enough")


def _way(seen: FlightMeasures, delays: tuple[float, ...]) -> float:
    """What a microbatch takes through all stages and back when it waits nowhere."""
    return sum(seen.seconds) + sum(delays)


def _halfway(limit: int, on_way: float) -> int:
    """Fewer, but not all the way to what would do if nothing ever came unevenly."""
    return limit - max(1, (limit - math.ceil(on_way)) // 2)


def _spare(on_way: float) -> int:
    """Enough for the way and a few more, to even out what comes unevenly."""
    enough = math.ceil(on_way)
    return enough + 1 + enough // 4


def _keep(seen: FlightMeasures, memory: FlightMemory, reason: str) -> FlightDecision:
    return FlightDecision(seen.limit, reason, memory)


def _go(memory: FlightMemory, limit: int, reason: str) -> FlightDecision:
    return FlightDecision(limit, reason, replace(memory, best_seconds=math.inf, trial=None))


def _try(seen: FlightMeasures, memory: FlightMemory, limit: int, reason: str) -> FlightDecision:
    if limit == seen.limit:
        return _keep(seen, memory, reason)
    trial = Trial(seen.limit, seen.period_seconds, seen.delays)
    return FlightDecision(limit, reason, replace(memory, best_seconds=math.inf, trial=trial))

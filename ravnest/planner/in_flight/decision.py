"""How many microbatches a cluster should have in flight: the smallest number that keeps its slowest stage or line busy.

A pure decision from what was measured in a window of time with the number of now, and from what came of the decisions
before. By Little's law, as many are on their way as microbatches begin within the time that one takes, and both are
measured: so the number that is enough is computed (planner/pipeline_depth.py), not searched for.

While the slowest stage waits, as many more are tried as that number says, or an eighth more where there are as many
already. They stay if that made the cluster faster; if not, a line or something else is the limit. While the slowest
stage is always busy, or a line is the limit, those beyond what is enough are taken away, a few at a time. A trial that
cost something is taken back, one that brought nothing too, and the like is not tried again for minutes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from ravnest.planner.cluster import Cluster, memory_bytes
from ravnest.planner.in_flight.measures import FlightMeasures
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.pipeline_depth import enough_in_flight
from ravnest.planner.problem import Goal, Provider

CHANGED: Final = 0.1
"""A stage, a way or a period that is so much longer or shorter than before has changed: what was found no longer
counts."""

PATIENCE_SECONDS: Final = 20.0
"""For so long there must have been a few more than enough, before one of them is taken away."""

AGAIN_SECONDS: Final = 60.0
"""After so long it is tried again what had failed; twice as long after each time that it failed again."""

COST: Final = 0.015
"""Of the rate: what fewer may cost without being missed."""
_MAX_DOUBLINGS: Final = 4


@dataclass(frozen=True, slots=True)
class Trial:
    """Another number is tried: the one before, and how long the period and the delays of links were with it."""

    limit: int
    period_seconds: float
    delays: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class FailedTrial:
    """A trial failed; what came of it counts until a moment, and while things are as they were."""

    until_seconds: float
    like_seconds: float
    """How long that was on which it hangs: the way where fewer were tried, the period where more were."""
    times: int = 1


@dataclass(frozen=True, slots=True)
class FlightMemory:
    """What decisions before have found, while stages are as fast as they were."""

    seconds: tuple[float, ...] = ()
    """Of each stage for one microbatch."""
    delays: tuple[float, ...] = ()
    """Of each link, as far as is known without waiting for the line."""
    trial: Trial | None = None
    fewer_cost: FailedTrial | None = None
    more_useless: FailedTrial | None = None
    spare_since: float | None = None
    """The moment from which on there were always more than enough."""


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
    limit = seen.limit
    if limit > most:
        return FlightDecision(most, f"no more than {most} may be in flight", replace(memory, trial=None))
    if changed := _changed_stage(seen, memory):
        return FlightDecision(limit, changed, replace(memory, seconds=(), trial=None, spare_since=None), afresh=True)
    memory = _looked(seen, memory)
    if memory.trial is not None:
        judged = _fewer_tried(seen, memory) if limit < memory.trial.limit else _more_tried(seen, memory)
        if isinstance(judged, FlightDecision):
            return judged
        memory = judged
    working = f"the slowest stage works {seen.busy:.0%} of the time"
    if not seen.is_idle:
        return _when_busy(seen, memory, working)
    if seen.is_starved:
        why = f"{working}, and the root has {seen.flying:.1f} of {limit}: it is fed no faster"
        return _keep(seen, memory, why)
    if limit >= most:
        return _when_useless(seen, memory, f"{working}, and no more than {most} may be in flight")
    if _counts(seen, memory.more_useless):
        return _when_useless(seen, memory, f"{working}, and more in flight did not make it faster")
    return _when_idle(seen, memory, most, working)


def when_planned(line_seconds: float) -> FlightMemory:
    """What is known when a run begins: where a line is the limit by the plan, and takes so long for a microbatch, more
    in flight will bring nothing. 0: a stage is the limit."""
    return FlightMemory(more_useless=FailedTrial(AGAIN_SECONDS, line_seconds) if line_seconds else None)


def max_in_flight(model: ModelCosts, goal: Goal, providers: Mapping[str, Provider], cluster: Cluster) -> int:
    """As many as the bound on staleness allows and the memory of every stage's provider holds."""
    at = {place: index for index, place in enumerate(model.places)}
    for number in range(goal.max_in_flight, cluster.in_flight, -1):
        held = memory_bytes(model, goal, number)
        if all(held[at[s.start], at[s.end]] <= providers[s.provider].memory_bytes for s in cluster.stages):
            return number
    return cluster.in_flight


def _changed_stage(seen: FlightMeasures, memory: FlightMemory) -> str:
    """Which stage takes another time than before, in words; empty where none does."""
    for stage, (now, then) in enumerate(zip(seen.seconds, memory.seconds, strict=False)):
        if abs(now - then) > (CHANGED + seen.noise) * max(seen.slowest_seconds, *memory.seconds):
            return f"stage {stage} takes {now:.3g} s for a microbatch, and took {then:.3g} s"
    return ""


def _looked(seen: FlightMeasures, memory: FlightMemory) -> FlightMemory:
    """The memory, with what is seen now and without what is out of date."""
    # Where a stage is the limit, nothing queues at the lines for long: delays are what they are now. Otherwise a queue
    # may be in them, and the least of all is nearest to the truth.
    delays = seen.delays if seen.is_busy else tuple(map(min, memory.delays or seen.delays, seen.delays))
    fewer, more = memory.fewer_cost, memory.more_useless
    if memory.trial is None:
        fewer = _still(fewer, seen.way_seconds(delays), seen.noise)
        more = _still(more, seen.period_seconds, seen.noise)
    seconds = memory.seconds or seen.seconds
    return replace(memory, seconds=seconds, delays=delays, fewer_cost=fewer, more_useless=more)


def _when_idle(seen: FlightMeasures, memory: FlightMemory, most: int, working: str) -> FlightDecision:
    """The slowest stage waits: as many as are enough for the way, and more than now in any case."""
    limit, way = seen.limit, seen.way_seconds(memory.delays)
    needed = enough_in_flight(way, seen.seconds, seen.slowest_seconds)
    if limit >= needed and not seen.is_full:
        return _keep(seen, memory, working)
    # Where a line was the limit before, it may well be still, and far fewer are enough.
    known = 0 if memory.more_useless is not None else min(needed, 4 * limit)
    wanted = min(most, max(limit + 1 + limit // 8, known))
    are = "should be enough" if limit >= needed else "are too few"
    return _try(seen, memory, wanted, f"{working}: {limit} {are} for a way of {way:.3g} s")


def _when_busy(seen: FlightMeasures, memory: FlightMemory, working: str) -> FlightDecision:
    """More would bring nothing: those beyond what is enough only wait for their turn."""
    limit, way = seen.limit, seen.way_seconds(memory.delays)
    spare = limit - enough_in_flight(way, seen.seconds, seen.slowest_seconds)
    if spare < 1:
        return _keep(seen, memory, f"{working}, and {limit} are no more than enough for a way of {way:.3g} s")
    queued = limit - way / seen.slowest_seconds
    return _without(spare, seen, memory, f"{working}, and {queued:.1f} of {limit} wait for their turn")


def _when_useless(seen: FlightMeasures, memory: FlightMemory, why: str) -> FlightDecision:
    """More bring nothing, or may not be, and the slowest stage waits: do some queue at a line that is the limit?

    One line alone has a queue, as those behind it get no more than it lets through: that with the delay that grew most.
    It takes a period for each microbatch, so a delay that is no longer than that is no queue.
    """
    limit, period = seen.limit, seen.period_seconds
    queue, least = max(zip(seen.delays, memory.delays, strict=True), key=lambda link: link[0] - link[1])
    queued = (queue - max(least, period)) / period
    way = seen.way_seconds(seen.delays) - queued * period
    spare = min(limit - enough_in_flight(way, seen.seconds, period), round(queued))
    if spare < 1:
        return _keep(seen, memory, why)
    return _without(spare, seen, memory, f"{why}: {queued:.1f} of {limit} wait for a line")


def _without(spare: int, seen: FlightMeasures, memory: FlightMemory, why: str) -> FlightDecision:
    """Fewer, by some of those that are to spare, where that has been so for long enough."""
    if _counts(seen, memory.fewer_cost):
        return _keep(seen, memory, f"{why}; fewer were slower")
    since = seen.at_seconds if memory.spare_since is None else memory.spare_since
    if not seen.is_full or (spare < 3 and seen.at_seconds - since < PATIENCE_SECONDS):
        return FlightDecision(seen.limit, why, replace(memory, spare_since=since))
    return _try(seen, memory, seen.limit - max(1, min(spare // 2, seen.limit // 4)), why)


def _fewer_tried(seen: FlightMeasures, memory: FlightMemory) -> FlightDecision | FlightMemory:
    """What came of fewer: they stay unless they cost something."""
    assert memory.trial is not None
    limit, before = seen.limit, memory.trial
    cost = 1 - before.period_seconds / seen.period_seconds
    if seen.is_busy:
        return replace(memory, trial=None)
    if cost < -CHANGED - seen.noise:
        # Not by having fewer: a stage or a line has become faster, and nothing is known of the number.
        return replace(memory, trial=None)
    if seen.is_long and cost <= COST:
        # Those that were taken away had brought nothing.
        useless = _found(seen, None, seen.period_seconds) if seen.is_idle else memory.more_useless
        return replace(memory, trial=None, more_useless=useless)
    if cost <= COST + seen.noise and not seen.is_long:
        return _keep(seen, memory, f"{limit} in flight are being tried instead of {before.limit}")
    # What was taken for a queue was the way.
    way = seen.way_seconds(seen.delays)
    memory = replace(memory, trial=None, delays=seen.delays, fewer_cost=_found(seen, memory.fewer_cost, way))
    return FlightDecision(before.limit, f"{limit} in flight cost {cost:.1%} of the rate", memory)


def _more_tried(seen: FlightMeasures, memory: FlightMemory) -> FlightDecision | FlightMemory:
    """What came of more: they stay if they brought a tenth of what they might have, or the slowest stage is busy."""
    assert memory.trial is not None
    limit, before = seen.limit, memory.trial
    gained = before.period_seconds / seen.period_seconds - 1
    worthwhile = min(0.05, 0.1 * (limit / before.limit - 1))
    # A line that is the limit has a queue, and those that were added wait in it.
    queues = sum(seen.delays) - sum(before.delays) >= (limit - before.limit) * seen.period_seconds / 2
    if gained >= worthwhile + seen.noise or (seen.is_full and not seen.is_idle):
        # With fewer, no line was the limit: what its delays were is the way.
        delays = tuple(map(min, before.delays, seen.delays))
        way, fewer = seen.way_seconds(delays), memory.fewer_cost
        if before.limit >= enough_in_flight(way, seen.seconds, seen.slowest_seconds):
            # It is more uneven than usual, and takes more than usual.
            fewer = _found(seen, fewer, way)
        return replace(memory, trial=None, delays=delays, fewer_cost=fewer)
    if not (seen.is_long or (seen.is_full and queues)):
        return _keep(seen, memory, f"{limit} in flight are being tried instead of {before.limit}")
    found = _found(seen, memory.more_useless, seen.period_seconds)
    why = f"{limit} in flight are not faster than {before.limit}: no stage is the limit"
    return FlightDecision(before.limit, why, replace(memory, trial=None, more_useless=found))


def _found(seen: FlightMeasures, before: FailedTrial | None, like_seconds: float) -> FailedTrial:
    times = 1 if before is None else before.times + 1
    wait = AGAIN_SECONDS * 2 ** min(times - 1, _MAX_DOUBLINGS)
    return FailedTrial(seen.at_seconds + wait, like_seconds, times)


def _still(finding: FailedTrial | None, like_seconds: float, noise: float) -> FailedTrial | None:
    """A finding while that on which it hangs is as long as it was."""
    if finding is None or abs(like_seconds - finding.like_seconds) > (CHANGED + noise) * finding.like_seconds:
        return None
    return finding


def _counts(seen: FlightMeasures, finding: FailedTrial | None) -> bool:
    return finding is not None and seen.at_seconds < finding.until_seconds


def _keep(seen: FlightMeasures, memory: FlightMemory, reason: str) -> FlightDecision:
    return FlightDecision(seen.limit, reason, replace(memory, spare_since=None))


def _try(seen: FlightMeasures, memory: FlightMemory, limit: int, reason: str) -> FlightDecision:
    trial = Trial(seen.limit, seen.period_seconds, seen.delays)
    return FlightDecision(limit, reason, replace(memory, trial=trial, spare_since=None))

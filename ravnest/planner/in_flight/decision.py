"""Decision on the number of microbatches in flight: the smallest that keeps the slowest stage or line busy.

A pure function of the measures of a window with the current number, and of the results of earlier decisions. By
Little's law, the number in flight is the rate of microbatches times the time of one, and both are measured. So the
required number is computed (planner/pipeline_depth.py), not searched for.

While the slowest stage waits, the decision tries the computed number, or an eighth more if that many are in flight
already. They stay if the cluster became faster; otherwise a line or something else is the limit. While the slowest
stage is always busy, or a line is the limit, the decision removes those beyond the required number, a few at a time. It
reverts a trial that cost rate or brought nothing, and does not repeat it for minutes.
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
"""Relative change of a stage, a round trip or a period from which on earlier findings no longer count."""

PATIENCE_SECONDS: Final = 20.0
"""Time with a few more than required in flight before one of them is removed."""

AGAIN_SECONDS: Final = 60.0
"""Time before a failed trial is repeated; doubled after each further failure."""

COST: Final = 0.015
"""Share of the rate that having fewer in flight may cost."""
_MAX_DOUBLINGS: Final = 4


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial of another number: the number before, with its period and its link delays."""

    limit: int
    period_seconds: float
    delays: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class FailedTrial:
    """A failed trial. Its result counts until a moment, and while the measured time stays the same."""

    until_seconds: float
    like_seconds: float
    """The measured time: the round trip if fewer were tried, the period if more were."""
    times: int = 1


@dataclass(frozen=True, slots=True)
class FlightMemory:
    """Results of earlier decisions, valid while the stages keep their speed."""

    seconds: tuple[float, ...] = ()
    """Time of each stage for one microbatch."""
    delays: tuple[float, ...] = ()
    """Delay of each link without queueing, as far as it is known."""
    trial: Trial | None = None
    fewer_cost: FailedTrial | None = None
    more_useless: FailedTrial | None = None
    spare_since: float | None = None
    """Since when there have always been more than required."""


@dataclass(frozen=True, slots=True)
class FlightDecision:
    """The number in flight from now on, and why; `memory` is an input of the next decision."""

    limit: int
    reason: str
    memory: FlightMemory = field(default_factory=FlightMemory)
    forgets_counts: bool = False
    """Whether everything measured so far is out of date."""


def decide_flight(seen: FlightMeasures, memory: FlightMemory, most: int) -> FlightDecision:
    """The number in flight, up to `most`, which memory and the bound on staleness allow."""
    limit = seen.limit
    if limit > most:
        return FlightDecision(most, f"no more than {most} may be in flight", replace(memory, trial=None))
    if changed := _changed_stage(seen, memory):
        return FlightDecision(
            limit, changed, replace(memory, seconds=(), trial=None, spare_since=None), forgets_counts=True
        )
    memory = _remembered(seen, memory)
    if memory.trial is not None:
        judged = _fewer_tried(seen, memory) if limit < memory.trial.limit else _more_tried(seen, memory)
        if isinstance(judged, FlightDecision):
            return judged
        memory = judged
    working = f"the slowest stage is busy {seen.busy:.0%} of the time"
    if not seen.is_idle:
        return _when_busy(seen, memory, working)
    if seen.is_starved:
        why = f"{working}, and the root has {seen.flying:.1f} of {limit}: the coordinator feeds it too slowly"
        return _keep(seen, memory, why)
    if limit >= most:
        return _when_useless(seen, memory, f"{working}, and no more than {most} may be in flight")
    if _counts(seen, memory.more_useless):
        return _when_useless(seen, memory, f"{working}, and more in flight did not make it faster")
    return _when_idle(seen, memory, most, working)


def when_planned(line_seconds: float) -> FlightMemory:
    """The memory at the start of a run. If a line is the planned limit, with this time for a microbatch, having more in
    flight will bring nothing; 0 if a stage is the limit."""
    return FlightMemory(more_useless=FailedTrial(AGAIN_SECONDS, line_seconds) if line_seconds else None)


def max_in_flight(model: ModelCosts, goal: Goal, providers: Mapping[str, Provider], cluster: Cluster) -> int:
    """The most in flight that the bound on staleness and the memory of every stage's provider allow."""
    at = {place: index for index, place in enumerate(model.places)}
    for number in range(goal.max_in_flight, cluster.in_flight, -1):
        held = memory_bytes(model, goal, number)
        if all(held[at[s.start], at[s.end]] <= providers[s.provider].memory_bytes for s in cluster.stages):
            return number
    return cluster.in_flight


def _changed_stage(seen: FlightMeasures, memory: FlightMemory) -> str:
    """The stage whose time has changed, in words; empty if there is none."""
    for stage, (now, then) in enumerate(zip(seen.seconds, memory.seconds, strict=False)):
        if abs(now - then) > (CHANGED + seen.noise) * max(seen.slowest_seconds, *memory.seconds):
            return f"stage {stage} takes {now:.3g} s for a microbatch, and took {then:.3g} s"
    return ""


def _remembered(seen: FlightMeasures, memory: FlightMemory) -> FlightMemory:
    """The memory with the new measures, and without outdated results."""
    # If a stage is the limit, nothing queues at the lines for long, and the current delays are right. Otherwise they
    # may include a queue, and the shortest ever seen is the best estimate.
    delays = seen.delays if seen.is_busy else tuple(map(min, memory.delays or seen.delays, seen.delays))
    fewer, more = memory.fewer_cost, memory.more_useless
    if memory.trial is None:
        fewer = _still(fewer, seen.way_seconds(delays), seen.noise)
        more = _still(more, seen.period_seconds, seen.noise)
    seconds = memory.seconds or seen.seconds
    return replace(memory, seconds=seconds, delays=delays, fewer_cost=fewer, more_useless=more)


def _when_idle(seen: FlightMeasures, memory: FlightMemory, most: int, working: str) -> FlightDecision:
    """The slowest stage waits: try the number required for the round trip, and more than now in any case."""
    limit, way = seen.limit, seen.way_seconds(memory.delays)
    needed = enough_in_flight(way, seen.seconds, seen.slowest_seconds)
    if limit >= needed and not seen.is_full:
        return _keep(seen, memory, working)
    # If a line was the limit before, it may still be, and far fewer are enough.
    known = 0 if memory.more_useless is not None else min(needed, 4 * limit)
    wanted = min(most, max(limit + 1 + limit // 8, known))
    are = "should be enough" if limit >= needed else "are too few"
    return _try(seen, memory, wanted, f"{working}: {limit} {are} for a round trip of {way:.3g} s")


def _when_busy(seen: FlightMeasures, memory: FlightMemory, working: str) -> FlightDecision:
    """The slowest stage is busy: those beyond the required number only queue."""
    limit, way = seen.limit, seen.way_seconds(memory.delays)
    spare = limit - enough_in_flight(way, seen.seconds, seen.slowest_seconds)
    if spare < 1:
        return _keep(seen, memory, f"{working}, and {limit} are no more than enough for a round trip of {way:.3g} s")
    queued = limit - way / seen.slowest_seconds
    return _without(spare, seen, memory, f"{working}, and {queued:.1f} of {limit} are queued")


def _when_useless(seen: FlightMeasures, memory: FlightMemory, why: str) -> FlightDecision:
    """The slowest stage waits, and having more brings nothing or is not allowed: do some queue at a limiting line?

    Only one line has a queue, as those behind it receive no more than it lets through: the line whose delay grew most.
    It takes a period for each microbatch, so a delay up to one period is no queue.
    """
    limit, period = seen.limit, seen.period_seconds
    queue, least = max(zip(seen.delays, memory.delays, strict=True), key=lambda link: link[0] - link[1])
    queued = (queue - max(least, period)) / period
    way = seen.way_seconds(seen.delays) - queued * period
    spare = min(limit - enough_in_flight(way, seen.seconds, period), round(queued))
    if spare < 1:
        return _keep(seen, memory, why)
    return _without(spare, seen, memory, f"{why}: {queued:.1f} of {limit} are queued at a line")


def _without(spare: int, seen: FlightMeasures, memory: FlightMemory, why: str) -> FlightDecision:
    """Fewer in flight by a part of the spare ones, if they have been spare for long enough."""
    if _counts(seen, memory.fewer_cost):
        return _keep(seen, memory, f"{why}; fewer were slower")
    since = seen.at_seconds if memory.spare_since is None else memory.spare_since
    if not seen.is_full or (spare < 3 and seen.at_seconds - since < PATIENCE_SECONDS):
        return FlightDecision(seen.limit, why, replace(memory, spare_since=since))
    return _try(seen, memory, seen.limit - max(1, min(spare // 2, seen.limit // 4)), why)


def _fewer_tried(seen: FlightMeasures, memory: FlightMemory) -> FlightDecision | FlightMemory:
    """Result of having fewer: kept unless it costs rate."""
    assert memory.trial is not None
    limit, before = seen.limit, memory.trial
    cost = 1 - before.period_seconds / seen.period_seconds
    if seen.is_busy:
        return replace(memory, trial=None)
    if cost < -CHANGED - seen.noise:
        # A stage or a line has become faster: the trial shows nothing about the number.
        return replace(memory, trial=None)
    if seen.is_long and cost <= COST:
        # The removed ones had brought nothing.
        useless = _found(seen, None, seen.period_seconds) if seen.is_idle else memory.more_useless
        return replace(memory, trial=None, more_useless=useless)
    if cost <= COST + seen.noise and not seen.is_long:
        return _keep(seen, memory, f"{limit} in flight are being tried instead of {before.limit}")
    # The supposed queue was part of the round trip.
    way = seen.way_seconds(seen.delays)
    memory = replace(memory, trial=None, delays=seen.delays, fewer_cost=_found(seen, memory.fewer_cost, way))
    return FlightDecision(before.limit, f"{limit} in flight cost {cost:.1%} of the rate", memory)


def _more_tried(seen: FlightMeasures, memory: FlightMemory) -> FlightDecision | FlightMemory:
    """Result of having more: kept if it brought a tenth of the possible gain, or if the slowest stage is busy."""
    assert memory.trial is not None
    limit, before = seen.limit, memory.trial
    gained = before.period_seconds / seen.period_seconds - 1
    worthwhile = min(0.05, 0.1 * (limit / before.limit - 1))
    # A limiting line has a queue, in which the added ones wait.
    queues = sum(seen.delays) - sum(before.delays) >= (limit - before.limit) * seen.period_seconds / 2
    if gained >= worthwhile + seen.noise or (seen.is_full and not seen.is_idle):
        # With fewer, no line was the limit: its delays then were without a queue.
        delays = tuple(map(min, before.delays, seen.delays))
        way, fewer = seen.way_seconds(delays), memory.fewer_cost
        if before.limit >= enough_in_flight(way, seen.seconds, seen.slowest_seconds):
            # The cluster is more uneven than usual, and needs more than usual.
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
    """The failed trial, while the time that it depends on is unchanged."""
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

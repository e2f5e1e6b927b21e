"""A pipeline of stages and lines in virtual time, with the engine's own schedule and the provider's own measurement of
delays: what the control of how many are in flight is tried on."""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ravnest.engine.schedule import ReadyCounts, Task, next_task
from ravnest.planner.in_flight.control import FlightControl, StageCounts
from ravnest.provider.links.link_delay import LinkDelay, ResidenceTimes

REPORT_SECONDS = 1.0


@dataclass
class Link:
    """One way between two stages."""

    bytes_per_second: float = float("inf")
    latency_seconds: float = 0.0
    free_at: float = 0.0
    arrived_at: float = 0.0

    def carry(self, now: float, size: float, late_seconds: float = 0.0) -> float:
        """When what is sent now arrives, if it is so late; what is sent later is not sooner there."""
        self.free_at = max(now, self.free_at) + size / self.bytes_per_second
        self.arrived_at = max(self.arrived_at, self.free_at + self.latency_seconds + late_seconds)
        return self.arrived_at


@dataclass(frozen=True)
class Uneven:
    """How real stages and lines differ from their means, as measured in the WAN lab."""

    stage_share: float = 0.0
    """Of the time of a forward or a backward: the standard deviation."""
    hiccup_share: float = 0.0
    """Of all forwards and backwards are held up,"""
    hiccup_seconds: float = 0.0
    """by so much."""
    late_seconds: float = 0.0
    """That frames come late, on average."""
    still_every_seconds: float = 0.0
    """So often each line stands still,"""
    still_seconds: float = 0.0
    """for so long."""
    seed: int = 0


EVEN = Uneven()


@dataclass
class SimulatedStage:
    number: int
    forward_seconds: float
    backward_seconds: float
    delay: LinkDelay
    residence: ResidenceTimes
    forwards: deque[int] = field(default_factory=deque)
    backwards: deque[int] = field(default_factory=deque)
    in_flight: int = 0
    busy: bool = False
    after: Task = Task.FORWARD
    limit: int | None = None
    forward: tuple[int, float] = (0, 0.0)
    """How many, and how long they took."""
    backward: tuple[int, float] = (0, 0.0)
    flown: tuple[float, float] = (0.0, 0.0)

    def flight_seconds(self, now: float) -> float:
        seconds, since = self.flown
        return seconds + self.in_flight * (now - since)

    def fly(self, now: float, change: int) -> None:
        self.flown = (self.flight_seconds(now), now)
        self.in_flight += change


class FlyingPipeline:
    """Runs until a moment; `completed` has the moments at which microbatches were done."""

    def __init__(
        self,
        stages: int,
        *,
        forward_seconds: float = 0.05,
        backward_seconds: float = 0.1,
        mbit: float = float("inf"),
        round_trip_seconds: float = 0.0,
        frame_bytes: float = 1 << 20,
        limit: int = 1,
        feed_seconds: float = 0.0,
        uneven: Uneven = EVEN,
        cores: int | None = None,
    ) -> None:
        """With `cores`, only so many stages work at once: they are on one machine."""
        self.now = 0.0
        self._cores = stages if cores is None else cores
        self._uneven = uneven
        self._random = random.Random(uneven.seed)
        self.completed: list[float] = []
        self.limits: list[tuple[float, int, str]] = []
        self.frame_bytes = frame_bytes
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._next = itertools.count()
        self._feed_seconds = feed_seconds
        clock = self._clock
        self.stages = [
            SimulatedStage(n, forward_seconds, backward_seconds, LinkDelay(clock), ResidenceTimes(clock))
            for n in range(stages)
        ]
        self.there = [Link(mbit * 125e3, round_trip_seconds / 2) for _ in range(stages - 1)]
        self.back = [Link(mbit * 125e3, round_trip_seconds / 2) for _ in range(stages - 1)]
        if uneven.still_every_seconds:
            for link in (*self.there, *self.back):
                self.at(self._random.uniform(0, uneven.still_every_seconds), partial(self._stand_still, link))
        self.stages[0].limit = limit
        self._feed()

    def _stand_still(self, link: Link) -> None:
        link.free_at = max(link.free_at, self.now) + self._uneven.still_seconds
        self.at(self.now + self._uneven.still_every_seconds, partial(self._stand_still, link))

    def _clock(self) -> float:
        return self.now

    def at(self, moment: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._order), action))

    def run_until(self, moment: float) -> None:
        while self._events and self._events[0][0] <= moment:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = moment

    def rate(self, since: float, until: float) -> float:
        """Microbatches a second, between the first and the last that were done within these moments."""
        inside = [moment for moment in self.completed if since <= moment <= until]
        return (len(inside) - 1) / (inside[-1] - inside[0])

    def controlled_by(self, control: FlightControl, message_seconds: float = 0.05) -> None:
        """From now on the stages report to this, at moments of their own, and the root does what it says."""
        for stage in self.stages:
            self.at(self.now + REPORT_SECONDS * (0.3 + 0.61 * stage.number % 1), lambda s=stage: report(s))

        def report(stage: SimulatedStage) -> None:
            counts = StageCounts(
                seconds=self.now,
                forwards=stage.forward[0],
                forward_seconds=stage.forward[1],
                backwards=stage.backward[0],
                backward_seconds=stage.backward[1],
                flight_seconds=stage.flight_seconds(self.now),
                delay_seconds=stage.delay.low_seconds,
            )
            self.at(self.now + message_seconds, lambda: hear(stage.number, counts))
            self.at(self.now + REPORT_SECONDS, lambda: report(stage))

        def hear(stage: int, counts: StageCounts) -> None:
            decision = control.take(stage, counts)
            if decision is not None:
                self.limits.append((self.now, decision.limit, decision.reason))
                self.at(self.now + message_seconds, lambda: obey(decision.limit))

        def obey(limit: int) -> None:
            self.stages[0].limit = limit
            self._work(self.stages[0])

    def _feed(self) -> None:
        """A root always has some to begin with, or gets one now and then."""
        root = self.stages[0]
        if self._feed_seconds:
            root.forwards.append(next(self._next))
            self.at(self.now + self._feed_seconds, self._feed)
            self._work(root)
            return
        while len(root.forwards) < 2:
            root.forwards.append(next(self._next))
        self._work(root)

    def _work(self, stage: SimulatedStage) -> None:
        if stage.busy or sum(each.busy for each in self.stages) >= self._cores:
            return
        waiting = ReadyCounts(len(stage.backwards), len(stage.forwards), 0)
        task = next_task(waiting, stage.in_flight, stage.limit, after=stage.after).task
        last = stage.number == len(self.stages) - 1
        if task is Task.WAIT:
            return
        stage.busy, stage.after = True, task
        if task is Task.FORWARD:
            microbatch = stage.forwards.popleft()
            forward = self._takes(stage.forward_seconds)
            backward = self._takes(stage.backward_seconds) if last else 0.0
            self.at(self.now + forward + backward, lambda: self._end_forward(stage, microbatch, forward, backward))
        else:
            microbatch = stage.backwards.popleft()
            stage.fly(self.now, -1)
            seconds = self._takes(stage.backward_seconds)
            self.at(self.now + seconds, lambda: self._end_backward(stage, microbatch, seconds))

    def _takes(self, seconds: float) -> float:
        """About so long."""
        uneven, draw = self._uneven, self._random
        held_up = uneven.hiccup_seconds if draw.random() < uneven.hiccup_share else 0.0
        return seconds * max(0.2, draw.gauss(1.0, uneven.stage_share)) + held_up

    def _late(self) -> float:
        late = self._uneven.late_seconds
        return self._random.expovariate(1 / late) if late else 0.0

    def _end_forward(self, stage: SimulatedStage, microbatch: int, forward: float, backward: float) -> None:
        stage.forward = (stage.forward[0] + 1, stage.forward[1] + forward)
        if stage.number == len(self.stages) - 1:
            self._end_backward(stage, microbatch, backward)
            return
        stage.busy = False
        stage.fly(self.now, 1)
        stage.delay.handed_over(microbatch)
        following = self.stages[stage.number + 1]

        def arrive() -> None:
            following.residence.arrived(microbatch)
            following.forwards.append(microbatch)
            self._work(following)

        self.at(self.there[stage.number].carry(self.now, self.frame_bytes, self._late()), arrive)
        if stage.number == 0 and not self._feed_seconds:
            self._feed()
        self._work_on(stage)

    def _end_backward(self, stage: SimulatedStage, microbatch: int, seconds: float) -> None:
        stage.busy = False
        stage.backward = (stage.backward[0] + 1, stage.backward[1] + seconds)
        if stage.number == 0:
            self.completed.append(self.now)
        else:
            before, stay = self.stages[stage.number - 1], stage.residence.left_micros(microbatch)

            def arrive() -> None:
                before.delay.returned(microbatch, stay)
                before.backwards.append(microbatch)
                self._work(before)

            self.at(self.back[stage.number - 1].carry(self.now, self.frame_bytes, self._late()), arrive)
        self._work_on(stage)

    def _work_on(self, stage: SimulatedStage) -> None:
        """The stage has ended a task: another one may need its core, which does not go by the order of the stages."""
        self._work(stage)
        if self._cores < len(self.stages):
            for other in self._random.sample(self.stages, len(self.stages)):
                self._work(other)


def fixed_rate(limit: int, seconds: float = 60.0, **shape: object) -> float:
    """What so many in flight reach once the pipeline is full."""
    pipeline = FlyingPipeline(limit=limit, **shape)  # type: ignore[arg-type]
    pipeline.run_until(seconds)
    return pipeline.rate(seconds / 2, seconds)


def min_in_flight(limit_rate: float, share: float, most: int = 32, **shape: object) -> int:
    """How many in flight are needed for this share of the best rate."""
    for limit in range(1, most + 1):
        if fixed_rate(limit, **shape) >= share * limit_rate:
            return limit
    return most


def settled(limits: Sequence[tuple[float, int, str]], start: int, since: float) -> set[int]:
    """Which limits there were from a moment on."""
    before = [limit for at, limit, _ in limits if at <= since]
    return {before[-1] if before else start, *(limit for at, limit, _ in limits if at > since)}

"""One case after another: waits for its moment, injects it, and watches how the swarm takes it."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Final

from tests.chaos.faults import Fault, fault
from tests.chaos.report import Outcome
from tests.chaos.schedule import Planned
from tests.chaos.sightings import missing
from tests.chaos.swarm import HOME, BrokenError, ChaosSwarm
from tests.chaos.watching import Mark

MOMENT_SECONDS: Final = 60.0
"""How long a round, a checkpoint, a deployment or an evaluation may let itself be waited for."""
GO_ON_SECONDS: Final = 90.0
"""How long it may take until training goes on. A failure is a swarm that stands still, not one on a busy machine: how
long it really takes is what the report says."""
BACK_SECONDS: Final = 90.0
WHOLE_SECONDS: Final = 90.0
MORE: Final = 20
"""Microbatches that must be completed before training goes on: more than can be in flight behind a lost stage."""

_BEGINS: Final = {
    "round": (("round_begun",), ("round", "round_skipped")),
    "checkpoint": (("checkpoint_begun",), ("checkpoint",)),
    "deployment": (("failover_begun", "reform_begun"), ("failover", "reformed")),
}
"""With which events something begins and ends."""


class Injector:
    """Does to a swarm what a schedule says."""

    def __init__(self, swarm: ChaosSwarm) -> None:
        self._swarm = swarm
        self._watch = swarm.watch
        self._since = 0.0
        self.injected_at: float | None = None
        """When the last case was injected, on the monotonic clock."""

    def meet(self, planned: Planned) -> Outcome:
        """Injects the case and heals it; BrokenError, with the reason, when the swarm cannot be used after it."""
        swarm, watch = self._swarm, self._watch
        self.recover([role for _, role in planned.case.faults])
        time.sleep(planned.pause_seconds)
        faults = self._choose(planned)
        before = self._until_moment(planned, [each.machine for each in faults])
        mark = watch.mark()
        began = self.injected_at = time.monotonic()
        for each in faults:
            each.inject(swarm)
        faults = [*before, *faults]
        held = [each for each in faults if each.hold_seconds is not None]
        # A coordinator that is killed cannot tell of the others; that they are back, the next one can.
        tellers = [each for each in faults if each.machine == HOME] or faults
        wanted = [sighting for each in tellers for sighting in each.seen()]
        start = mark if not before else self._before
        seen_seconds = went_on_seconds = back_seconds = None

        def told() -> bool:
            nonlocal seen_seconds
            for each in [each for each in held if time.monotonic() - began >= (each.hold_seconds or 0.0)]:
                each.heal(swarm)
                held.remove(each)
            self._check(held)
            if seen_seconds is None and not missing(wanted, watch.events(start)):
                seen_seconds = time.monotonic() - began
            return not held and seen_seconds is not None

        violations: list[str] = []
        if not watch.wait(told, GO_ON_SECONDS):
            never = " and ".join(missing(wanted, watch.events(start)))
            violations.append(f"{never} not among the events within {GO_ON_SECONDS:.0f} s")
        if self._goes_on():
            went_on_seconds = self._stood_until(mark)
        else:
            violations.append(f"training did not go on within {GO_ON_SECONDS:.0f} s")
        healed, at = watch.mark(), time.monotonic()
        for each in faults:
            if each.hold_seconds is None:
                each.heal(swarm)
        after = [sighting for each in faults for sighting in each.seen_after()]
        if watch.wait(lambda: self._checked(lambda: not missing(after, watch.events(healed))), BACK_SECONDS):
            back_seconds = time.monotonic() - at if after else None
        else:
            never = " and ".join(missing(after, watch.events(healed)))
            violations.append(f"{never} not among the events within {BACK_SECONDS:.0f} s of its healing")
        self._since = time.time()
        machines = tuple(each.machine for each in faults)
        return Outcome(
            planned.number, str(planned.case), machines, seen_seconds, went_on_seconds, back_seconds, tuple(violations)
        )

    def recover(self, roles: Sequence[str] = ()) -> None:
        """Waits until every cluster is there again and trains, and machines have these roles; BrokenError if not."""
        swarm, mark, since = self._swarm, self._watch.mark(), self._since

        def well() -> bool:
            swarm.check_running()
            return swarm.whole(since) and all(self._having(role) for role in roles) and swarm.all_train(mark)

        if not self._watch.wait(well, WHOLE_SECONDS):
            wanted = f", with somebody who is {' and '.join(roles)}" if roles else ""
            raise BrokenError(
                f"not every cluster trained {WHOLE_SECONDS:.0f} s after the case before{wanted}: {swarm.form()}\n"
                f"{swarm.said()}"
            )

    def _choose(self, planned: Planned) -> list[Fault]:
        """The machines that it happens to, which are different ones."""
        chosen: list[Fault] = []
        for kind, role in planned.case.faults:
            taken = {each.machine for each in chosen}
            among = [name for name in self._having(role) if name not in taken]
            if not among:
                raise BrokenError(f"{planned}: there is no {role} that it could happen to:\n{self._swarm.said()}")
            chosen.append(fault(kind, among[int(planned.choice * len(among))], role))
        return chosen

    def _having(self, role: str) -> Sequence[str]:
        if role == "coordinator":
            return [HOME]
        if role == "stranger":
            return [name for name in self._swarm.strangers if not self._swarm.machines[name].runs]
        return self._swarm.holders(role)

    def _until_moment(self, planned: Planned, machines: Sequence[str]) -> list[Fault]:
        """Waits for what it is to happen during; the faults that had to be injected for that."""
        swarm, watch, during = self._swarm, self._watch, planned.case.during
        if not during:
            return []
        faults: list[Fault] = []
        self._before = mark = watch.mark()
        if during == "evaluation":
            swarm.end_epoch()
            begun: Callable[[], bool] = lambda: swarm.evaluating  # noqa: E731 (one of two)
        else:
            if during == "deployment":
                roles = [(name, role) for role in ("leaf", "root", "stem") for name in swarm.holders(role)]
                name, role = next((name, role) for name, role in roles if name not in machines)
                faults.append(fault("kill", name, role))
                faults[0].inject(swarm)
            begins, ends = _BEGINS[during]

            def begun() -> bool:
                kinds = [event["kind"] for event in watch.events(mark) if event["kind"] in (*begins, *ends)]
                return bool(kinds) and kinds[-1] in begins

        if not watch.wait(lambda: self._checked(begun), MOMENT_SECONDS):
            raise BrokenError(f"{planned}: there was no {during} within {MOMENT_SECONDS:.0f} s:\n{swarm.said()}")
        return faults

    def _goes_on(self) -> bool:
        """Whether microbatches are completed that were not yet under way at this moment."""
        watch, mark = self._watch, self._watch.mark()
        return watch.wait(lambda: self._checked(lambda: len(watch.steps(mark)) >= MORE), GO_ON_SECONDS)

    def _stood_until(self, mark: Mark) -> float:
        """Until when training stood still: the end of the longest pause between two microbatches since the mark."""
        times = [mark.at, *(step["at"] for step in self._watch.steps(mark))]
        pauses = [(later - earlier, later) for earlier, later in itertools.pairwise(times)]
        longest, until = max(pauses, default=(0.0, mark.at))
        return until - mark.at if longest > 1.0 else 0.0

    def _checked(self, condition: Callable[[], bool]) -> bool:
        self._check(())
        return condition()

    def _check(self, held: Sequence[Fault]) -> None:
        """The coordinator has not ended by itself."""
        if not any(each.machine == HOME for each in held):
            self._swarm.check_running()

"""Injector of faults: waits for the moment of a case, injects it, and observes the reaction of the swarm."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Final

from tests.chaos.expected_events import missing
from tests.chaos.faults import Fault, fault
from tests.chaos.observer import Mark
from tests.chaos.report import Outcome
from tests.chaos.schedule import Planned
from tests.chaos.swarm import HOME, BrokenError, ChaosSwarm

MOMENT_SECONDS: Final = 60.0
"""Timeout for a round, a checkpoint, a deployment or an evaluation to begin."""
CONTINUE_SECONDS: Final = 90.0
"""Timeout until training continues: long, because a busy machine is no failure. The report has the real times."""
BACK_SECONDS: Final = 90.0
WHOLE_SECONDS: Final = 90.0
MORE: Final = 20
"""Completed microbatches after which training counts as continued: more than can be in flight behind a lost stage."""

_BEGINS: Final = {
    "round": (("round_begun",), ("round", "round_skipped")),
    "checkpoint": (("checkpoint_begun",), ("checkpoint",)),
    "deployment": (("failover_begun", "reform_begun"), ("failover", "reformed")),
}
"""Events with which each kind of moment begins and ends."""


class Injector:
    """Runs the cases of a schedule on a swarm."""

    def __init__(self, swarm: ChaosSwarm) -> None:
        self._swarm = swarm
        self._watch = swarm.watch
        self._since = 0.0
        self.injected_at: float | None = None
        """When the last case was injected, on the monotonic clock."""

    def run(self, planned: Planned) -> Outcome:
        """Injects the case and heals it. BrokenError: the swarm cannot be used after it; the message is the reason."""
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
        # A killed coordinator cannot report the other faults; the next one reports that the machines are back.
        tellers = [each for each in faults if each.machine == HOME] or faults
        wanted = [event for each in tellers for event in each.expected()]
        start = mark if not before else self._before
        seen_seconds = continued_seconds = back_seconds = None

        def is_reported() -> bool:
            nonlocal seen_seconds
            for each in [each for each in held if time.monotonic() - began >= (each.hold_seconds or 0.0)]:
                each.heal(swarm)
                held.remove(each)
            self._check(held)
            if seen_seconds is None and not missing(wanted, watch.events(start)):
                seen_seconds = time.monotonic() - began
            return not held and seen_seconds is not None

        violations: list[str] = []
        if not watch.wait(is_reported, CONTINUE_SECONDS):
            never = " and ".join(missing(wanted, watch.events(start)))
            violations.append(f"{never} not among the events within {CONTINUE_SECONDS:.0f} s")
        if self._continues():
            continued_seconds = self._stood_still_seconds(mark)
        else:
            violations.append(f"training did not continue within {CONTINUE_SECONDS:.0f} s")
        healed, at = watch.mark(), time.monotonic()
        for each in faults:
            if each.hold_seconds is None:
                each.heal(swarm)
        after = [event for each in faults for event in each.expected_after_healing()]
        if watch.wait(lambda: self._checked(lambda: not missing(after, watch.events(healed))), BACK_SECONDS):
            back_seconds = time.monotonic() - at if after else None
        else:
            never = " and ".join(missing(after, watch.events(healed)))
            violations.append(f"{never} not among the events within {BACK_SECONDS:.0f} s of its healing")
        self._since = time.time()
        machines = tuple(each.machine for each in faults)
        return Outcome(
            planned.number,
            str(planned.case),
            machines,
            seen_seconds,
            continued_seconds,
            back_seconds,
            tuple(violations),
        )

    def recover(self, roles: Sequence[str] = ()) -> None:
        """Waits until every cluster is complete and trains, and machines have these roles; BrokenError: timeout."""
        swarm, mark, since = self._swarm, self._watch.mark(), self._since

        def well() -> bool:
            swarm.check_running()
            return (
                swarm.is_whole(since)
                and all(self._machines_with_role(role) for role in roles)
                and swarm.all_stages_train(mark)
            )

        if not self._watch.wait(well, WHOLE_SECONDS):
            wanted = f", with a {' and a '.join(roles)}" if roles else ""
            raise BrokenError(
                f"not every cluster trained {WHOLE_SECONDS:.0f} s after the case before{wanted}: {swarm.layout()}\n"
                f"{swarm.output()}"
            )

    def _choose(self, planned: Planned) -> list[Fault]:
        """The faults of the case, each on another machine."""
        chosen: list[Fault] = []
        for kind, role in planned.case.faults:
            taken = {each.machine for each in chosen}
            among = [name for name in self._machines_with_role(role) if name not in taken]
            if not among:
                raise BrokenError(f"{planned}: there is no {role} for it:\n{self._swarm.output()}")
            chosen.append(fault(kind, among[int(planned.choice * len(among))], role))
        return chosen

    def _machines_with_role(self, role: str) -> Sequence[str]:
        if role == "coordinator":
            return [HOME]
        if role == "stranger":
            return [name for name in self._swarm.strangers if not self._swarm.machines[name].is_running]
        return self._swarm.holders(role)

    def _until_moment(self, planned: Planned, machines: Sequence[str]) -> list[Fault]:
        """Waits for the moment of the case; returns the faults that had to be injected for it."""
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
            raise BrokenError(f"{planned}: there was no {during} within {MOMENT_SECONDS:.0f} s:\n{swarm.output()}")
        return faults

    def _continues(self) -> bool:
        """Whether microbatches are completed that were not yet in flight at this moment."""
        watch, mark = self._watch, self._watch.mark()
        return watch.wait(lambda: self._checked(lambda: len(watch.steps(mark)) >= MORE), CONTINUE_SECONDS)

    def _stood_still_seconds(self, mark: Mark) -> float:
        """Seconds from the mark to the end of the longest pause between two microbatches since then."""
        times = [mark.at, *(step["at"] for step in self._watch.steps(mark))]
        pauses = [(later - earlier, later) for earlier, later in itertools.pairwise(times)]
        longest, until = max(pauses, default=(0.0, mark.at))
        return until - mark.at if longest > 1.0 else 0.0

    def _checked(self, condition: Callable[[], bool]) -> bool:
        self._check(())
        return condition()

    def _check(self, held: Sequence[Fault]) -> None:
        """Raises BrokenError if the coordinator has ended by itself."""
        if not any(each.machine == HOME for each in held):
            self._swarm.check_running()

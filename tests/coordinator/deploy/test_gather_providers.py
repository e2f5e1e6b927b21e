"""For how many providers a run waits before it begins, and for how long an interrupted one waits for its own."""

import asyncio
from typing import cast

import pytest

from ravnest.coordinator.deploy.gather_providers import gather
from ravnest.coordinator.swarm.members import LentMachine, Member, Members
from ravnest.errors import PlanError
from ravnest.planner.plan import Plan

PLAN = cast(Plan, object())
NEEDED = 2
"""Providers that the model needs."""


class _Connected(Member):
    """A provider whose control stream is open."""

    @property
    def present(self) -> bool:
        return True


class Bench:
    def __init__(self) -> None:
        self.members = Members()
        self.said: list[str] = []

    def come(self, *names: str) -> None:
        for name in names:
            self.members.put(_Connected(name, "", LentMachine("cpu", 1)))
        self.members.changes.notify()

    async def plan(self, present: list[Member]) -> Plan:
        if len(present) < NEEDED:
            raise PlanError("the model does not fit")
        return PLAN

    def gather(
        self, count: int | None, expected: int = 0, seconds: float = 60.0
    ) -> "asyncio.Task[tuple[list[Member], Plan | None, str]]":
        return asyncio.create_task(gather(self.members, count, self.plan, self.said.append, expected, seconds))


async def _turns() -> None:
    """Lets the other tasks run until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_new_run_begins_as_soon_as_the_model_fits() -> None:
    async def test() -> None:
        bench = Bench()
        gathering = bench.gather(None)
        bench.come("anna")
        await _turns()
        assert not gathering.done() and "the model does not fit" in bench.said[0]
        bench.come("ben")
        present, plan, _ = await gathering
        assert [member.node_id for member in present] == ["ben", "anna"] and plan is PLAN

    asyncio.run(test())


def test_an_interrupted_run_waits_for_the_providers_that_it_had() -> None:
    async def test() -> None:
        bench = Bench()
        bench.come("anna", "ben")
        gathering = bench.gather(None, expected=3)
        await _turns()
        assert not gathering.done()
        assert bench.said == [
            "waiting up to 1:00 for the other providers of this run: 2 of 3 are back "
            "(--providers 2 continues with those that are here)"
        ]
        bench.come("carla")
        present, plan, _ = await gathering
        assert len(present) == 3 and plan is PLAN

    asyncio.run(test())


def test_a_provider_that_does_not_come_back_does_not_hold_the_run_up_for_ever() -> None:
    async def test() -> None:
        bench = Bench()
        bench.come("anna", "ben")
        present, plan, why = await bench.gather(None, expected=3, seconds=0.01)
        assert len(present) == 2 and plan is PLAN
        assert "the others did not come back" in why

    asyncio.run(test())


@pytest.mark.parametrize("count", [1, 3])
def test_a_number_that_was_asked_for_is_waited_for_whatever_the_run_had(count: int) -> None:
    async def test() -> None:
        bench = Bench()
        bench.come("anna")
        gathering = bench.gather(count, expected=2)
        await _turns()
        assert gathering.done() == (count == 1)
        bench.come("ben", "carla")
        assert len((await gathering)[0]) == count and bench.said == []

    asyncio.run(test())

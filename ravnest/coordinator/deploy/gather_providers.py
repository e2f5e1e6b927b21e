"""Waiting for enough providers to begin."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from ravnest.coordinator.swarm.members import Member, Members
from ravnest.errors import PlanError
from ravnest.planner.plan import Plan
from ravnest.units import duration


async def gather(
    members: Members,
    count: int | None,
    plan: Callable[[list[Member]], Awaitable[Plan]],
    tell: Callable[[str], None],
    expected: int = 0,
    return_seconds: float = 0.0,
) -> tuple[list[Member], Plan | None, str]:
    """The providers that may take a stage, a plan that shows that the model fits into their memory, and the reason why
    they are enough.

    With a count, these are the first `count` providers, and no plan is made yet. Without a count, they are all
    providers that are connected when `plan` first raises no PlanError; `tell` is called with what is missing until
    then. If the run had more providers before it was interrupted, as `expected` says, the others have `return_seconds`
    to come back.
    """
    if count is not None:
        return await members.wait_for(count), None, "as many as were requested"
    told, why = "", "the model fits into their memory"
    while True:
        present = members.in_order()
        try:
            if present:
                found = await plan(present)
                if len(present) >= expected:
                    return present, found, why
                if not await _come_back(members, expected, return_seconds, tell):
                    why += f", and the others did not come back within {duration(return_seconds)}"
                    expected = 0
                continue
        except PlanError as error:
            if str(error) != told:
                told = str(error)
                tell(f"waiting for more memory: {told}")
        await members.changes.until(lambda before=present: members.in_order() != before)  # type: ignore[misc]


async def _come_back(members: Members, expected: int, seconds: float, tell: Callable[[str], None]) -> bool:
    """Waits until as many providers as expected are there; whether they are."""
    here = len(members.in_order())
    tell(
        f"waiting up to {duration(seconds)} for the other providers of this run: {here} of {expected} are back "
        f"(--providers {here} continues with those that are here)"
    )
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await members.changes.until(lambda: len(members.in_order()) >= expected)
    return len(members.in_order()) >= expected

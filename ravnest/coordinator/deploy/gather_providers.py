"""Waiting until enough providers are there to begin."""

from collections.abc import Awaitable, Callable

from ravnest.coordinator.swarm.members import Member, Members
from ravnest.errors import PlanError
from ravnest.planner.plan import Plan


async def gather(
    members: Members,
    count: int | None,
    plan: Callable[[list[Member]], Awaitable[Plan]],
    tell: Callable[[str], None],
) -> tuple[list[Member], Plan | None, str]:
    """The providers that may take a stage, the plan that shows that the model fits into their memory, and the reason.

    With a count, these are the first `count` providers, and they are not planned with yet. Without a count, they are
    all that are there once `plan` raises no PlanError; `tell` is called with what is still missing.
    """
    if count is not None:
        return await members.wait_for(count), None, f"{count} were asked for"
    told = ""
    while True:
        present = members.in_order()
        try:
            if present:
                return present, await plan(present), "the model fits into the memory there is"
        except PlanError as error:
            if str(error) != told:
                told = str(error)
                tell(f"waiting for more memory: {told}")
        await members.changes.until(lambda before=present: members.in_order() != before)  # type: ignore[misc]

"""Waiting for enough providers to begin."""

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
    """The providers that may take a stage, a plan that shows that the model fits into their memory, and the reason why
    they are enough.

    With a count, these are the first `count` providers, and no plan is made yet. Without a count, they are all
    providers that are connected when `plan` first raises no PlanError; `tell` is called with what is missing until
    then.
    """
    if count is not None:
        return await members.wait_for(count), None, "as many as were requested"
    told = ""
    while True:
        present = members.in_order()
        try:
            if present:
                return present, await plan(present), "the model fits into their memory"
        except PlanError as error:
            if str(error) != told:
                told = str(error)
                tell(f"waiting for more memory: {told}")
        await members.changes.until(lambda before=present: members.in_order() != before)  # type: ignore[misc]

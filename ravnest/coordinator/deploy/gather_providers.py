"""Waiting until enough providers are there to begin."""

import asyncio
from collections.abc import Callable

from ravnest.coordinator.swarm.members import Member, Members
from ravnest.errors import PlanError


async def gather(
    members: Members, count: int | None, fits: Callable[[list[Member]], None], tell: Callable[[str], None]
) -> tuple[list[Member], str]:
    """Who may take a stage, and why these.

    They are the first `count` that are there; without a count, all that are there once the model fits into their
    memory: `fits` raises PlanError while it does not. `tell` hears what is still missing.
    """
    if count is not None:
        return await members.wait_for(count), f"{count} were asked for"
    told = ""
    while True:
        present = members.in_order()
        try:
            if present:
                await asyncio.to_thread(fits, present)
                return present, "the model fits into the memory there is"
        except PlanError as error:
            if str(error) != told:
                told = str(error)
                tell(f"waiting for more memory: {told}")
        await members.changes.until(lambda before=present: members.in_order() != before)  # type: ignore[misc]

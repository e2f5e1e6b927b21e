"""Waiting until enough providers are there to begin."""

import asyncio
from collections.abc import Callable

from ravnest.coordinator.members import Member, Members
from ravnest.coordinator.prepare import Prepared
from ravnest.planner.memory import Enough, enough_memory


async def gather(
    members: Members, prepared: Prepared, count: int | None, tell: Callable[[str], None]
) -> tuple[list[Member], str]:
    """Who is to take a stage, in order, and why these.

    They are the first `count` that are there; without a count, as many as have the memory for the model together.
    `tell` hears what is still missing.
    """
    if count is not None:
        return await members.wait_for(count), f"{count} were asked for"
    told = ""
    while True:
        present = members.in_order()
        found = await asyncio.to_thread(_enough, prepared, present)
        if found.count:
            return present[: found.count], found.reason
        if present and found.reason != told:
            tell(f"waiting for more memory: {found.reason}")
            told = found.reason
        await members.changes.until(lambda before=present: members.in_order() != before)  # type: ignore[misc]


def _enough(prepared: Prepared, present: list[Member]) -> Enough:
    return enough_memory(prepared.captured.graph, prepared.costs, [member.memory_bytes for member in present])

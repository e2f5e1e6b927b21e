"""The network's loop ends with everything that ran on it."""

import asyncio

from ravnest.coordinator.launch.network_loop import NetworkLoop


def test_what_is_left_over_at_the_end_is_cancelled_and_waited_for() -> None:
    said: list[str] = []

    async def without_end() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            # The loop still turns for those who have something to undo.
            await asyncio.sleep(0)
            said.append("undone")

    tasks: list[asyncio.Task[None]] = []

    async def started() -> None:
        tasks.append(asyncio.create_task(without_end()))
        await asyncio.sleep(0)

    with NetworkLoop() as loop:
        loop.call(started())
    assert said == ["undone"]
    assert tasks[0].cancelled()

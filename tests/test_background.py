"""Background tasks: what an owner hears of their ends, and what closing waits for."""

import asyncio
import threading

import pytest

from ravnest.background import BackgroundTasks, in_thread


def test_an_owner_hears_of_errors_and_not_of_cancellation() -> None:
    async def scenario() -> None:
        errors: list[BaseException] = []
        tasks = BackgroundTasks(errors.append)

        async def fail() -> None:
            raise ValueError("broken")

        tasks.spawn(fail())
        waiting = tasks.spawn(asyncio.Event().wait())
        await asyncio.sleep(0)
        await tasks.close()
        assert [str(error) for error in errors] == ["broken"]
        assert waiting.cancelled() and len(tasks) == 0

    asyncio.run(scenario())


def test_a_block_ends_when_its_tasks_have_cleaned_up() -> None:
    async def scenario() -> None:
        cleaned_up = False

        async def work() -> None:
            nonlocal cleaned_up
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                cleaned_up = True

        async with BackgroundTasks() as tasks:
            tasks.spawn(work())
            await asyncio.sleep(0)
        assert cleaned_up

    asyncio.run(scenario())


def test_a_cancelled_caller_waits_for_its_thread() -> None:
    async def scenario() -> None:
        began, release, ended = threading.Event(), threading.Event(), threading.Event()

        def work() -> None:
            began.set()
            release.wait(10)
            ended.set()

        calling = asyncio.create_task(in_thread(work))
        await asyncio.to_thread(began.wait, 10)
        calling.cancel()
        await asyncio.sleep(0)
        assert not calling.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert ended.is_set()

    asyncio.run(scenario())

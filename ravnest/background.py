"""Background tasks with an owner, and blocking calls in a thread that a cancelled caller still waits for.

asyncio keeps only weak references to tasks and forgets the exceptions of those that are not awaited. `BackgroundTasks`
holds the tasks of one owner, reports their exceptions to it, and cancels and awaits them when the owner closes.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from ravnest.errors import RavnestError

log = logging.getLogger(__name__)

T = TypeVar("T")


class BackgroundTasks:
    """The tasks that one owner has started. Used on one event loop; `async with` closes it at the end of the block.

    An exception that ends a task is passed to `on_error`. Without `on_error`, it stays with the task that `spawn`
    returned, and is logged if it is not a RavnestError. A cancelled task is not an error. After `close`, the object can
    be used again.
    """

    def __init__(self, on_error: Callable[[BaseException], None] | None = None) -> None:
        self._on_error = on_error
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        """The number of tasks that are still running."""
        return len(self._tasks)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task and keep it until it has ended."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def cancel(self) -> None:
        """Cancel every running task, without waiting for it."""
        for task in self._tasks:
            task.cancel()

    async def wait(self) -> None:
        """Wait until the tasks that are running now have ended by themselves."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Cancel every running task and wait until all have ended. Idempotent."""
        await cancel_and_wait(*self._tasks)

    def _on_done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if self._on_error is not None:
            self._on_error(error)
        elif not isinstance(error, RavnestError):
            log.error("a background task failed", exc_info=error)


async def cancel_and_wait(*tasks: "asyncio.Future[Any] | None") -> None:
    """Cancel these tasks and wait until they have ended; None stands for a task that was never started."""
    present = [task for task in tasks if task is not None]
    for task in present:
        task.cancel()
    await asyncio.gather(*present, return_exceptions=True)


async def in_thread(function: Callable[[], T]) -> T:
    """Call a function that may block, in a thread. A caller that is cancelled waits until the function has returned.

    Files that the function uses can therefore be closed as soon as this coroutine ends, however it ends.
    """
    task = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise

"""Network loop: the event loop on a thread of its own, for a caller that is not asynchronous."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from ravnest.errors import RavnestError

_END_SECONDS: Final = 5.0

T = TypeVar("T")


class NetworkLoop:
    """Runs coroutines for another thread, until the end of its block."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ravnest-net", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Tasks that are left over, such as gRPC's, would log that their exceptions were never retrieved.
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_all_ended(), self._loop).result(_END_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine and returns its result. A KeyboardInterrupt in the calling thread cancels it."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call_quietly(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine during cleanup, where an error must not replace the one before it."""
        with suppress(RavnestError, asyncio.CancelledError):
            self.call(work)

    @contextmanager
    def running(self, work: Coroutine[Any, Any, None]) -> Iterator[None]:
        """Runs a coroutine in the background, at most until the end of the block."""
        task = self.call(_started(work))
        try:
            yield
        finally:
            self.call_quietly(_ended(task))

    def soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function on the loop; does nothing when the loop has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


async def _started(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    return asyncio.create_task(work)


async def _all_ended() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


async def _ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

"""Waiting on one event loop for something to become true."""

import asyncio
from collections.abc import Callable


class Changes:
    """Who waits for what. `notify` looks at every condition again; it is cheap and is called after each change."""

    def __init__(self) -> None:
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns once the condition holds."""
        if condition():
            return
        waiter = condition, asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter[1]
        finally:
            self._waiters.remove(waiter)

    def notify(self) -> None:
        """Something has changed."""
        for condition, future in self._waiters:
            if not future.done() and condition():
                future.set_result(None)

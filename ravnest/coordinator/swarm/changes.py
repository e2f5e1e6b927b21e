"""Condition variable for coroutines of one event loop."""

import asyncio
from collections.abc import Callable


class Changes:
    """Wakes waiters whose condition holds. `notify` checks all conditions, and is called after each change."""

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
        """Wakes the waiters whose condition holds now."""
        for condition, future in self._waiters:
            if not future.done() and condition():
                future.set_result(None)

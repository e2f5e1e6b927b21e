"""A coroutine that is driven by hand, so that waking it costs no turn of the event loop.

An asyncio task that waits is woken in the loop's next turn, and each turn costs a system call and a hand-over of
the interpreter lock, about as much as writing a small frame. A sender that finds the writer idle wakes it with
`resume` instead, and the frame is on its way before `send` returns.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any


class EagerTask:
    """Runs a coroutine that awaits nothing but asyncio futures. `done` is a future that gets no result but None.

    - An exception that leaves the coroutine goes to the loop's exception handler.
    - `cancel` throws CancelledError into the coroutine at once; it is not meant to survive that.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._coroutine = coroutine
        self._awaited: asyncio.Future[Any] | None = None
        self._running = False
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._step(None)

    def resume(self, awaited: "asyncio.Future[None]") -> None:
        """Complete the future that the coroutine may be waiting for and, if it is, run on from there now."""
        if awaited.done():
            return
        awaited.set_result(None)
        if awaited is self._awaited and not self._running:
            awaited.remove_done_callback(self._wake)
            self._step(None)

    def cancel(self) -> None:
        """Stop the coroutine where it waits; nothing happens when it is over or is itself the one who asks."""
        if self.done.done() or self._running:
            return
        if self._awaited is not None:
            self._awaited.remove_done_callback(self._wake)
        self._step(asyncio.CancelledError())

    def _wake(self, _: "asyncio.Future[Any]") -> None:
        self._step(None)

    def _step(self, error: BaseException | None) -> None:
        self._running = True
        try:
            awaited = self._coroutine.send(None) if error is None else self._coroutine.throw(error)
        except (StopIteration, asyncio.CancelledError):
            self.done.set_result(None)
        except Exception as failure:
            self.done.set_result(None)
            self._loop.call_exception_handler({"message": "a driven coroutine failed", "exception": failure})
        else:
            # The mark by which a future tells whoever drives a coroutine that it is awaited, and not merely yielded.
            awaited._asyncio_future_blocking = False
            awaited.add_done_callback(self._wake)
            self._awaited = awaited
        finally:
            self._running = False

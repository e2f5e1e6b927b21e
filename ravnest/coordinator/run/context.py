"""The course of a run on the network's loop: what it waits for, what has gone wrong, and the work on the side."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from ravnest.coordinator.run.timeouts import DEFAULT_TIMEOUTS, Timeouts
from ravnest.coordinator.swarm.changes import Changes
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.errors import DiskFullError, PeerError, RavnestError, RunError, TrainingError
from ravnest.monitor.events import EventLog
from ravnest.net.v1.control_pb2 import CoordinatorMessage

T = TypeVar("T")


class Course:
    """What the parts of a coordinator share. Once the run has failed, every wait raises why."""

    def __init__(self, swarm: Swarm, events: EventLog, timeouts: Timeouts = DEFAULT_TIMEOUTS) -> None:
        self.timeouts = timeouts
        self.failure: RavnestError | None = None
        self.on_failure: Callable[[], None] = lambda: None
        """Called when training cannot go on, for whoever is busy elsewhere and not waiting here."""
        self.make_room: Callable[[DiskFullError], bool] = lambda error: False
        """Called when the disk is full: makes room at the cost of something that can be spared, and says whether."""
        self._swarm = swarm
        self._events = events
        self._changes = Changes()
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def closing(self) -> bool:
        return self._closing

    def notify(self) -> None:
        """Something has changed: whoever waits looks again."""
        self._changes.notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for the condition; raises the failure that makes it hopeless."""
        await self._changes.until(lambda: self.failure is not None or condition())
        if self.failure is not None:
            raise self.failure

    async def while_well(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, unless the run fails first."""
        task = asyncio.ensure_future(work)
        failed = asyncio.ensure_future(self.until(lambda: False))
        try:
            await asyncio.wait([task, failed], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                failed.result()
            return task.result()
        finally:
            task.cancel()
            failed.cancel()
            await asyncio.gather(task, failed, return_exceptions=True)

    def fail(self, error: RavnestError) -> None:
        """Training cannot go on: whoever waits, and whoever comes to wait, gets this error."""
        if self.failure is None and not self._closing:
            self.failure = error
            self.notify()
            self.on_failure()

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """What the disk refuses while a provider is heard ends the run, not the provider's stream.

        A disk that is full ends it only where no room can be made; a line that was not written then is missing.
        """
        try:
            yield
        except DiskFullError as error:
            try:
                if not self.make_room(error):
                    self.fail(error)
            except RunError as worse:
                self.fail(worse)
        except RunError as error:
            self.fail(error)

    def emit(self, kind: str, reason: str, **values: Any) -> None:
        """Writes an event; a disk that refuses it ends the run, unless room can be made."""
        with self.failing():
            self._events.emit(kind, reason, **values)

    async def tell(self, node_id: str, message: CoordinatorMessage) -> None:
        """Says something to a provider; that one is gone is heard elsewhere."""
        with contextlib.suppress(PeerError, KeyError):
            await self._swarm.tell(node_id, message)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Does something on the side, until the run is over. What it raises ends the run."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, RavnestError):
            self.fail(error)
        elif error is not None:
            self.fail(TrainingError(f"the coordinator failed: {type(error).__name__}: {error}"))

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            action()

        self.spawn(wait())

    async def close(self) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

"""Context of a run: the objects that all its parts share, and the rules for waiting, failing and background work."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from ravnest.background import BackgroundTasks, cancel_and_wait
from ravnest.coordinator.access.swarm_store import Position
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.feed.ledger import Ledger
from ravnest.coordinator.health.standstill_watch import StandstillWatch
from ravnest.coordinator.report.phase import DEPLOYED, LAST, Phase, may_follow
from ravnest.coordinator.report.progress import Progress
from ravnest.coordinator.report.recorder import Recorder
from ravnest.coordinator.run.timeouts import DEFAULT_TIMEOUTS, Timeouts
from ravnest.coordinator.swarm.changes import Changes
from ravnest.coordinator.swarm.members import Members
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.errors import DiskFullError, PeerError, RavnestError, RunError, TrainingError
from ravnest.monitor.display import Display
from ravnest.monitor.events import EventLog
from ravnest.net.v1.control_pb2 import CoordinatorMessage

log = logging.getLogger(__name__)

T = TypeVar("T")


class RunContext:
    """Created on any thread; all methods run on the network's event loop.

    - Once the run has failed, every wait raises the failure.
    - An exception in a background task ends the run.
    - A line of a log that cannot be written ends the run; on a full disk, only if no room can be made for it.
    """

    def __init__(
        self,
        swarm: Swarm,
        events: EventLog,
        progress: Progress,
        recorder: Recorder,
        display: Display,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        self.swarm = swarm
        self.progress = progress
        self.recorder = recorder
        self.display = display
        self.timeouts = timeouts
        self.min_providers = 1
        """Before its first deployment, the run ends if fewer providers are connected or can still join."""
        self.failure: RavnestError | None = None
        """The error that ended the run; None while it goes on."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called when training cannot go on: the requester's thread may be busy and not waiting here."""
        self.make_room: Callable[[DiskFullError], bool] = lambda error: False
        """Called when the disk is full; removes what is not needed, and tells whether that made room."""
        self.give_up: Callable[[str, str], None] = lambda node_id, reason: None
        """Ends a provider's session for a reason; others take its stage."""
        self.standstill = StandstillWatch(self.emit, self.say)
        self._events = events
        self._changes = Changes()
        self._is_closing = False
        self._tasks = BackgroundTasks(self._on_task_error)

    @property
    def ledger(self) -> Ledger:
        return self.progress.ledger

    @property
    def members(self) -> Members:
        return self.swarm.members

    @property
    def is_closing(self) -> bool:
        return self._is_closing

    @property
    def present(self) -> set[str]:
        """The ids of the providers that are connected."""
        return {member.node_id for member in self.members.connected()}

    def position(self) -> Position:
        """The position of the run, for a coordinator that is restarted."""
        ledger = self.ledger
        return Position(ledger.fed, ledger.completed, ledger.updates, ledger.samples, time.time())

    def missing_from(self, cluster: ClusterRun) -> list[str]:
        """The providers of a cluster that are not connected, or were lost since its last rebuild began."""
        return [n for n in cluster.nodes if n in cluster.losses.gone or not self.members.is_present(n)]

    def enter(self, phase: Phase, step: str = "") -> None:
        """Begins a phase of the run, or a step of one, and shows it. After one of the `LAST` phases, any other phase is
        a step of that one."""
        before = self.progress.phase
        if before in LAST and phase not in LAST:
            phase, step = before, step or phase.value
        if not may_follow(before, phase):
            log.error("the run went from '%s' to '%s', which its state machine does not have", before, phase)
        self.standstill.moved()
        self.progress.phase, self.progress.step, self.progress.fetching = phase, step, {}
        self.display.show(self.progress.snapshot())

    def enter_fed(self, phase: Phase) -> None:
        """Begins a phase of a deployed run, unless the run is being redeployed: the redeployment enters the right phase
        when it ends."""
        if self.progress.phase in (*DEPLOYED, *LAST):
            self.enter(phase)

    def begin_step(self, text: str) -> None:
        """Shows a step of the current phase; an empty text ends the step."""
        self.enter(self.progress.phase, text)

    def say(self, text: str) -> None:
        """Shows the user a message."""
        self.display.message(text)

    def notify(self) -> None:
        """Wakes the waiters whose condition holds now; called after each change of the run's state."""
        self._changes.notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for the condition; raises the failure of the run."""
        await self._changes.until(lambda: self.failure is not None or condition())
        if self.failure is not None:
            raise self.failure

    async def while_well(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; raises the failure of the run if that comes first."""
        task = asyncio.ensure_future(work)
        failed = asyncio.ensure_future(self.until(lambda: False))
        try:
            await asyncio.wait([task, failed], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                failed.result()
            return task.result()
        finally:
            await cancel_and_wait(task, failed)

    def fail(self, error: RavnestError) -> None:
        """Ends the run: every wait, now and later, raises this error."""
        if self.failure is None and not self._is_closing:
            self.failure = error
            self.notify()
            self.on_failure()

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Ends the run if the disk refuses something in this block, and not the stream of the provider that sent it.

        If room can be made on a full disk, the run goes on without the line.
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
        """Writes an event."""
        with self.failing():
            self._events.emit(kind, reason, **values)

    async def tell(self, node_id: str, message: CoordinatorMessage) -> None:
        """Sends a message to a provider. If the provider is gone, nothing happens: the swarm reports that."""
        with contextlib.suppress(PeerError, KeyError):
            await self.swarm.tell(node_id, message)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts a background task, which ends with the run at the latest."""
        self._tasks.spawn(work)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Calls `action` after a delay, if the run still goes on."""

        async def wait() -> None:
            await asyncio.sleep(seconds)
            action()

        self.spawn(wait())

    async def close(self) -> None:
        """Ends the background tasks. The run cannot fail any more."""
        self._is_closing = True
        await self._tasks.close()

    def _on_task_error(self, error: BaseException) -> None:
        if isinstance(error, RavnestError):
            self.fail(error)
        else:
            self.fail(TrainingError(f"the coordinator failed: {type(error).__name__}: {error}"))

"""Ctrl-C and SIGTERM while a run goes on, and a run that fails while the requester's own code keeps it waiting."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Self

_STEP_SECONDS = 1.0
"""How long a step of the requester's code may go on after an interrupt: most end at once, and a data loader that is
broken off in the middle of one leaves noise and workers behind."""


class Interrupted(KeyboardInterrupt):
    """The process was asked to stop. `exit_code` is what a shell expects then: 128 and the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class RunOver(BaseException):
    """The run has failed while the requester's code was at work: there is nothing left to wait for."""


class Interrupts:
    """Within its block, SIGINT and SIGTERM raise Interrupted in the main thread.

    - One that comes while the run is `stopping` already calls `hurry` and raises once more.
    - Signals that are ignored, or for which the requester's program has a handler of its own, stay as they are.
    - In another thread than the main one nothing changes: Python has signals nowhere else.
    """

    def __init__(self) -> None:
        self.stopping = False
        self.hurry: Callable[[], None] = _nothing
        self._before: dict[int, Any] = {}
        self._asked: int | None = None
        self._over = False
        self._in_users_code = False
        self._waking = False

    @property
    def exit_code(self) -> int:
        """That of a process which did as it was asked."""
        return 128 + (self._asked or signal.SIGINT)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number, replaced in _REPLACED.items():
                if replaced(signal.getsignal(number)):
                    self._replace(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    @contextmanager
    def users_code(self) -> Iterator[None]:
        """Surrounds one step of the requester's code, which may take as long as it likes.

        Interrupted or RunOver is raised at the end of the step, or in the midst of it when that does not come soon.
        """
        self._in_users_code = True
        try:
            self._raise_what_is_due()
            yield
        except Exception:
            # Ctrl-C at a terminal ends a data loader's workers too: that they are gone is not what went wrong.
            self._raise_what_is_due()
            raise
        finally:
            self._in_users_code = False
        self._raise_what_is_due()

    def wake(self) -> None:
        """The run is over, the requester's code need not finish its step. May be called from any thread."""
        self._over = True
        self._break_in()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._waking and number == signal.SIGINT:
            self._waking = False
            if self._in_users_code:
                self._raise_what_is_due()
            return
        again, self._asked = self._asked is not None, number
        if not again:
            # A data loader raises an error from here when a worker is killed; Ctrl-C at a terminal kills them all.
            self._replace(signal.SIGCHLD, signal.SIG_DFL)
        if self.stopping:
            self.__exit__(None, None, None)
            self.hurry()
        elif self._in_users_code and not again:
            timer = threading.Timer(_STEP_SECONDS, self._break_in)
            timer.daemon = True
            timer.start()
            return
        raise Interrupted(number)

    def _replace(self, number: int, handler: Any) -> None:
        before = signal.getsignal(number)
        # None is a handler that Python did not set, and could not put back.
        if before is not None:
            self._before[number] = before
            signal.signal(number, handler)

    def _break_in(self) -> None:
        if signal.SIGINT in self._before:
            self._waking = True
            # A real signal, because nothing else ends a call that blocks.
            with suppress(ProcessLookupError):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _raise_what_is_due(self) -> None:
        if self._asked is not None:
            raise Interrupted(self._asked)
        if self._over:
            raise RunOver


def _nothing() -> None:
    pass


_REPLACED: dict[int, Callable[[Any], bool]] = {
    # asyncio's own handler would only cancel a task that is waiting for this very thread.
    signal.SIGINT: lambda handler: handler is not signal.SIG_IGN,
    signal.SIGTERM: lambda handler: handler is signal.SIG_DFL,
}

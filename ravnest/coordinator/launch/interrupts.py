"""Interrupts: Ctrl-C and SIGTERM during a run, and the failure of a run while the requester's own code blocks."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Self

_STEP_SECONDS = 1.0
"""How long a step of the requester's code may go on after an interrupt. Most steps end at once, and a data loader that
is interrupted within a step leaves error messages and workers behind."""
_KNOCK_SECONDS = 0.1
_NUDGES = 3
_KNOCK = signal.SIGURG
"""Signal that ends a blocking call. Its default action is to do nothing, so a late one does no harm."""


class Interrupted(KeyboardInterrupt):
    """The process was asked to stop. `exit_code` is the one that a shell expects: 128 plus the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class RunOver(BaseException):
    """The run has failed while the requester's code was running."""


class Interrupts:
    """Within its block, SIGINT, SIGTERM and SIGHUP (a closed terminal) raise Interrupted in the main thread.

    - A second signal, while the run is `stopping`, calls `hurry` and raises again.
    - Signals that are ignored, or for which the requester's program has its own handler, stay as they are.
    - In another thread than the main one nothing changes, because Python delivers signals only to the main thread.
    """

    def __init__(self) -> None:
        self.stopping = False
        self.hurry: Callable[[], None] = lambda: None
        self._before: dict[int, Any] = {}
        self._asked: int | None = None
        self._over = False
        self._in_users_code = False
        self._heard = threading.Event()
        self._breaking = False
        self._bell: int | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of the process after the signal that was received."""
        return 128 + (self._asked or signal.SIGINT)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number, replaced in _REPLACED.items():
                if replaced(signal.getsignal(number)):
                    self._replace(number, self._on_signal)
            if signal.SIGINT in self._before:
                self._replace(_KNOCK, self._on_knock)
                self._watch()
            _active.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bell is not None:
            bell, self._bell = self._bell, None
            signal.set_wakeup_fd(-1)
            os.close(bell)
        while self._before:
            signal.signal(*self._before.popitem())
        if self in _active:
            _active.remove(self)

    @contextmanager
    def users_code(self) -> Iterator[None]:
        """Surrounds one step of the requester's code, which may take any time.

        Interrupted or RunOver is raised at the end of the step, or within it when the step does not end soon.
        """
        self._in_users_code = True
        try:
            self.check()
            yield
        except Exception:
            # Ctrl-C at a terminal also ends a data loader's workers: their end is not the error to report.
            self.check()
            raise
        finally:
            self._in_users_code = False
        self.check()

    def check(self) -> None:
        """Raises an interrupt that was lost, because Python drops an exception in a destructor and in some imports."""
        if self._asked is not None:
            raise Interrupted(self._asked)
        if self._over:
            raise RunOver

    def wake(self) -> None:
        """The run is over, so that the requester's code need not finish its step. Any thread may call this."""
        self._over = True
        self._break_in()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self._asked = self._asked is not None, number
        if not again:
            # A data loader raises an error from this handler when a worker is killed, and Ctrl-C at a terminal kills
            # all of them.
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
        # None stands for a handler that was not set by Python, which Python could not restore.
        if before is not None:
            self._before[number] = before
            signal.signal(number, handler)

    def _watch(self) -> None:
        """Makes a signal effective even if it arrives just before a blocking call, which it would then not end: the
        system's wakeup descriptor wakes a thread, which interrupts that call a moment later."""
        ear, bell = os.pipe()
        os.set_blocking(bell, False)
        if (others := signal.set_wakeup_fd(bell, warn_on_full_buffer=False)) != -1:
            # An event loop on this thread uses the descriptor for the same purpose.
            signal.set_wakeup_fd(others)
            os.close(ear)
            os.close(bell)
            return
        self._bell = bell
        threading.Thread(target=_nudge, args=(ear,), name="ravnest-signals", daemon=True).start()

    def _break_in(self) -> None:
        self._breaking = True
        self._heard.clear()
        threading.Thread(target=self._knock, name="ravnest-knock", daemon=True).start()

    def _knock(self) -> None:
        # A real signal, because nothing else ends a blocking call; and several, because a signal that arrives after
        # Python's last check and before the call blocks does not end it.
        while _KNOCK in self._before and not self._heard.is_set():
            with suppress(ProcessLookupError):
                signal.pthread_kill(threading.main_thread().ident or 0, _KNOCK)
            self._heard.wait(_KNOCK_SECONDS)

    def _on_knock(self, number: int, frame: FrameType | None) -> None:
        self._heard.set()
        if self._breaking and self._in_users_code:
            self.check()


def _nudge(ear: int) -> None:
    with open(ear, "rb", buffering=0) as notes:
        while note := notes.read(1):
            if note[0] in _REPLACED:
                for _ in range(_NUDGES):
                    time.sleep(_KNOCK_SECONDS)
                    with suppress(ProcessLookupError):
                        signal.pthread_kill(threading.main_thread().ident or 0, _KNOCK)


_REPLACED: dict[int, Callable[[Any], bool]] = {
    # asyncio's own handler would only cancel a task that is waiting for this very thread.
    signal.SIGINT: lambda handler: handler is not signal.SIG_IGN,
    signal.SIGTERM: lambda handler: handler is signal.SIG_DFL,
    signal.SIGHUP: lambda handler: handler is signal.SIG_DFL,
}

# Processes forked from this one (data loader workers) get their original handlers back.
_active: list[Interrupts] = []


def _let_go_in_child() -> None:
    for interrupts in list(_active):
        interrupts.__exit__(None, None, None)


os.register_at_fork(after_in_child=_let_go_in_child)

"""The providers of a warm `ravnest train`: forked from it before it has begun, as it was from its mother.

They are its children as those of a cold one are, end with it and are seen as such (tests/warm_mother.py).
"""

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from ravnest.cli.main import main as ravnest_main
from ravnest.coordinator.launch import provider_processes
from tests.warm_mother import become


def children_are_forked() -> None:
    """From now on this process forks the providers of its swarm where it would have started them anew."""
    inherited = _open_files()

    def fork(command: list[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
        return cast("subprocess.Popen[bytes]", _Child(command, environment, inherited))

    provider_processes.start_process = fork


class _Child:
    """As much of `subprocess.Popen` as ravnest/coordinator/launch/provider_processes.py uses."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], inherited: frozenset[int]) -> None:
        self.args = list(command)
        self.returncode: int | None = None
        self._lock = threading.Lock()
        (their_input, our_input), (our_output, their_output) = os.pipe(), os.pipe()
        errors = os.dup(2)
        self.pid = os.fork()
        if not self.pid:
            descriptors = [their_input, their_output, errors]
            words = self.args[self.args.index("ravnest") + 1 :]
            order = {
                "program": "",
                "words": words,
                "folder": str(Path.cwd()),
                "environment": dict(environment),
                "namespace": "",
                "session": True,
                "group": False,
                "descriptors": descriptors,
            }
            _be(order, inherited | {*descriptors})
        for descriptor in (their_input, their_output, errors):
            os.close(descriptor)
        self._ended = os.pidfd_open(self.pid)
        self.stdin: IO[bytes] = open(our_input, "wb")  # noqa: SIM115
        self.stdout: IO[bytes] = open(our_output, "rb")  # noqa: SIM115

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        with self._lock:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        # A number that nobody has asked about is still that of this process.
        with self._lock:
            if self.returncode is None:
                os.kill(self.pid, signal.SIGKILL)


def _be(order: dict[str, Any], kept: frozenset[int]) -> None:
    """The whole life of a child: what its parent was about to do is none of its business."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in _open_files() - kept:
            os.close(descriptor)
        become(order)
        code = ravnest_main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _open_files() -> frozenset[int]:
    # One of those that are listed is the list itself, and closed again.
    return frozenset(number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True

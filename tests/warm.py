"""`ravnest` processes that start at once: forked from one that has imported what they need (tests/warm_mother.py).

Importing torch takes two seconds of a core, in each of the hundreds of processes that the tests start: on two cores
that was several minutes of nothing else. What is started here is a process of its own, with its own memory, files,
signals and network; only how it came to its imports is different. So are the providers of embedded swarms, of those
that tests start themselves (tests/conftest.py) and of a warm `ravnest train` (tests/warm_children.py). Tests of the
command line itself (tests/e2e) start it anew.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast

from tests.warm_mother import WARM

ROOT: Final = Path(__file__).parent.parent
COMMAND: Final = [sys.executable, "-m", "ravnest"]
_THREADS: Final = "1"
_ROOM: Final = 4096
_ENTERING: Final = ["ip", "netns", "exec"]


class Order(NamedTuple):
    """A command that can be started warm."""

    namespace: str
    """The network namespace that it enters; empty for none."""
    program: str
    """A module or file of these tests; empty for `ravnest`."""
    words: list[str]
    """The arguments."""


def order_of(command: Sequence[str], environment: Mapping[str, str] | None) -> Order | None:
    """The command as an order; None when it is neither `ravnest` nor a program of these tests, or is not told with how
    many threads to compute."""
    words, namespace = list(command), ""
    if words[:3] == _ENTERING:
        namespace, words = words[3], words[4:]
    if not (environment or os.environ).get("OMP_NUM_THREADS", "").isdecimal() or words[:1] != [sys.executable]:
        return None
    if words[:3] == COMMAND:
        return Order(namespace, "", words[3:])
    if words[1] == "-m" and words[2].startswith("tests."):
        return Order(namespace, words[2], words[3:])
    return Order(namespace, words[1], words[2:]) if Path(words[1]).is_relative_to(ROOT / "tests") else None


class WarmProcess:
    """As much of `subprocess.Popen` as tests use."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        process_group: int | None = None,
        start_new_session: bool = False,
        text: bool = False,
    ) -> None:
        asked = order_of(command, env)
        assert asked is not None and process_group in (None, 0)
        self.args = list(command)
        self.returncode: int | None = None
        self.stdin: IO[Any] | None = None
        self.stdout: IO[Any] | None = None
        self.stderr: IO[Any] | None = None
        self._ended, told = os.pipe()
        self._looking = threading.Lock()
        given, closed_after = [], [told]
        for number, (name, wanted) in enumerate((("stdin", stdin), ("stdout", stdout), ("stderr", stderr))):
            if wanted is None:
                given.append(number)
            elif wanted == subprocess.DEVNULL:
                given.append(os.open(os.devnull, os.O_RDWR))
                closed_after.append(given[-1])
            elif wanted == subprocess.PIPE:
                read, write = os.pipe()
                theirs, ours = (write, read) if number else (read, write)
                opened = open(ours, ("r" if number else "w") if text else ("rb" if number else "wb"))  # noqa: SIM115
                setattr(self, name, opened)
                given.append(theirs)
                closed_after.append(theirs)
            elif wanted == subprocess.STDOUT:
                given.append(given[1])
            else:
                given.append(wanted if isinstance(wanted, int) else wanted.fileno())
        order = {
            **asked._asdict(),
            "folder": str(Path(cwd or os.getcwd()).resolve()),
            "environment": dict(os.environ if env is None else env),
            "session": start_new_session,
            "group": process_group is not None,
        }
        try:
            self.pid = _mother().fork(order, [*given, told])
        finally:
            for descriptor in closed_after:
                os.close(descriptor)

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def __del__(self) -> None:
        os.close(self._ended)

    def _look(self, timeout_seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout_seconds)[0]:
            with self._looking:
                if self.returncode is None:
                    said = os.read(self._ended, 16)
                    # Nothing is said where the mother is gone: then its children are, too.
                    self.returncode = int(said) if said else -signal.SIGKILL
        return self.returncode


class NotWarmError(Exception):
    """Nothing can be forked on this machine; the text says why."""


class Mother:
    """The process that forks the others; one for each process of the tests. NotWarmError where it may not fork."""

    def __init__(self, path: Path = ROOT) -> None:
        self._asked, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OMP_NUM_THREADS": _THREADS, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
        command = [sys.executable, "-m", "tests.warm_mother", str(theirs.fileno()), " " * _ROOM]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self._lock = threading.Lock()
        said = self._asked.recv(_ROOM)
        if said != WARM:
            self._end()
            raise NotWarmError(said.decode() or "the process that forks others did not start")
        atexit.register(self._end)

    def fork(self, order: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        with self._lock:
            socket.send_fds(self._asked, [json.dumps(order).encode()], list(descriptors))
            return int(self._asked.recv(16))

    def _end(self) -> None:
        self._asked.close()
        self._process.wait()


mothers: dict[int, Mother | NotWarmError] = {}
"""By the process that asks: the process that forks for it, or why none can."""
_making = threading.Lock()


def _mother() -> Mother:
    with _making:
        # One that was inherited belongs to another process.
        if os.getpid() not in mothers:
            try:
                mothers[os.getpid()] = Mother()
            except NotWarmError as reason:
                mothers[os.getpid()] = reason
                warnings.warn(f"processes start cold here, which takes longer: {reason}", stacklevel=2)
        found = mothers[os.getpid()]
    if isinstance(found, NotWarmError):
        raise found
    return found


Process = subprocess.Popen[Any] | WarmProcess


def start_warm(command: list[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Starts a provider of an embedded swarm, warm if possible: takes the place of
    `ravnest.coordinator.launch.provider_processes.start_process`."""
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
    return cast("subprocess.Popen[bytes]", started(command, env=environment, **options))


def started(command: Sequence[str], **options: Any) -> Process:
    """A process: warm, where that can be."""
    if order_of(command, options.get("env")) is not None:
        with suppress(NotWarmError):
            _mother()
            return WarmProcess(command, **options)
    return subprocess.Popen(command, **options)

"""A process that has imported what `ravnest` needs, and forks one that runs it whenever it is asked to (tests/warm.py).

`python -m tests.warm_mother FD ROOM`, with a socket to whoever asks: it ends, and all it has started, when that is
closed. ROOM is nothing but room for the words of those that it becomes.
"""

import contextlib
import ctypes
import gc
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Any, Final

WARM: Final = b"warm"
"""What it says once it can be asked to fork; anything else is the reason why it cannot."""
_MAX_BYTES: Final = 1 << 20
_CLONE_NEWNET: Final = 0x40000000
_STANDARD: Final = 3


class Mother:
    def __init__(self, asked: socket.socket) -> None:
        self._asked = asked
        self._selector = selectors.DefaultSelector()
        self._selector.register(asked, selectors.EVENT_READ)
        self._children: dict[int, tuple[int, int]] = {}
        """By the file descriptor that tells of its end: a child, and where its exit code is written to."""

    def work(self) -> dict[str, Any] | None:
        """Forks whenever it is asked to. In a child it returns what that is to do; None when nobody asks any more."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._asked:
                    self._ended(int(key.fd))
                    continue
                order, descriptors = self._next()
                if order is None:
                    for child, _ in self._children.values():
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(child, signal.SIGKILL)
                    return None
                ended = descriptors.pop()
                child = os.fork()
                if not child:
                    os.close(ended)
                    self._leave()
                    return {**order, "descriptors": descriptors}
                for descriptor in descriptors:
                    os.close(descriptor)
                watch = os.pidfd_open(child)
                self._children[watch] = child, ended
                self._selector.register(watch, selectors.EVENT_READ)
                self._asked.send(str(child).encode())

    def _next(self) -> tuple[dict[str, Any] | None, list[int]]:
        data, descriptors, _, _ = socket.recv_fds(self._asked, _MAX_BYTES, 8)
        return (json.loads(data) if data else None), list(descriptors)

    def _ended(self, watch: int) -> None:
        child, told = self._children.pop(watch)
        self._selector.unregister(watch)
        os.close(watch)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(BrokenPipeError):
            os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(told)

    def _leave(self) -> None:
        """What is the mother's is no business of a child."""
        self._selector.close()
        self._asked.close()
        for watch, (_, told) in self._children.items():
            os.close(watch)
            os.close(told)


def become(order: dict[str, Any]) -> None:
    """Makes this process what the order says: where it is, what it has open, and who its group is."""
    descriptors = order["descriptors"]
    os.setsid() if order["session"] else os.setpgid(0, 0) if order["group"] else None
    if order["namespace"]:
        namespace = os.open(f"/run/netns/{order['namespace']}", os.O_RDONLY | os.O_CLOEXEC)
        if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"the namespace {order['namespace']} cannot be entered")
        os.close(namespace)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, open(number, "w" if number else "r", buffering=1, closefd=False))  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    sys.argv = [order["program"] or "ravnest", *order["words"]]
    _show([sys.executable, *([] if order["program"] else ["-m"]), *sys.argv])
    _compute_with(int(order["environment"]["OMP_NUM_THREADS"]))
    # What a process that was started anew has first there.
    sys.path[0] = order["folder"]


def _show(words: list[str]) -> None:
    """What others see as this process's command, in place of its mother's: tests tell processes apart by it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # The 48th and 49th of all fields; these begin with the third.
    start, end = int(fields[45]), int(fields[46])
    shown = "".join(f"{word}\0" for word in words).encode()[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def _compute_with(threads: int) -> None:
    import torch

    # Read from the environment when torch is imported, which was before.
    torch.set_num_threads(threads)


def why_not_fork() -> str:
    """Why children that are forked from this process would not work; empty where they would.

    A fork has the thread that forks alone, and whatever another thread had locked stays locked in it. CUDA starts
    threads of its own, on some machines as soon as torch looks for a GPU, and refuses to work in a fork.
    """
    import torch

    with open("/proc/self/status") as status:
        [threads] = [int(line.split()[1]) for line in status if line.startswith("Threads:")]
    if threads != 1:
        return f"its imports have started {threads - 1} more thread{'' if threads == 2 else 's'}"
    return "CUDA is in use there" if torch.cuda.is_initialized() else ""  # type: ignore[no-untyped-call]


def main() -> int:
    import torch._dynamo
    import torch.export

    import ravnest.coordinator.launch.embedded
    import ravnest.coordinator.launch.session
    import ravnest.provider.agent  # noqa: F401
    from ravnest.cli import join, serve, train  # noqa: F401
    from ravnest.cli.main import main as ravnest_main
    from tests.warm_children import children_are_forked

    # The first capture of a process imports more than any other part of a run.
    torch.export.export(
        torch.nn.ReLU(), (torch.ones(2, 2),), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False
    )
    asked = socket.socket(fileno=int(sys.argv[1]))
    if reason := why_not_fork():
        asked.send(reason.encode())
        return 1
    gc.collect()
    gc.freeze()
    # An interrupt that is typed at a terminal is for others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asked.send(WARM)
    order = Mother(asked).work()
    if order is None:
        return 0
    assert len(order["descriptors"]) == _STANDARD
    become(order)
    children_are_forked()
    if order["program"]:
        run = runpy.run_path if order["program"].endswith(".py") else runpy.run_module
        run(order["program"], run_name="__main__")
        return 0
    return ravnest_main()


if __name__ == "__main__":
    sys.exit(main())

"""A swarm of real processes on addresses of their own: one `ravnest serve`, and the `ravnest join`s of a test."""

from contextlib import ExitStack
from pathlib import Path

from ravnest.net.identity.swarm_invite import SwarmInvite
from tests.e2e.command import Running, ravnest


class Swarm:
    """One `ravnest serve` and the `ravnest join`s that a test starts; all end with the test."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self._addresses = iter(range(3, 250))

    def serve(self, *words: str, port: int | None = 0) -> tuple[Running, SwarmInvite]:
        """The coordinator, once it has printed its invite; port None: where it was before."""
        listen = () if port is None else ("--listen", f"127.0.0.2:{port}")
        command = ("serve", "job.py", *listen, "--run", "run", *words)
        running = self._stack.enter_context(Running(*command, folder=self.folder, warm=True))
        assert running.process.stdout is not None
        line = running.process.stdout.readline().decode()
        if not line:
            raise AssertionError(running.to_the_end())
        assert line.startswith("invite: ravnest join ravnest://127.0.0.2:"), line
        return running, SwarmInvite.parse(line.removeprefix("invite: ravnest join "))

    def join(self, invite: SwarmInvite, name: str, *options: str) -> Running:
        """A provider on an address of its own, unless it dials out only."""
        listen = () if "--outbound-only" in options else ("--listen", f"127.0.0.{next(self._addresses)}:0")
        words = ("join", invite.line, "--name", name, *listen)
        return self._stack.enter_context(Running(*words, *options, folder=self.folder, warm=True))

    def new_invite(self, *words: str) -> SwarmInvite:
        made = ravnest("invite", "run", "--new", *words, folder=self.folder, warm=True)
        assert made.returncode == 0, made.stderr
        return SwarmInvite.parse(made.stdout.removeprefix("invite: ravnest join "))


def ended_well(running: Running) -> str:
    said = running.to_the_end()
    assert running.process.returncode == 0, said
    assert "Traceback" not in said and "error" not in said, said
    return said

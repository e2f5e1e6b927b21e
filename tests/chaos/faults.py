"""Kinds of faults: how each is injected and healed, and the events that the run must report.

A fault with `hold_seconds` is healed after that time. All others last until training continues without the machine: the
swarm does not wait for a machine that is stopped or disconnected.
"""

import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final

from tests.chaos.expected_events import ExpectedEvent, event_of, event_of_any, replacement_of
from tests.chaos.swarm import HOME, ChaosSwarm

LOSS: Final = 0.2
RATE: Final = 0.05
BACK: Final = ("joined", "reconnected")
NOTICED: Final = ("suspected", "disconnected", "lost")


class Fault(ABC):
    """One fault of one machine; created when it is injected."""

    kind: ClassVar[str]
    roles: ClassVar[tuple[str, ...]]
    """Roles of the machines that it may affect."""
    hold_seconds: ClassVar[float | None] = None
    """Time until it is healed; None: until training continues without the machine."""

    def __init__(self, machine: str, role: str) -> None:
        self.machine = machine
        self.role = role

    @property
    def holds_stage(self) -> bool:
        return self.role in ("root", "stem", "leaf")

    @abstractmethod
    def inject(self, swarm: ChaosSwarm) -> None: ...

    @abstractmethod
    def heal(self, swarm: ChaosSwarm) -> None: ...

    @abstractmethod
    def expected(self) -> Sequence[ExpectedEvent]:
        """Events that must be reported before training counts as continued."""

    def expected_after_healing(self) -> Sequence[ExpectedEvent]:
        """Events that must be reported after it is healed."""
        return ()

    def __str__(self) -> str:
        return f"{self.kind} {self.machine} ({self.role})"


class Kill(Fault):
    """SIGKILL, like a power failure. The machine returns later."""

    kind = "kill"
    roles = ("root", "stem", "leaf", "standby")

    def inject(self, swarm: ChaosSwarm) -> None:
        swarm.machines[self.machine].kill()

    def heal(self, swarm: ChaosSwarm) -> None:
        swarm.join(self.machine)

    def expected(self) -> Sequence[ExpectedEvent]:
        # A standby blocks no cluster: its broken connection is reported at once, its loss only when it stays away.
        if self.holds_stage:
            return [event_of(self.machine, "lost"), replacement_of(self.machine)]
        return [event_of(self.machine, *NOTICED)]

    def expected_after_healing(self) -> Sequence[ExpectedEvent]:
        return [event_of(self.machine, "joined")]


class KillCoordinator(Fault):
    """SIGKILL of the coordinator, which is restarted a little later; until then it reports no events."""

    kind = "kill"
    roles = ("coordinator",)
    hold_seconds = 2.0

    def inject(self, swarm: ChaosSwarm) -> None:
        swarm.machines[HOME].kill()

    def heal(self, swarm: ChaosSwarm) -> None:
        swarm.restart_coordinator()

    def expected(self) -> Sequence[ExpectedEvent]:
        return [event_of_any("resumed_swarm")]


class Stop(Fault):
    """SIGSTOP until training continues without the machine: connected, but silent. Then SIGCONT."""

    kind = "stop"
    roles = ("root", "stem", "leaf")

    def inject(self, swarm: ChaosSwarm) -> None:
        swarm.machines[self.machine].signal(signal.SIGSTOP)

    def heal(self, swarm: ChaosSwarm) -> None:
        swarm.machines[self.machine].signal(signal.SIGCONT)

    def expected(self) -> Sequence[ExpectedEvent]:
        return [event_of(self.machine, *NOTICED), replacement_of(self.machine)]

    def expected_after_healing(self) -> Sequence[ExpectedEvent]:
        return [event_of(self.machine, *BACK)]


class Cut(Fault):
    """The machine's line is dead for some seconds, in both directions."""

    kind = "cut"
    roles: ClassVar[tuple[str, ...]] = ("root", "stem", "leaf", "standby")
    hold_seconds: ClassVar[float | None] = 5.0

    def inject(self, swarm: ChaosSwarm) -> None:
        swarm.lab.host(self.machine).unplug()

    def heal(self, swarm: ChaosSwarm) -> None:
        swarm.lab.host(self.machine).plug_in()

    def expected(self) -> Sequence[ExpectedEvent]:
        return [event_of(self.machine, *NOTICED)]


class Partition(Cut):
    """The machine is disconnected until training continues without it."""

    kind = "partition"
    roles = ("root", "stem", "leaf")
    hold_seconds = None

    def expected(self) -> Sequence[ExpectedEvent]:
        return [event_of(self.machine, *NOTICED), replacement_of(self.machine)]

    def expected_after_healing(self) -> Sequence[ExpectedEvent]:
        return [event_of(self.machine, *BACK)]


class OneWayCut(Fault):
    """Packets from the machine are lost, until training continues without it; it still receives."""

    kind = "one-way cut"
    roles = ("root", "stem", "leaf")

    def inject(self, swarm: ChaosSwarm) -> None:
        for other in swarm.lab.hosts:
            if other != self.machine:
                swarm.lab.path(self.machine, other).cut()

    def heal(self, swarm: ChaosSwarm) -> None:
        swarm.lab.host(self.machine).plug_in()

    def expected(self) -> Sequence[ExpectedEvent]:
        return [event_of(self.machine, *NOTICED), replacement_of(self.machine)]

    def expected_after_healing(self) -> Sequence[ExpectedEvent]:
        return [event_of(self.machine, *BACK)]


class Lossy(Fault):
    """A fifth of all packets to and from the machine are lost."""

    kind = "loss"
    roles = ("root", "stem", "leaf")
    hold_seconds = 8.0

    def inject(self, swarm: ChaosSwarm) -> None:
        self._set(swarm, LOSS)

    def heal(self, swarm: ChaosSwarm) -> None:
        self._set(swarm, 0.0)

    def expected(self) -> Sequence[ExpectedEvent]:
        return [event_of(self.machine, "link_slow", *NOTICED)]

    def _set(self, swarm: ChaosSwarm, loss: float) -> None:
        for other in swarm.lab.hosts:
            if other != self.machine:
                swarm.lab.pair(self.machine, other).set(loss=loss)


class SlowLine(Fault):
    """The machine's line has a twentieth of its rate, both ways."""

    kind = "slow line"
    roles = ("root", "stem", "leaf")
    hold_seconds = 8.0

    def inject(self, swarm: ChaosSwarm) -> None:
        self._set(swarm, RATE)

    def heal(self, swarm: ChaosSwarm) -> None:
        self._set(swarm, 1.0)

    def expected(self) -> Sequence[ExpectedEvent]:
        return [event_of(self.machine, "link_slow", *NOTICED)]

    def _set(self, swarm: ChaosSwarm, share: float) -> None:
        line = swarm.lines[self.machine]
        swarm.lab.host(self.machine).set(up_mbps=line.up_mbps * share, down_mbps=line.down_mbps * share)


class Join(Fault):
    """An unknown machine joins; when training continues it is told to leave."""

    kind = "join"
    roles = ("stranger",)

    def inject(self, swarm: ChaosSwarm) -> None:
        swarm.join(self.machine)

    def heal(self, swarm: ChaosSwarm) -> None:
        swarm.machines[self.machine].signal(signal.SIGINT)
        swarm.wait_until_left(self.machine)

    def expected(self) -> Sequence[ExpectedEvent]:
        return [event_of(self.machine, "joined")]

    def expected_after_healing(self) -> Sequence[ExpectedEvent]:
        return [event_of(self.machine, "leaving")]


class Leave(Fault):
    """Ctrl-C at a provider: it hands its stage over, and ends with code 0. It returns later."""

    kind = "leave"
    roles = ("root", "stem", "leaf", "standby")

    def inject(self, swarm: ChaosSwarm) -> None:
        swarm.machines[self.machine].signal(signal.SIGINT)

    def heal(self, swarm: ChaosSwarm) -> None:
        swarm.wait_until_left(self.machine)
        swarm.join(self.machine)

    def expected(self) -> Sequence[ExpectedEvent]:
        handed_over = [event_of(self.machine, "handed_over")] if self.holds_stage else []
        return [event_of(self.machine, "leaving"), *handed_over]

    def expected_after_healing(self) -> Sequence[ExpectedEvent]:
        return [event_of(self.machine, "joined")]


FAULTS: Final[tuple[type[Fault], ...]] = (
    Kill,
    KillCoordinator,
    Stop,
    Cut,
    Partition,
    OneWayCut,
    Lossy,
    SlowLine,
    Join,
    Leave,
)


def fault(kind: str, machine: str, role: str) -> Fault:
    """The fault of this kind for a machine of this role. ValueError: there is none."""
    for each in FAULTS:
        if each.kind == kind and role in each.roles:
            return each(machine, role)
    raise ValueError(f"there is no fault {kind!r} of a {role}")

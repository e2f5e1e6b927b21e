"""The kinds of faults: how each is injected, how it is healed, and what the run must tell of it.

A fault with `hold_seconds` is healed after so long, whatever the swarm did meanwhile. All others last until training
goes on in spite of them: a machine that is stopped or cut off is not waited for.
"""

import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final

from tests.chaos.sightings import Sighting, happened, replaced, told
from tests.chaos.swarm import DOWN_MBPS, HOME, UP_MBPS, ChaosSwarm

LOSS: Final = 0.2
RATE: Final = 0.05
BACK: Final = ("joined", "reconnected")
NOTICED: Final = ("suspected", "disconnected", "lost")


class Fault(ABC):
    """One fault of one machine, by name; made when it is to happen."""

    kind: ClassVar[str]
    roles: ClassVar[tuple[str, ...]]
    """Of the machines it may happen to."""
    hold_seconds: ClassVar[float | None] = None
    """It is healed after so long; None: when training goes on without the machine."""

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
    def seen(self) -> Sequence[Sighting]:
        """What must be told before training can be said to go on."""

    def seen_after(self) -> Sequence[Sighting]:
        """What must be told once it is healed."""
        return ()

    def __str__(self) -> str:
        return f"{self.kind} {self.machine} ({self.role})"


class Kill(Fault):
    """SIGKILL: the machine has lost its power. It comes back later."""

    kind = "kill"
    roles = ("root", "stem", "leaf", "standby")

    def inject(self, swarm: ChaosSwarm) -> None:
        swarm.machines[self.machine].kill()

    def heal(self, swarm: ChaosSwarm) -> None:
        swarm.join(self.machine)

    def seen(self) -> Sequence[Sighting]:
        # A standby holds nobody up: that its connection broke is told at once, and that it is lost when it stays away.
        return (
            [told(self.machine, "lost"), replaced(self.machine)] if self.holds_stage else [told(self.machine, *NOTICED)]
        )

    def seen_after(self) -> Sequence[Sighting]:
        return [told(self.machine, "joined")]


class KillCoordinator(Fault):
    """SIGKILL of the coordinator, which is started again a little later; meanwhile nothing can be told."""

    kind = "kill"
    roles = ("coordinator",)
    hold_seconds = 2.0

    def inject(self, swarm: ChaosSwarm) -> None:
        swarm.machines[HOME].kill()

    def heal(self, swarm: ChaosSwarm) -> None:
        swarm.serve_again()

    def seen(self) -> Sequence[Sighting]:
        return [happened("resumed_swarm")]


class Stop(Fault):
    """SIGSTOP until training goes on without it: connected, and silent. Then SIGCONT."""

    kind = "stop"
    roles = ("root", "stem", "leaf")

    def inject(self, swarm: ChaosSwarm) -> None:
        swarm.machines[self.machine].signal(signal.SIGSTOP)

    def heal(self, swarm: ChaosSwarm) -> None:
        swarm.machines[self.machine].signal(signal.SIGCONT)

    def seen(self) -> Sequence[Sighting]:
        return [told(self.machine, *NOTICED), replaced(self.machine)]

    def seen_after(self) -> Sequence[Sighting]:
        return [told(self.machine, *BACK)]


class Cut(Fault):
    """The machine's line is dead for some seconds: nothing comes or goes."""

    kind = "cut"
    roles: ClassVar[tuple[str, ...]] = ("root", "stem", "leaf", "standby")
    hold_seconds: ClassVar[float | None] = 5.0

    def inject(self, swarm: ChaosSwarm) -> None:
        swarm.lab.host(self.machine).unplug()

    def heal(self, swarm: ChaosSwarm) -> None:
        swarm.lab.host(self.machine).plug_in()

    def seen(self) -> Sequence[Sighting]:
        return [told(self.machine, *NOTICED)]


class Partition(Cut):
    """The machine is cut off until training goes on without it."""

    kind = "partition"
    roles = ("root", "stem", "leaf")
    hold_seconds = None

    def seen(self) -> Sequence[Sighting]:
        return [told(self.machine, *NOTICED), replaced(self.machine)]

    def seen_after(self) -> Sequence[Sighting]:
        return [told(self.machine, *BACK)]


class OneWayCut(Fault):
    """What the machine sends does not arrive, until training goes on without it; it hears everything."""

    kind = "one-way cut"
    roles = ("root", "stem", "leaf")

    def inject(self, swarm: ChaosSwarm) -> None:
        for other in swarm.lab.hosts:
            if other != self.machine:
                swarm.lab.path(self.machine, other).cut()

    def heal(self, swarm: ChaosSwarm) -> None:
        swarm.lab.host(self.machine).plug_in()

    def seen(self) -> Sequence[Sighting]:
        return [told(self.machine, *NOTICED), replaced(self.machine)]

    def seen_after(self) -> Sequence[Sighting]:
        return [told(self.machine, *BACK)]


class Lossy(Fault):
    """A fifth of all packets to and from the machine are lost."""

    kind = "loss"
    roles = ("root", "stem", "leaf")
    hold_seconds = 8.0

    def inject(self, swarm: ChaosSwarm) -> None:
        self._set(swarm, LOSS)

    def heal(self, swarm: ChaosSwarm) -> None:
        self._set(swarm, 0.0)

    def seen(self) -> Sequence[Sighting]:
        return [told(self.machine, "link_slow", *NOTICED)]

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
        swarm.lab.host(self.machine).set(up_mbps=UP_MBPS * RATE, down_mbps=DOWN_MBPS * RATE)

    def heal(self, swarm: ChaosSwarm) -> None:
        swarm.lab.host(self.machine).set(up_mbps=UP_MBPS, down_mbps=DOWN_MBPS)

    def seen(self) -> Sequence[Sighting]:
        return [told(self.machine, "link_slow", *NOTICED)]


class Join(Fault):
    """A machine that nobody knows joins; when training goes on it is made to leave again."""

    kind = "join"
    roles = ("stranger",)

    def inject(self, swarm: ChaosSwarm) -> None:
        swarm.join(self.machine)

    def heal(self, swarm: ChaosSwarm) -> None:
        swarm.machines[self.machine].signal(signal.SIGINT)
        swarm.wait_until_left(self.machine)

    def seen(self) -> Sequence[Sighting]:
        return [told(self.machine, "joined")]

    def seen_after(self) -> Sequence[Sighting]:
        return [told(self.machine, "leaving")]


class Leave(Fault):
    """Ctrl-C at a provider: it hands its stage over first, and ends well. It comes back later."""

    kind = "leave"
    roles = ("root", "stem", "leaf", "standby")

    def inject(self, swarm: ChaosSwarm) -> None:
        swarm.machines[self.machine].signal(signal.SIGINT)

    def heal(self, swarm: ChaosSwarm) -> None:
        swarm.wait_until_left(self.machine)
        swarm.join(self.machine)

    def seen(self) -> Sequence[Sighting]:
        return [told(self.machine, "leaving"), *([told(self.machine, "handed_over")] if self.holds_stage else [])]

    def seen_after(self) -> Sequence[Sighting]:
        return [told(self.machine, "joined")]


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
    """The fault of that kind that may happen to a machine of that role."""
    for each in FAULTS:
        if each.kind == kind and role in each.roles:
            return each(machine, role)
    raise ValueError(f"there is no fault {kind!r} of a {role}")

"""Schedule of faults: a pure function of a seed, so that a failed run can be repeated.

A schedule names roles, because the machine that has a role is known only when the case is run. Every case comes once
before any comes again, in an order that the seed determines.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

MAX_PAUSE_SECONDS: Final = 2.0


@dataclass(frozen=True)
class Case:
    """Faults that are injected at once, and the moment. As text: `kill leaf + kill standby during round`."""

    faults: tuple[tuple[str, str], ...]
    """The kind of each, and the role of its machine."""
    during: str = ""
    """The moment of the injection: round, checkpoint, deployment or evaluation; empty: any."""

    @classmethod
    def parse(cls, text: str) -> "Case":
        what, _, during = text.partition(" during ")
        parts = (part.rpartition(" ") for part in what.split(" + "))
        return cls(tuple((kind, role) for kind, _, role in parts), during)

    def __str__(self) -> str:
        what = " + ".join(f"{kind} {role}" for kind, role in self.faults)
        return f"{what} during {self.during}" if self.during else what


@dataclass(frozen=True)
class Planned:
    """A case of a schedule, and the pause before it."""

    number: int
    case: Case
    pause_seconds: float
    choice: float
    """From 0 to 1: chooses one of several machines of the same role."""

    def __str__(self) -> str:
        return f"{self.number}. {self.case}"


def cases(*texts: str) -> tuple[Case, ...]:
    """Cases from their text: `kill root`, `stop leaf during round`, `kill root + kill stem`."""
    return tuple(Case.parse(text) for text in texts)


ANY_CLUSTERS: Final = cases(
    "kill root",
    "kill stem",
    "kill leaf",
    "kill standby",
    "kill coordinator",
    "stop root",
    "stop stem",
    "stop leaf",
    "cut root",
    "cut stem",
    "cut leaf",
    "cut standby",
    "partition root",
    "partition stem",
    "partition leaf",
    "one-way cut root",
    "one-way cut stem",
    "one-way cut leaf",
    "loss root",
    "loss stem",
    "loss leaf",
    "slow line root",
    "slow line stem",
    "slow line leaf",
    "join stranger",
    "leave root",
    "leave stem",
    "leave leaf",
    "leave standby",
    "kill root + kill leaf",
    "kill stem + kill standby",
    "kill leaf + kill coordinator",
    "stop root + kill leaf",
    "cut stem + cut leaf",
    "leave root + kill leaf",
    "kill stem + join stranger",
    "kill root during checkpoint",
    "kill leaf during checkpoint",
    "kill coordinator during checkpoint",
    "kill stem during evaluation",
    "kill coordinator during evaluation",
    "stop leaf during evaluation",
    "kill leaf during deployment",
    "kill standby during deployment",
    "kill coordinator during deployment",
)
"""Cases for a swarm with at least one standby and any number of clusters."""

BETWEEN_CLUSTERS: Final = cases(
    "kill root during round",
    "kill leaf during round",
    "kill coordinator during round",
    "stop leaf during round",
    "cut root during round",
    "one-way cut leaf during round",
    "leave leaf during round",
    "kill root + kill root",
    "kill root + kill leaf during round",
)
"""Additional cases for several clusters that average."""


def schedule(seed: int, among: Sequence[Case]) -> Iterator[Planned]:
    """All of these cases in an order that the seed determines, then again in another order, without end."""
    random = Random(seed)
    number = 0
    while True:
        for case in random.sample(among, len(among)):
            number += 1
            yield Planned(number, case, random.uniform(0, MAX_PAUSE_SECONDS), random.random())


def for_roles(among: Sequence[Case], roles: Sequence[str]) -> tuple[Case, ...]:
    """The cases that need only these roles: a pipeline of two has no stem."""
    return tuple(case for case in among if all(role in roles for _, role in case.faults))

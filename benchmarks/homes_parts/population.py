"""Populations of homes: machines with home lines, by name as they were tried, or drawn from a seed.

The drawn lines follow rounded figures of published measurements; the ranges and shares below are our reading of them,
not fits:

- rates: Ofcom, "UK home broadband performance" (2023: about 10 Mbit/s down and 1 up on ADSL, 30 to 70 down and 7 to 20
  up on VDSL, 50 to 360 down and 5 to 50 up on cable, 40 to 900 on full fibre, often symmetric), and the Speedtest
  Global Index of Ookla (2024: median 55 Mbit/s down and 11 up on mobile, 95 down and 45 up on fixed lines);
- delay: FCC, "Measuring Broadband America" (2023: round trips of about 10 to 15 ms on fibre, 15 to 25 on cable, 25 to
  45 on DSL), and Ookla for mobile (about 30 ms to a server nearby, with a long tail);
- NAT: Richter et al., "A Multi-perspective Analysis of Carrier-Grade NAT Deployment" (2016: more than nine in ten
  mobile networks). Of the homes on fixed lines, half are taken to have a router that other homes cannot dial through.
"""

import math
import random
from dataclasses import dataclass
from typing import Final

MIN_MACHINES: Final = 3
MAX_MACHINES: Final = 8


@dataclass(frozen=True, slots=True)
class Home:
    """One machine and its line."""

    name: str
    up_mbps: float
    down_mbps: float
    round_trip_ms: float
    """Round trip between this home and the middle of the network. Between two homes it is the sum of both."""
    nat: bool = False
    """Other homes cannot dial it."""
    kind: str = ""
    """Kind of line that it was drawn from."""

    @property
    def line(self) -> str:
        return f"{self.up_mbps:g}/{self.down_mbps:g}{' nat' if self.nat else ''}"


@dataclass(frozen=True, slots=True)
class Population:
    """The machines of one swarm."""

    homes: tuple[Home, ...]
    clusters: int | None = None
    """Number of clusters to ask for; None: the planner chooses."""
    requester: Home = Home("requester", up_mbps=50, down_mbps=250, round_trip_ms=10)

    @property
    def lines(self) -> str:
        return ", ".join(home.line for home in self.homes)

    def one_way_ms(self, one: Home, other: Home) -> float:
        return (one.round_trip_ms + other.round_trip_ms) / 2


@dataclass(frozen=True, slots=True)
class LineKind:
    """A kind of home line; each range is drawn from evenly on a logarithmic scale."""

    name: str
    share: float
    """Share of homes that have such a line."""
    up_mbps: tuple[float, float]
    down_per_up: tuple[float, float]
    """Download rate as a multiple of the upload rate."""
    round_trip_ms: tuple[float, float]
    nat_share: float


KINDS: Final = (
    LineKind("fibre", 0.40, (20, 300), (1, 3), (3, 10), 0.5),
    LineKind("cable", 0.30, (10, 50), (5, 10), (8, 25), 0.5),
    LineKind("dsl", 0.20, (2, 20), (3, 6), (15, 45), 0.5),
    LineKind("mobile", 0.10, (5, 25), (3, 8), (20, 75), 0.95),
)


def draw(seed: int) -> Population:
    """The population of this seed: 3 to 8 machines. Those of even seeds form two clusters, if they are 4 or more."""
    chance = random.Random(f"homes {seed}")
    count = chance.randint(MIN_MACHINES, MAX_MACHINES)
    homes = tuple(_draw_home(chance, f"p{number}") for number in range(count))
    return Population(homes, 2 if count >= 4 and seed % 2 == 0 else 1)


def _draw_home(chance: random.Random, name: str) -> Home:
    [kind] = chance.choices(KINDS, [kind.share for kind in KINDS])
    up = _between(chance, kind.up_mbps)
    return Home(
        name,
        up_mbps=_rounded(up),
        down_mbps=_rounded(up * _between(chance, kind.down_per_up)),
        round_trip_ms=_rounded(_between(chance, kind.round_trip_ms)),
        nat=chance.random() < kind.nat_share,
        kind=kind.name,
    )


def _between(chance: random.Random, ends: tuple[float, float]) -> float:
    return math.exp(chance.uniform(math.log(ends[0]), math.log(ends[1])))


def _rounded(value: float) -> float:
    """Two significant digits, so that a table can show it in full."""
    return float(f"{value:.2g}")


THREE: Final = Population(
    (
        Home("p0", up_mbps=10, down_mbps=50, round_trip_ms=15, nat=True),
        Home("p1", up_mbps=20, down_mbps=100, round_trip_ms=15, nat=True),
        Home("p2", up_mbps=40, down_mbps=250, round_trip_ms=15),
    )
)
"""Three homes, two behind NAT."""

FIVE: Final = Population(
    (
        Home("p0", up_mbps=10, down_mbps=50, round_trip_ms=15, nat=True),
        Home("p1", up_mbps=20, down_mbps=100, round_trip_ms=15, nat=True),
        Home("p2", up_mbps=40, down_mbps=250, round_trip_ms=15),
        Home("p3", up_mbps=50, down_mbps=100, round_trip_ms=105),
        Home("p4", up_mbps=20, down_mbps=100, round_trip_ms=105, nat=True),
    )
)
"""Five homes, two of them 120 ms away from the others."""

FOUR: Final = Population(tuple(Home(f"p{n}", up_mbps=50, down_mbps=100, round_trip_ms=10) for n in range(4)))
"""Four equal homes with a round trip of 20 ms."""

TWO: Final = Population(tuple(Home(f"p{n}", up_mbps=50, down_mbps=100, round_trip_ms=10) for n in range(2)), 1)
"""Two equal homes, for a quick look."""

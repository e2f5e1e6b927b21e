"""In what activations and gradients travel on each link of a cluster: lossless where the line can take it.

A plan is searched for as if every link had the smallest codec that it may have; then each link gets the one that loses
least of those with which the cluster stays as fast. So a codec is used where a line would hold the cluster back, and
nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from ravnest.amounts import milliseconds
from ravnest.codecs.codec import CODECS
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.providers import Goal, Network, Provider

CHOICES: Final = ("float32", "bfloat16", "int8")
"""What is chosen from where nothing is set, the one that loses least first."""

FREE_SHARE: Final = 0.8
"""A line is no bottleneck where it is busy for at most so much of the time that the slowest stage takes: lines are not
always as fast as they were measured, and what comes unevenly has to wait for one another."""

_MANY: Final = 1 << 20


def share_of(codec: str) -> float:
    """The bytes of values in a codec, as a share of what they take in float32."""
    return CODECS[codec].size_bytes(_MANY) / CODECS["float32"].size_bytes(_MANY)


def assumed_share(goal: Goal) -> float:
    """What a search takes every link to carry of what it would carry uncoded."""
    return _ASSUMED if goal.codec is None else share_of(goal.codec)


_ASSUMED: Final = min(share_of(codec) for codec in CHOICES)


@dataclass(frozen=True, slots=True)
class LinkCodec:
    """What a link carries, and why."""

    codec: str
    reason: str


@dataclass(frozen=True, slots=True)
class LineLoad:
    """For how long one stage's lines are busy with a microbatch."""

    up_seconds: float
    """What it sends, over its own line; to both neighbours."""
    down_seconds: float
    line_seconds: float
    """The line between it and the stage before, of both directions the slower."""
    way_seconds: float
    """What a microbatch spends on that line, there and back."""

    @property
    def busiest_seconds(self) -> float:
        return max(self.up_seconds, self.down_seconds, self.line_seconds)


@dataclass(frozen=True, slots=True)
class ClusterLines:
    """The lines of a cluster that is cut at certain places. Link k joins stages k and k + 1."""

    model: ModelCosts
    network: Network
    order: Sequence[Provider]
    bounds: Sequence[int]
    """The places where stages begin and end."""

    @classmethod
    def of(cls, model: ModelCosts, network: Network, order: Sequence[Provider], cuts: Sequence[int]) -> Self:
        return cls(model, network, order, (0, *cuts, model.last))

    def apart(self, link: int) -> bool:
        """Whether a line lies between its two stages: they are on different machines."""
        return self.order[link].machine != self.order[link + 1].machine

    def crossing(self, link: int, codec: str) -> tuple[float, float]:
        """What this link carries of a microbatch, forth and back."""
        forward, backward = self.model.carried(share_of(codec))
        return float(forward[self.bounds[link + 1]]), float(backward[self.bounds[link + 1]])

    def loads(self, codecs: Sequence[str]) -> list[LineLoad]:
        """Of every stage, with these codecs on its links."""
        found = []
        crossing = [self.crossing(link, codec) for link, codec in enumerate(codecs)]
        for number, here in enumerate(self.order):
            i, j = self.bounds[number], self.bounds[number + 1]
            up = 0.0
            down = float(self.model.fed_bytes[i, j]) if self.network.requester.host != here.machine else 0.0
            line = way = 0.0
            if number:
                before, (forward, backward) = self.order[number - 1], crossing[number - 1]
                there, back = self.network.line(before, here), self.network.line(here, before)
                forth, home = forward / there.bytes_per_second, backward / back.bytes_per_second
                line, way = max(forth, home), forth + home + there.latency_seconds + back.latency_seconds
                if self.apart(number - 1):
                    up, down = up + backward, down + forward
            if number + 1 < len(self.order) and self.apart(number):
                forward, backward = crossing[number]
                up, down = up + forward, down + backward
            found.append(LineLoad(up / here.up_bytes_per_second, down / here.down_bytes_per_second, line, way))
        return found


def choose_codecs(lines: ClusterLines, goal: Goal, compute: Sequence[float], in_flight: int) -> list[LinkCodec]:
    """The codec of each link of a cluster whose stages compute for so long, with so many microbatches in flight."""
    links = len(lines.order) - 1
    if goal.codec is not None:
        return [LinkCodec(goal.codec, f"{goal.codec}, as pipeline.codec says") for _ in range(links)]
    chosen = [CHOICES[-1 if lines.apart(link) else 0] for link in range(links)]
    tightest = lines.loads(chosen)
    computing = sum(compute)
    slowest = max([*compute, *(load.busiest_seconds for load in tightest)])
    # With fewer in flight than the way is long, each microbatch waits for one to come back.
    period = max(slowest, (computing + sum(load.way_seconds for load in tightest)) / in_flight)
    # All of them a little before one of them much: where two links share a machine's line, both should lose little.
    for better in reversed(CHOICES[:-1]):
        for link in filter(lines.apart, range(links)):
            tried = [*chosen[:link], better, *chosen[link + 1 :]]
            loads = lines.loads(tried)
            way = (computing + sum(load.way_seconds for load in loads)) / in_flight
            if _busy(loads, link) <= FREE_SHARE * slowest and way <= period * _CLOSE:
                chosen = tried
    loads = lines.loads(chosen)
    return [_choice(lines, chosen, loads, link, slowest) for link in range(links)]


_CLOSE: Final = 1 + 1e-9


def _busy(loads: Sequence[LineLoad], link: int) -> float:
    """For how long a link keeps its own line, or a line at one of its ends, busy."""
    before, after = loads[link], loads[link + 1]
    return max(before.up_seconds, before.down_seconds, after.busiest_seconds)


def _choice(
    lines: ClusterLines, chosen: Sequence[str], loads: Sequence[LineLoad], link: int, slowest: float
) -> LinkCodec:
    codec, busy = chosen[link], _busy(loads, link)
    against = f"the slowest stage or line {milliseconds(slowest)}"
    if codec == CHOICES[0]:
        if not lines.apart(link):
            return LinkCodec(codec, f"{codec}: no line lies between them")
        return LinkCodec(codec, f"{codec}: its lines are busy for {milliseconds(busy)} of a microbatch, {against}")
    uncoded = lines.loads([*chosen[:link], CHOICES[0], *chosen[link + 1 :]])
    return LinkCodec(
        codec,
        f"{codec}: its lines are busy for {milliseconds(busy)} of a microbatch, with float32 for "
        f"{milliseconds(_busy(uncoded, link))}; {against}",
    )

"""Codec of activations and gradients for each link of a cluster: lossless where the line is fast enough.

A search assumes the smallest allowed codec on every link. Then each link gets the most precise codec with which the
cluster stays as fast, so that a lossy codec is used only where a line would be the limit. A job that needs exact values
still has a choice: plain float32, or packed without loss.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch

from ravnest.codecs.codec import CODECS
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Line, Network, Provider
from ravnest.units import milliseconds

CHOICES: Final = ("float32", "lossless", "bfloat16", "int8")
"""The default choice, the most precise and cheapest first."""
EXACT: Final = tuple(codec for codec in CHOICES if not CODECS[codec].lossy)
"""The choice of a job that needs exact values."""

FREE_SHARE: Final = 0.8
"""A line is no bottleneck if it is busy for at most this share of the slowest stage's time: lines are not always as
fast as they were measured, and frames that come unevenly queue."""

PACKED_BYTES_PER_SECOND: Final = 25e6
"""On a faster line, lossless is not used: packing and unpacking take longer than they save. Both take 4 ms for a MiB,
and save 174 kB."""

_MANY: Final = 1 << 18


@functools.cache
def share_of(codec: str) -> float:
    """Bytes of values in a codec, as a share of their bytes in float32. Lossless is measured with values of a normal
    distribution, which pack like activations, gradients and weights."""
    values = torch.randn(_MANY, generator=torch.Generator().manual_seed(0))
    return CODECS[codec].encode(values).numel() / values.nbytes


def assumed_share(goal: Goal) -> float:
    """Share of the uncoded bytes that a search assumes on every link."""
    return min(share_of(codec) for codec in goal.codecs)


@dataclass(frozen=True, slots=True)
class LinkCodec:
    """The codec of a link, and why."""

    codec: str
    reason: str


@dataclass(frozen=True, slots=True)
class LineLoad:
    """Time that one stage's lines are busy with a microbatch."""

    up_seconds: float
    """Sending to both neighbours, over the provider's own line."""
    down_seconds: float
    line_seconds: float
    """The line to the stage before, in its slower direction."""
    way_seconds: float
    """Time of a microbatch on that line, both ways."""

    @property
    def busiest_seconds(self) -> float:
        return max(self.up_seconds, self.down_seconds, self.line_seconds)


@dataclass(frozen=True, slots=True)
class _Link:
    """Link between a stage and the next: its traffic and its lines."""

    forward_bytes: float
    backward_bytes: float
    plain_forward_bytes: float
    """The part of these that no codec makes smaller."""
    plain_backward_bytes: float
    there: Line
    back: Line
    apart: bool
    """Whether the stages are on different machines."""

    def carried(self, codec: str) -> tuple[float, float]:
        """Forward and backward bytes of a microbatch."""
        share = share_of(codec)
        return (
            share * self.forward_bytes + (1 - share) * self.plain_forward_bytes,
            share * self.backward_bytes + (1 - share) * self.plain_backward_bytes,
        )


@dataclass(frozen=True, slots=True)
class ClusterLines:
    """The lines of a cluster that is cut at certain places. Link k joins stages k and k + 1. If the leaf looks rows up
    for the root, the last link joins these two."""

    links: tuple[_Link, ...]
    rates: tuple[tuple[float, float], ...]
    """Upload and download rate of each stage's provider."""
    fed: tuple[float, ...]
    """Bytes that the coordinator sends to each stage over a line."""

    @classmethod
    def of(cls, model: ModelCosts, network: Network, order: Sequence[Provider], cuts: Sequence[int]) -> Self:
        bounds = (0, *cuts, model.last)
        rows: tuple[_Link, ...] = ()
        if model.rows_bytes and len(order) > 1:
            leaf, root = order[-1], order[0]
            there, back, size = network.line(leaf, root), network.line(root, leaf), model.rows_bytes
            rows = (_Link(size, size, 0.0, 0.0, there, back, leaf.machine != root.machine),)
        plain_forward, plain_backward = model.plain_bytes or (None, None)
        return cls(
            links=tuple(
                _Link(
                    float(model.forward_bytes[place]),
                    float(model.backward_bytes[place]),
                    0.0 if plain_forward is None else float(plain_forward[place]),
                    0.0 if plain_backward is None else float(plain_backward[place]),
                    network.line(before, after),
                    network.line(after, before),
                    before.machine != after.machine,
                )
                for place, (before, after) in zip(cuts, itertools.pairwise(order), strict=True)
            )
            + rows,
            rates=tuple((p.up_bytes_per_second, p.down_bytes_per_second) for p in order),
            fed=tuple(
                0.0 if network.requester.host == p.machine else float(model.fed_bytes[bounds[k], bounds[k + 1]])
                for k, p in enumerate(order)
            ),
        )

    def loads(self, codecs: Sequence[str]) -> list[LineLoad]:
        """The load of every stage, with these codecs on its links."""
        carried = [link.carried(codec) for link, codec in zip(self.links, codecs, strict=True)]
        found = []
        for number, (up_rate, down_rate) in enumerate(self.rates):
            up, down, line, way = 0.0, self.fed[number], 0.0, 0.0
            # The link before the root, if it has one, is the last.
            if number or len(self.links) == len(self.rates):
                before, (forward, backward) = self.links[number - 1], carried[number - 1]
                there, back = before.there, before.back
                forth, home = forward / there.bytes_per_second, backward / back.bytes_per_second
                line, way = max(forth, home), forth + home + there.latency_seconds + back.latency_seconds
                if before.apart:
                    up, down = up + backward, down + forward
            if number < len(self.links) and self.links[number].apart:
                forward, backward = carried[number]
                up, down = up + forward, down + backward
            found.append(LineLoad(up / up_rate, down / down_rate, line, way))
        return found


def choose_codecs(lines: ClusterLines, goal: Goal, compute: Sequence[float], in_flight: int) -> list[LinkCodec]:
    """The codec of each link, given the seconds that each stage computes and the number of microbatches in flight."""
    links = len(lines.links)
    choices = [_choices(goal, link) for link in lines.links]
    if len(goal.codecs) == 1:
        return [LinkCodec(codec, f"{codec}, as pipeline.codec says") for (codec,) in choices]
    chosen = [codecs[-1] for codecs in choices]
    tightest = lines.loads(chosen)
    computing = sum(compute)
    slowest = max([*compute, *(load.busiest_seconds for load in tightest)])
    # With too few in flight for the round trip, each microbatch waits for one to come back.
    period = max(slowest, (computing + sum(load.way_seconds for load in tightest)) / in_flight)
    # All links improve by one step before any improves by two: two links may share a machine's line.
    for better in reversed(goal.codecs[:-1]):
        for link in (k for k in range(links) if better in choices[k]):
            tried = [*chosen[:link], better, *chosen[link + 1 :]]
            loads = lines.loads(tried)
            way = (computing + sum(load.way_seconds for load in loads)) / in_flight
            if _busy(loads, link) <= FREE_SHARE * slowest and way <= period * _CLOSE:
                chosen = tried
    loads = lines.loads(chosen)
    return [_choice(lines, chosen, loads, link, slowest, goal) for link in range(links)]


def _choices(goal: Goal, link: _Link) -> tuple[str, ...]:
    """The codecs that a link may have, the most precise and cheapest first."""
    if len(goal.codecs) == 1:
        return goal.codecs
    if not link.apart:
        return goal.codecs[:1]
    slower = min(link.there.bytes_per_second, link.back.bytes_per_second)
    return tuple(codec for codec in goal.codecs if codec != "lossless" or slower <= PACKED_BYTES_PER_SECOND)


_CLOSE: Final = 1 + 1e-9


def _busy(loads: Sequence[LineLoad], link: int) -> float:
    """Time that a link keeps its own line, or a line at one of its ends, busy."""
    before, after = loads[link], loads[(link + 1) % len(loads)]
    return max(before.up_seconds, before.down_seconds, after.busiest_seconds)


def _choice(
    lines: ClusterLines, chosen: Sequence[str], loads: Sequence[LineLoad], link: int, slowest: float, goal: Goal
) -> LinkCodec:
    codec, busy = chosen[link], _busy(loads, link)
    against = f"the slowest stage or line {milliseconds(slowest)}"
    if codec == "float32":
        if not lines.links[link].apart:
            return LinkCodec(codec, f"{codec}: no line lies between them")
        return LinkCodec(codec, f"{codec}: its lines are busy for {milliseconds(busy)} of a microbatch, {against}")
    uncoded = lines.loads([*chosen[:link], "float32", *chosen[link + 1 :]])
    exact = "; nothing may be lost" if goal.codecs == EXACT else ""
    return LinkCodec(
        codec,
        f"{codec}: its lines are busy for {milliseconds(busy)} of a microbatch, with float32 for "
        f"{milliseconds(_busy(uncoded, link))}; {against}{exact}",
    )

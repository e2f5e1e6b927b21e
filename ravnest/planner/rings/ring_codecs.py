"""Codec of each ring: the most precise one with which its rounds keep to the budget of its lines.

A ring whose lines are fast, or that has none, is averaged without loss. int8 and int4 are used with error feedback, so
that what a round loses is sent in the next one.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ravnest.planner.link_codecs import share_of
from ravnest.planner.problem import NO_LIMIT, Network, Pair, Provider
from ravnest.planner.rings.rings import Ring
from ravnest.state_budget import BUDGET_SHARE
from ravnest.units import byte_size, counted, megabits

AUTO: Final = "auto"
"""The setting that lets each ring's codec follow its lines."""

RING_CHOICES: Final = ("float32", "bfloat16", "int8", "int4")
"""The default choice, the most precise first."""

ASSUMED: Final = "int8"
"""The codec that a search assumes for the default choice, because the lines of the rings are not known yet."""

_PIECE_SECONDS: Final = 0.01
_MIN_PIECE_BYTES: Final = 64 << 10
"""A piece takes a line for about this time, or has this size where that is more, because activations wait for a piece
that is on its way."""


@dataclass(frozen=True, slots=True)
class RingLoad:
    """Load of a ring on its lines in a round, in float32."""

    coded_bytes: float
    """Sent by each owner, of parameters."""
    plain_bytes: float
    """The same of what no codec makes smaller."""
    bytes_per_second: float
    """Its part of its slowest line: rings that share a line do so in proportion to their sizes."""

    def sent_bytes(self, codec: str) -> float:
        return self.coded_bytes * share_of(codec) + self.plain_bytes


@dataclass(frozen=True, slots=True)
class RingCodec:
    """The codec of a ring, and why."""

    codec: str
    reason: str


def choose_ring_codec(setting: str, load: RingLoad, interval_seconds: float) -> RingCodec:
    """The codec of a ring whose rounds may be at most this far apart. A setting other than `AUTO` decides."""
    if setting != AUTO:
        return RingCodec(setting, f"{setting}, as averaging.codec says")
    if load.bytes_per_second == NO_LIMIT:
        return RingCodec("float32", "float32: no line between its owners has a limit")
    room = BUDGET_SHARE * load.bytes_per_second * interval_seconds
    codec = next((each for each in RING_CHOICES if load.sent_bytes(each) <= room), RING_CHOICES[-1])
    sent = byte_size(load.sent_bytes(codec))
    line = f"{BUDGET_SHARE:.0%} of its slowest line ({megabits(load.bytes_per_second)} Mbit/s)"
    if load.sent_bytes(codec) > room:
        return RingCodec(codec, f"{codec}: each owner sends {sent} a round, more than {line} carry in reasonable time")
    uncoded = "" if codec == "float32" else f" instead of {byte_size(load.sent_bytes('float32'))} in float32"
    return RingCodec(codec, f"{codec}: each owner sends {sent} a round{uncoded}, within {line}")


def ring_rates(rings: Sequence[Ring], network: Network, providers: Mapping[str, Provider]) -> list[float]:
    """For each ring its part of its slowest line, while all of them are averaged at once."""
    up: dict[str, float] = defaultdict(float)
    down: dict[str, float] = defaultdict(float)
    between: dict[Pair, float] = defaultdict(float)

    def apart(pair: Pair) -> bool:
        return providers[pair[0]].machine != providers[pair[1]].machine

    for ring in rings:
        for sender, receiver in filter(apart, ring.lines):
            up[sender] += ring.sent_bytes
            down[receiver] += ring.sent_bytes
            between[sender, receiver] += ring.sent_bytes
    found = []
    for ring in rings:
        rates = [NO_LIMIT]
        for sender, receiver in filter(apart, ring.lines):
            if not ring.sent_bytes:
                continue
            line = network.line(providers[sender], providers[receiver]).bytes_per_second
            rates += [
                providers[sender].up_bytes_per_second * ring.sent_bytes / up[sender],
                providers[receiver].down_bytes_per_second * ring.sent_bytes / down[receiver],
                line * ring.sent_bytes / between[sender, receiver],
            ]
        found.append(min(rates))
    return found


def piece_values(codec: str, bytes_per_second: float) -> int:
    """Maximum number of values in a piece of a ring with this codec and line; 0: the default, for lines without a
    limit."""
    if bytes_per_second == NO_LIMIT:
        return 0
    size = max(_MIN_PIECE_BYTES, _PIECE_SECONDS * bytes_per_second)
    return int(size / (4 * share_of(codec)))


def in_one_sentence(chosen: Sequence[RingCodec]) -> str:
    """The codecs of all rings for the user: the reason of the first ring with each codec."""
    many = Counter(each.codec for each in chosen)
    if len(many) == 1:
        return f"rings travel in {chosen[0].reason}"
    reasons = {each.codec: each.reason for each in reversed(chosen)}
    return "; ".join(f"{counted(many[codec], 'ring travels', 'rings travel')} in {reasons[codec]}" for codec in many)

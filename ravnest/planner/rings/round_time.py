"""Predicted time of a round of averaging, with everything else that its lines and machines do meanwhile."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ravnest.planner.cluster import Cluster
from ravnest.planner.problem import Network, Provider
from ravnest.planner.rings.line_shares import IN_BUDGET, LineShares
from ravnest.planner.rings.rings import Ring, round_seconds

CODING_SECONDS: Final = {
    "float32": 0.04e-9,
    "lossless": 11.6e-9,
    "float16": 0.37e-9,
    "bfloat16": 0.40e-9,
    "int8": 1.31e-9,
    "int4": 2.49e-9,
}
"""Time to encode and decode a value, measured on one core of an AMD EPYC at 2.6 GHz."""
_PASSES_SECONDS: Final = 10e-9
"""Time for the passes over a value in a round: snapshot, difference, sums, and the commit."""

_CONTROL_TRIPS: Final = 5
"""Messages between an owner and the coordinator that a round waits for: joined, begin, reduced, commit and applied."""


@dataclass(frozen=True, slots=True)
class RoundTime:
    """The predicted time of a round, by what takes it."""

    joining_seconds: float = 0.0
    """Until what was fed before the round has passed the stages of the slowest cluster."""
    line_seconds: float = 0.0
    """Sending, on the busiest line."""
    latency_seconds: float = 0.0
    """Steps round the ring, and messages to and from the coordinator."""
    coding_seconds: float = 0.0
    """Computing, on the machine with the most to average."""
    catch_up_seconds: float = 0.0
    """Sending the anchor to an owner that has missed a round. Not a part of a usual round."""
    budget_seconds: float = 0.0
    """Minimum time between two rounds that keeps state within its budget of every line."""

    @property
    def reducing_seconds(self) -> float:
        return self.line_seconds + self.latency_seconds + self.coding_seconds

    @property
    def seconds(self) -> float:
        return self.joining_seconds + self.reducing_seconds


def joining_seconds(cluster: Cluster, ahead: int) -> float:
    """Time until everything that a cluster has been fed has passed its stages. `ahead`: microbatches that are fed
    beyond those in flight."""
    return (cluster.in_flight + ahead) * cluster.period_seconds + cluster.round_trip_seconds


def round_time(
    rings: Sequence[Ring],
    values: Sequence[float],
    codecs: Sequence[str],
    joining: float,
    network: Network,
    providers: Mapping[str, Provider],
    shares: LineShares,
    anchor_bytes_per_value: float = 4.0,
) -> RoundTime:
    """The time of a round of these rings, all at once.

    `rings` have the sizes that they have on the line, with their codecs; `values` are the values of each.
    """
    coding: dict[str, float] = defaultdict(float)
    latency = 0.0
    for ring, count, codec in zip(rings, values, codecs, strict=True):
        members = len(ring.owners)
        if members < 2:
            continue
        hops = 2 * (members - 1)
        around = sum(network.line(providers[a], providers[b]).latency_seconds for a, b in ring.lines)
        control = max(providers[owner].latency_seconds for owner in ring.owners)
        latency = max(latency, hops * around / members + _CONTROL_TRIPS * control)
        for owner in ring.owners:
            seconds = count * (_PASSES_SECONDS + hops / members * CODING_SECONDS[codec])
            coding[owner] += seconds / providers[owner].memory_speed
    whole = [replace(ring, parameter_bytes=anchor_bytes_per_value * n) for ring, n in zip(rings, values, strict=True)]
    # An anchor goes over one line of each ring, half as often as the rings of two that this stands for.
    anchors = [replace(ring, owners=ring.owners[:2]) for ring in whole]
    return RoundTime(
        joining_seconds=joining,
        line_seconds=round_seconds(rings, network, providers, shares),
        latency_seconds=latency,
        coding_seconds=max(coding.values(), default=0.0),
        catch_up_seconds=round_seconds(anchors, network, providers, shares),
        budget_seconds=round_seconds(rings, network, providers, IN_BUDGET),
    )

"""How alike the machines of a cluster are: the best of them against the worst, in speed and in their lines."""

from collections.abc import Mapping
from dataclasses import dataclass

from ravnest.planner.cluster import Cluster
from ravnest.planner.problem import Provider


@dataclass(frozen=True, slots=True)
class Likeness:
    """1 where all are alike; 3 where the best has three times what the worst has."""

    speed: float
    line: float


def likeness(providers: Mapping[str, Provider], cluster: Cluster) -> Likeness:
    """Of the members of one cluster. Lines without a limit are alike among themselves, and unlike any other."""
    members = [providers[name] for name in cluster.providers]
    lines = [min(p.up_bytes_per_second, p.down_bytes_per_second) for p in members]
    return Likeness(
        speed=max(p.compute_speed for p in members) / min(p.compute_speed for p in members),
        line=1.0 if max(lines) == min(lines) else max(lines) / min(lines),
    )

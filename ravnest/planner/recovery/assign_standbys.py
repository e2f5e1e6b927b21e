"""Assignment of standbys to stages that they are kept warm for: the stages of the least reliable providers first."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ravnest.planner.cluster import Cluster, StageCost
from ravnest.planner.problem import NO_LIMIT, Network, Provider
from ravnest.units import byte_size, megabits


@dataclass(frozen=True, slots=True)
class Warm:
    """A standby and the stage that it fetches in advance."""

    standby: str
    cluster: int | None
    """Its number among the given clusters; None if the standby's memory holds no stage."""
    stage: int | None
    provider: str
    """The provider that holds the stage now; empty without a stage."""
    reason: str


def assign_standbys(
    clusters: Sequence[Cluster],
    standbys: Sequence[Provider],
    providers: Mapping[str, Provider],
    network: Network,
) -> dict[str, Warm]:
    """For each standby, by name, the stage that it is kept warm for.

    As many different stages as possible get a standby, the least reliable first, then the largest; only then does a
    stage get a second one. Among the standbys with enough memory, a stage gets the one with the best lines to its
    neighbours. The same arguments always give the same answer.
    """
    places = [_Place(k, n, cluster) for k, cluster in enumerate(clusters) for n in range(len(cluster.stages))]

    def trust(place: _Place) -> float:
        holder = place.cost.provider
        return providers[holder].reliability if holder in providers else 1.0

    places.sort(key=lambda place: (trust(place), -place.cost.parameter_bytes, place.cluster, place.stage))
    free = {standby.name: standby for standby in sorted(standbys, key=lambda standby: standby.name)}
    found: dict[str, Warm] = {}
    layer = 0
    while free:
        wanted = {place: _fitting(place, list(free.values()), providers, network) for place in places}
        matched = _matched(wanted)
        if not matched:
            break
        for place, name in matched.items():
            standby = free.pop(name)
            found[name] = _warm(place, standby, trust(place), _line(place, standby, providers, network), layer)
        layer += 1
    for name, standby in free.items():
        found[name] = Warm(name, None, None, "", _why_none(places, standby))
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class _Place:
    cluster: int
    stage: int
    of: Cluster

    @property
    def cost(self) -> StageCost:
        return self.of.stages[self.stage]

    @property
    def neighbours(self) -> list[str]:
        names = self.of.providers
        return [names[k] for k in self.of.neighbours(self.stage)]


def _fitting(
    place: _Place, standbys: Sequence[Provider], providers: Mapping[str, Provider], network: Network
) -> list[str]:
    """The standbys whose memory holds the stage, those with the best lines first."""
    fit = [standby for standby in standbys if standby.memory_bytes >= place.cost.memory_bytes]

    def rank(standby: Provider) -> tuple[float, float, float, str]:
        rate, latency = _line(place, standby, providers, network)
        return -rate, latency, -standby.compute_speed, standby.name

    return [standby.name for standby in sorted(fit, key=rank)]


def _line(place: _Place, standby: Provider, providers: Mapping[str, Provider], network: Network) -> tuple[float, float]:
    """The slowest rate of its lines to and from the neighbours, and the sum of their latencies."""
    there = [providers[name] for name in place.neighbours if name in providers]
    lines = [network.line(*pair) for one in there for pair in ((standby, one), (one, standby))]
    if not lines:
        # A single stage is connected to the coordinator only.
        return min(standby.up_bytes_per_second, standby.down_bytes_per_second), 2 * standby.latency_seconds
    return min(line.bytes_per_second for line in lines), sum(line.latency_seconds for line in lines)


def _matched(wanted: Mapping[_Place, Sequence[str]]) -> dict[_Place, str]:
    """A standby for each place, in the order of the places. A place never loses its standby to a later one, but changes
    to another one if that makes room for a later place."""
    holder: dict[str, _Place] = {}
    names = {name for each in wanted.values() for name in each}
    for place in wanted:
        if len(holder) == len(names):
            break
        # The shortest chain of places in which each takes the standby of the next.
        came_from: dict[str, _Place] = {}
        open_places = deque([place])
        freed: str | None = None
        while open_places and freed is None:
            at = open_places.popleft()
            for name in wanted[at]:
                if name in came_from:
                    continue
                came_from[name] = at
                if name not in holder:
                    freed = name
                    break
                open_places.append(holder[name])
        given = {at: name for name, at in holder.items()}
        while freed is not None:
            at = came_from[freed]
            holder[freed], freed = at, given.get(at)
    return {place: name for name, place in holder.items()}


def _warm(place: _Place, standby: Provider, trust: float, line: tuple[float, float], layer: int) -> Warm:
    cost = place.cost
    rate = (
        "on the same machine as its neighbours"
        if line[0] == NO_LIMIT
        else f"{megabits(line[0])} Mbit/s to its neighbours"
    )
    which = "which has a standby already" if layer else "the least reliable without a standby that fits"
    reason = (
        f"{standby.name} is kept warm for stage {place.stage} of cluster {place.cluster}, held by {cost.provider} "
        f"(reliability {trust:.2f}), {which}; {byte_size(standby.memory_bytes)} hold its "
        f"{byte_size(cost.memory_bytes)}, {rate}"
    )
    return Warm(standby.name, place.cluster, place.stage, cost.provider, reason)


def _why_none(places: Sequence[_Place], standby: Provider) -> str:
    if not places:
        return f"{standby.name} is a standby: no cluster has a stage yet"
    least = min(place.cost.memory_bytes for place in places)
    return (
        f"{standby.name} is kept warm for no stage: it lends {byte_size(standby.memory_bytes)}, and the smallest stage "
        f"needs {byte_size(least)}"
    )

"""Limits that clusters share: the cores of hosts, the requester's line, and the cost of averaging."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ravnest.planner.cluster import FRAME_SECONDS, Cluster, StageCost
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.units import decimal_size, megabits, sample_rate

RESULT_BYTES: Final = 256
"""Bytes on the requester's line of a message that a stage sends about a microbatch: its losses, or that it is done."""

_CLOSE: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Totals:
    """The rates of clusters that train one model together."""

    rates: tuple[float, ...]
    """Samples per second of each while the others train too."""
    averaging_seconds: float
    """Duration of one round."""
    samples_per_second: float
    """Rate of all clusters, less the cost of averaging: of lines in the background, of time where training waits."""
    score: float
    """Figure by which plans are compared: the rate if training waited for every round, so that long rounds count
    against a plan, less the cost of staleness beyond the bound."""
    limit: str
    """The shared resource that limits the clusters; empty if there is none."""


def totals(goal: Goal, network: Network, providers: Mapping[str, Provider], clusters: Sequence[Cluster]) -> Totals:
    """The rates of these clusters when all of them train."""
    rates, limit = _sharing_hosts(network, providers, clusters)
    rates, limit = _sharing_the_requester(network, providers, clusters, rates, limit)
    together = sum(rates)
    averaging = averaging_seconds(goal, providers, clusters)
    kept, predicted = 1.0, together
    if averaging and together:
        # Clusters differ in their rates: `average_every` microbatches of each on average.
        between = goal.average_every * sum(c.samples for c in clusters) / together
        kept = between / (between + averaging)
        predicted = (
            together * kept if goal.blocking else _with_background_rounds(goal, providers, clusters, rates, between)
        )
    worth = sum(rate * goal.worth(cluster.needed_in_flight) for rate, cluster in zip(rates, clusters, strict=True))
    return Totals(rates, averaging, predicted, worth * kept, limit)


def period_on_hosts(
    network: Network, providers: Mapping[str, Provider], clusters: Sequence[Cluster]
) -> tuple[float, ...]:
    """By cluster, the time from one microbatch to the next if the resources of its hosts are the limit; 0 if they are
    not."""
    rates, _ = _sharing_hosts(network, providers, clusters)
    return tuple(
        cluster.samples / rate if rate < cluster.samples_per_second * (1 - _CLOSE) else 0.0
        for rate, cluster in zip(rates, clusters, strict=True)
    )


def averaging_seconds(goal: Goal, providers: Mapping[str, Provider], clusters: Sequence[Cluster]) -> float:
    """Duration of a round: every provider sends and receives 2(C-1)/C of its stage, all rings at once."""
    count = len(clusters)
    if count < 2:
        return 0.0
    return max(_averaged(goal, providers, count, stage) for cluster in clusters for stage in cluster.stages)


def _averaged(goal: Goal, providers: Mapping[str, Provider], clusters: int, stage: StageCost) -> float:
    """Time that a round keeps the line of a stage's provider busy."""
    provider = providers[stage.provider]
    rate = min(provider.up_bytes_per_second, provider.down_bytes_per_second)
    return 2 * (clusters - 1) / clusters * goal.average_share * stage.parameter_bytes / rate


def _with_background_rounds(
    goal: Goal,
    providers: Mapping[str, Provider],
    clusters: Sequence[Cluster],
    rates: Sequence[float],
    between_seconds: float,
) -> float:
    """Samples per second of all clusters while rounds run in the background: a line that is overloaded by training and
    rounds together slows its cluster down."""
    together = 0.0
    for rate, cluster in zip(rates, clusters, strict=True):
        busiest = max(
            rate / cluster.samples * max(stage.up_seconds, stage.down_seconds)
            + _averaged(goal, providers, len(clusters), stage) / between_seconds
            for stage in cluster.stages
        )
        together += rate / max(1.0, busiest)
    return together


def _sharing_hosts(
    network: Network, providers: Mapping[str, Provider], clusters: Sequence[Cluster]
) -> tuple[tuple[float, ...], str]:
    """The rates with shared hosts: providers that need more cores than their host has all slow down."""
    busy: dict[str, dict[int, float]] = {}
    cores: dict[str, int] = {}
    for number, cluster in enumerate(clusters):
        for stage in cluster.stages:
            provider = providers[stage.provider]
            if provider.host:
                share = busy.setdefault(provider.host, {})
                share[number] = share.get(number, 0.0) + stage.compute_seconds * provider.threads
                cores[provider.host] = provider.cores
        if network.requester.host in busy:
            fed = sum(stage.fed_bytes > 0 for stage in cluster.stages)
            share = busy[network.requester.host]
            share[number] = share.get(number, 0.0) + (fed + 1) * FRAME_SECONDS
    rates = [cluster.samples_per_second for cluster in clusters]
    limit = ""
    for host in sorted(busy):
        load = sum(seconds * rates[n] / clusters[n].samples for n, seconds in busy[host].items())
        if load > cores[host]:
            limit = f"the {cores[host]} cores of {host}"
            for n in busy[host]:
                rates[n] *= cores[host] / load
    return tuple(rates), limit


def _sharing_the_requester(
    network: Network,
    providers: Mapping[str, Provider],
    clusters: Sequence[Cluster],
    rates: tuple[float, ...],
    limit: str,
) -> tuple[tuple[float, ...], str]:
    """The rates with the requester's line: it carries what is fed to other machines and their results, and relayed
    frames both ways."""
    requester = network.requester
    fed = relayed = results = 0.0
    for rate, cluster in zip(rates, clusters, strict=True):
        microbatches = rate / cluster.samples
        elsewhere = [providers[stage.provider].machine != requester.host for stage in cluster.stages]
        fed += microbatches * sum(
            s.fed_bytes for s, is_elsewhere in zip(cluster.stages, elsewhere, strict=True) if is_elsewhere
        )
        results += microbatches * RESULT_BYTES * (elsewhere[0] + elsewhere[-1])
        relayed += microbatches * sum(s.relayed_bytes for s in cluster.stages)
    up = (fed + relayed) / requester.up_bytes_per_second
    down = (results + relayed) / requester.down_bytes_per_second
    load = max(up, down)
    if load <= 1:
        return rates, limit
    together = sum(rates)
    own, bytes_per_second, name = (
        (fed, requester.up_bytes_per_second, "uplink")
        if up >= down
        else (results, requester.down_bytes_per_second, "downlink")
    )
    relays = f", of which {decimal_size(relayed / together)} relayed" if relayed else ""
    limit = (
        f"the requester's {name}: {decimal_size((own + relayed) / together)} a sample{relays}, "
        f"{megabits(bytes_per_second)} Mbit/s, {sample_rate(together / load)} samples/s"
    )
    return tuple(rate / load for rate in rates), limit

"""Provider profiles: the measurements of each member of a swarm, in the form that the planner takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ravnest.coordinator.plan.observed_limits import ObservedLimits
from ravnest.coordinator.swarm.members import Member
from ravnest.coordinator.swarm.own_line import is_own_host
from ravnest.coordinator.swarm.reachability import Reach
from ravnest.errors import PeerError
from ravnest.graph.profile import CostProfile
from ravnest.net.probe.measuring import LinkSpeed
from ravnest.planner.problem import NO_LIMIT, Line, Network, Pair, Provider, Requester

SPEEDS = (1e-5, 1e5)
"""Plausible speeds of a machine relative to the one that measured the model."""
RATES = (1e3, 1e12)
"""Plausible bytes per second of a line."""
MAX_LATENCY_SECONDS = 10.0
MAX_STAGE_SECONDS = 3600.0

OPERATOR_SECONDS = 100e-6
"""Time for a GPU to start an operator and its backward. Measured with small models on an NVIDIA H200."""


@dataclass(frozen=True, slots=True)
class StatedLine:
    """The coordinator's line to the internet as its owner states it; None: at least the best rate that was measured."""

    up_bytes_per_second: float | None = None
    down_bytes_per_second: float | None = None


UNSTATED: Final = StatedLine()


@dataclass(frozen=True, slots=True)
class Machine:
    """The coordinator's own machine, whose cores the providers on it share."""

    cores: int
    threads: int
    """Threads of each provider that does not report a number itself."""
    line: StatedLine = UNSTATED

    @property
    def host(self) -> str:
        return "this machine"


def measured_lines(
    pair: Pair, found: LinkSpeed | PeerError, providers: Mapping[str, Provider], network: Network
) -> dict[Pair, Line]:
    """The line in both directions, from a measurement; after a failed one, from the figures of both ends."""
    here, there = pair
    if isinstance(found, PeerError):
        one, other = providers[here], providers[there]
        return {pair: network.line(one, other), (there, here): network.line(other, one)}
    latency = _latency(found)
    return {
        pair: Line(_plausible(found.up_bytes_per_second, RATES), latency),
        (there, here): Line(_plausible(found.down_bytes_per_second, RATES), latency),
    }


def provider_of(
    member: Member,
    costs: CostProfile,
    reach: Reach,
    machine: Machine,
    believed: ObservedLimits | None = None,
    reliability: float = 1.0,
) -> Provider:
    """A member as the planner sees it, within the limits that the run has observed."""
    here, lent = is_own_host(member.host), member.machine
    on_processor = lent.device.startswith("cpu")
    # Without a measurement: the speed of the machine that measured the model, less a pretended slowdown.
    unmeasured = 1.0 / max(1.0, lent.slower)
    flops = lent.speed.flops_in(costs.precision)
    slowness = 1.0 if believed is None else believed.slowness(member.node_id)
    provider = Provider(
        name=member.node_id,
        memory_bytes=lent.memory_bytes if believed is None else believed.memory_bytes(member),
        compute_speed=_relative(flops, costs.flops_per_second, unmeasured * costs.precision_speed) / slowness,
        memory_speed=_relative(lent.speed.memory_bytes_per_second, costs.memory_bytes_per_second, unmeasured)
        / slowness,
        operator_seconds=0.0 if on_processor else slowness * OPERATOR_SECONDS,
        min_stage_seconds=slowness * min(lent.stage_seconds, MAX_STAGE_SECONDS),
        reachable=bool(reach.address),
        reliability=reliability,
        host=machine.host if here else "",
        cores=machine.cores if here else lent.cores,
        # A machine that pretends to be slower waits instead of computing.
        threads=(lent.threads or machine.threads) / max(1.0, lent.slower) if on_processor else 1,
    )
    line = member.link.speed
    if line is None or here:
        return provider
    return replace(
        provider,
        up_bytes_per_second=_plausible(line.up_bytes_per_second, RATES),
        down_bytes_per_second=_plausible(line.down_bytes_per_second, RATES),
        latency_seconds=_latency(line),
    )


def requester_of(members: Sequence[Member], machine: Machine) -> Requester:
    """The coordinator's own line: as its owner states it, otherwise at least as fast as the fastest line that was
    measured to it."""
    lines = [member.link.speed for member in members if not is_own_host(member.host)]
    links = [line for line in lines if line is not None]
    up, down = machine.line.up_bytes_per_second, machine.line.down_bytes_per_second
    if up is None and links:
        up = _plausible(max(link.down_bytes_per_second for link in links), RATES)
    if down is None and links:
        down = _plausible(max(link.up_bytes_per_second for link in links), RATES)
    return Requester(machine.host, NO_LIMIT if up is None else up, NO_LIMIT if down is None else down)


def _relative(speed: float, reference: float, unmeasured: float) -> float:
    """Speed of a machine relative to the one that measured the model; `unmeasured` if one of the two is unknown."""
    return _plausible(speed / reference if speed > 0 and reference > 0 else unmeasured, SPEEDS)


def _latency(link: LinkSpeed) -> float:
    return min(link.round_trip_seconds / 2, MAX_LATENCY_SECONDS)


def _plausible(figure: float, limits: tuple[float, float]) -> float:
    """A reported figure, clamped to plausible limits: no plan may depend on a machine that claims absurd figures."""
    return min(max(figure, limits[0]), limits[1])

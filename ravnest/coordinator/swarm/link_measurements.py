"""Measurements of connections: from each provider to the coordinator, and between two providers on request.

Between two providers the first dials the second, as a stage dials the next one. Each provider takes part in one
measurement at a time, so that measurements do not disturb one another.
"""

import asyncio
import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from ravnest import units
from ravnest.errors import PeerError, printable
from ravnest.net.pacing.traffic_limit import MIN_RATE
from ravnest.net.probe.measuring import REPORT_SECONDS, LinkSpeed
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Measured, MeasurePeer, PeerMeasured, ProviderMessage

if TYPE_CHECKING:
    from ravnest.coordinator.swarm.members import Member, Members
    from ravnest.coordinator.swarm.swarm import Swarm

Pair = tuple[str, str]
"""The provider that measures, and the one that it dials."""

_ERROR_CHARACTERS = 500


async def measure_pairs(
    swarm: "Swarm", pairs: Iterable[Pair], timeout_seconds: float = REPORT_SECONDS
) -> dict[Pair, LinkSpeed | PeerError]:
    """Asks the first provider of each pair to measure the connection to the second; the results by pair.

    A pair that could not be measured has an error instead, and never delays the others by more than `timeout_seconds`.
    Pairs with a provider that does not measure are left out: in the embedded swarm all run on one machine. Runs on the
    network's loop.
    """
    asked = {pair for pair in pairs if pair[0] != pair[1] and all(_measures(swarm, node) for node in pair)}
    free = {node: asyncio.Lock() for pair in asked for node in pair}

    async def one(pair: Pair) -> LinkSpeed | PeerError:
        # The same order for all pairs prevents a deadlock.
        first, second = sorted(pair)
        async with free[first], free[second]:
            try:
                async with asyncio.timeout(timeout_seconds):
                    return await _measure_pair(swarm, pair)
            except TimeoutError:
                return PeerError(
                    f"{pair[0]} did not measure the connection to {pair[1]} within {timeout_seconds:g} seconds"
                )
            except PeerError as error:
                return error

    ordered = sorted(asked)
    return dict(zip(ordered, await asyncio.gather(*map(one, ordered)), strict=True))


class PairAnswers:
    """Results of the measurements that were asked for; others are ignored."""

    def __init__(self) -> None:
        self._expected: dict[Pair, LinkSpeed | PeerError | None] = {}

    def expect(self, pair: Pair) -> None:
        self._expected[pair] = None

    def take(self, pair: Pair) -> LinkSpeed | PeerError | None:
        """Removes and returns the result; None without one."""
        return self._expected.pop(pair, None)

    def has(self, pair: Pair) -> bool:
        return self._expected.get(pair) is not None

    def heard(self, node_id: str, answer: PeerMeasured) -> None:
        pair = (node_id, answer.node)
        if pair in self._expected:
            self._expected[pair] = link_of(answer) or PeerError(
                printable(answer.error[:_ERROR_CHARACTERS]) or "it gave no figures"
            )


def hear(members: "Members", member: "Member", message: ProviderMessage) -> bool:
    """Takes a message with measurements; whether it was one."""
    if message.HasField("measured"):
        # A provider measures once per session. A later figure could turn a link that stands still into a slow one.
        if member.link.speed is None and not member.link.error:
            member.link.speed = link_of(message.measured)
            error = printable(message.measured.error[:_ERROR_CHARACTERS]) or "it gave no figures"
            member.link.error = "" if member.link.speed else error
    elif message.HasField("speed"):
        member.machine.change_share(message.speed)
    elif message.HasField("peer_measured"):
        members.pairs.heard(member.node_id, message.peer_measured)
    else:
        return False
    members.changes.notify()
    return True


def link_of(answer: "Measured | PeerMeasured") -> LinkSpeed | None:
    """The speed in a provider's result; None for impossible figures.

    No rate is lower than the smallest limit that a user may set: timeouts grow with the time that a line needs.
    """
    figures = answer.round_trip_seconds, answer.up_bytes_per_second, answer.down_bytes_per_second
    if answer.error or not all(map(positive, figures)):
        return None
    round_trip_seconds, up, down = figures
    return LinkSpeed(round_trip_seconds, max(MIN_RATE, up), max(MIN_RATE, down))


def positive(figure: float) -> float:
    """A figure from another machine; 0 for an impossible one."""
    return figure if math.isfinite(figure) and figure > 0 else 0.0


def describe(member: "Member") -> str:
    """The known properties of a provider's machine in words: "cpu, 8 cores, 12.0 GiB, 95 GFLOP/s, 24 ms, 92/31 Mbit/s".

    The first of the two rates is to the provider, the second from it.
    """
    machine = member.machine
    parts = [machine.device]
    if machine.cores and machine.device == "cpu":
        parts.append(units.counted(machine.cores, "core"))
    if machine.speed.flops_per_second:
        parts += [units.byte_size(machine.memory_bytes), units.flops(machine.speed.flops_per_second)]
    if (link := member.link.speed) is not None:
        rates = f"{units.megabits(link.down_bytes_per_second)}/{units.megabits(link.up_bytes_per_second)} Mbit/s"
        parts += [units.milliseconds(link.round_trip_seconds), rates]
    elif member.link.error:
        parts.append("connection not measured")
    return ", ".join(parts)


def figures(member: "Member") -> dict[str, object]:
    """The same as plain values, for events; unknown ones are left out."""
    machine, link = member.machine, member.link.speed
    known: dict[str, object] = {
        "memory_bytes": machine.memory_bytes,
        "cores": machine.cores,
        **asdict(machine.speed),
        "device_name": machine.device_name,
        "link_error": member.link.error,
        **({} if link is None else asdict(link)),
    }
    return {name: value for name, value in known.items() if value}


async def _measure_pair(swarm: "Swarm", pair: Pair) -> LinkSpeed | PeerError:
    measuring, measured = pair
    members = swarm.members
    members.pairs.expect(pair)
    try:
        order = MeasurePeer(node=measured, address=_address(members[measured]))
        await swarm.tell(measuring, CoordinatorMessage(measure_peer=order))
        await members.changes.until(lambda: members.pairs.has(pair) or not members.is_present(measuring))
    finally:
        answer = members.pairs.take(pair)
    return answer or PeerError(f"{measuring} left before it had measured the connection to {measured}")


def _address(member: "Member") -> str:
    """The address at which to dial a provider; PeerError when it is known to be unreachable."""
    address = member.address if member.reach is None else member.reach.address
    if not address:
        raise PeerError(member.reach.reason if member.reach is not None else f"{member.node_id} dials out only")
    return address


def _measures(swarm: "Swarm", node_id: str) -> bool:
    return node_id in swarm.members and swarm.members[node_id].link.is_expected

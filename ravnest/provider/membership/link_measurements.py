"""Measurements of a provider's connections: to the coordinator when it joins, to other providers when asked."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import asdict, replace

from ravnest import units
from ravnest.background import cancel_and_wait
from ravnest.errors import PeerError
from ravnest.net.address import is_nearby, own_addresses, split_address
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.pacing.budget import StateBudget
from ravnest.net.pacing.traffic_limit import NO_LIMITS, UserLimits
from ravnest.net.probe.measuring import PEER_SECONDS, LinkSpeed
from ravnest.net.rpc.client import CoordinatorClient, measure_peer
from ravnest.net.streams.control_channel import ControlLink
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Measured, MeasurePeer, PeerMeasured, ProviderMessage

ControlStream = ControlLink[ProviderMessage, CoordinatorMessage]

_MAX_WAITING = 1000


class CoordinatorLink:
    """The connection to the coordinator, as measured in the first session. Later sessions report the same figures."""

    def __init__(
        self, say: Callable[[str], None], budget: StateBudget | None = None, limits: UserLimits = NO_LIMITS
    ) -> None:
        """`say` prints lines for the user. The `budget` learns the rate of the uplink. Reports and plans keep to the
        user's `limits`."""
        self._limits = limits
        self._budget = budget
        self._say = say
        self._known: LinkSpeed | None = None

    async def report(self, client: CoordinatorClient, control: ControlStream) -> None:
        """Measure the connection, unless that is done, and send the result. PeerError when the session is over. A
        failed measurement is reported, and retried in the next session."""
        known = self._known
        try:
            speed = known or within(await client.measure(), self._limits)
        except PeerError as error:
            await control.send(ProviderMessage(measured=Measured(error=str(error))))
            return
        self._known = speed
        if self._budget is not None:
            self._budget.measured(speed.up_bytes_per_second, is_nearby=await is_on_own_network(client.address))
        await control.send(ProviderMessage(measured=Measured(**asdict(speed))))
        if known is None:
            down, up = units.megabits(speed.down_bytes_per_second), units.megabits(speed.up_bytes_per_second)
            trip = units.milliseconds(speed.round_trip_seconds)
            self._say(f"connection to the coordinator: {trip}, {down} Mbit/s down, {up} Mbit/s up")


def within(speed: LinkSpeed, limits: UserLimits) -> LinkSpeed:
    """The speed of a connection as far as the user's limits allow it to be used."""
    return replace(
        speed,
        up_bytes_per_second=min(speed.up_bytes_per_second, limits.upload_bytes_per_second),
        down_bytes_per_second=min(speed.down_bytes_per_second, limits.download_bytes_per_second),
    )


async def is_on_own_network(address: str) -> bool:
    """Whether this address is on a network that this machine is on."""
    host, port = split_address(address)
    with contextlib.suppress(OSError):
        host = str((await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM))[0][4][0])
    return is_nearby(host, own_addresses(host))[0]


class PeerMeasuring:
    """Measures connections to other providers, one after the other, in the background."""

    def __init__(
        self,
        node: NodeIdentity,
        control: ControlStream,
        budget: StateBudget | None = None,
        limits: UserLimits = NO_LIMITS,
    ) -> None:
        """`budget` and `limits` as in CoordinatorLink."""
        self._node = node
        self._limits = limits
        self._budget = budget
        self._control = control
        self._orders: asyncio.Queue[MeasurePeer] = asyncio.Queue(_MAX_WAITING)
        self._task = asyncio.create_task(self._work())

    def take(self, order: MeasurePeer) -> None:
        """Queue an order; PeerError when the coordinator has queued too many."""
        try:
            self._orders.put_nowait(order)
        except asyncio.QueueFull:
            raise PeerError(f"the coordinator wants more than {_MAX_WAITING} connections measured at once") from None

    async def close(self) -> None:
        """End the measurement under way."""
        await cancel_and_wait(self._task)

    async def _work(self) -> None:
        while True:
            order = await self._orders.get()
            # A broken link ends the session where it is read.
            await self._control.send(ProviderMessage(peer_measured=await self._measure(order)))

    async def _measure(self, order: MeasurePeer) -> PeerMeasured:
        try:
            async with asyncio.timeout(PEER_SECONDS):
                speed = within(await measure_peer(order.address, order.node, self._node), self._limits)
        except TimeoutError:
            error = f"{order.node} at {order.address} did not answer within {PEER_SECONDS:g} seconds"
            return PeerMeasured(node=order.node, error=error)
        except PeerError as failure:
            return PeerMeasured(node=order.node, error=str(failure))
        if self._budget is not None:
            self._budget.measured(speed.up_bytes_per_second, is_nearby=await is_on_own_network(order.address))
        return PeerMeasured(node=order.node, **asdict(speed))

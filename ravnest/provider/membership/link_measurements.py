"""A provider's measurements of its connections: to the coordinator when it joins, to other providers when asked."""

import asyncio

from ravnest.background import cancel_and_wait
from ravnest.errors import PeerError
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.probe.measuring import LinkSpeed
from ravnest.net.rpc.client import CoordinatorClient, measure_peer
from ravnest.net.streams.control_channel import ControlLink
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Measured, MeasurePeer, PeerMeasured, ProviderMessage

ControlStream = ControlLink[ProviderMessage, CoordinatorMessage]

_MAX_WAITING = 1000
_PEER_SECONDS = 40.0


async def report_link(
    client: CoordinatorClient, control: ControlStream, known: LinkSpeed | None = None
) -> LinkSpeed | None:
    """Measures the connection to the coordinator and tells it; None, and the reason is told, when it cannot be.

    Where it is `known`, as for a provider that comes back in the middle of its work, that is told at once. PeerError
    when the stay is over.
    """
    try:
        speed = known or await client.measure()
    except PeerError as error:
        await control.send(ProviderMessage(measured=Measured(error=str(error))))
        return None
    await control.send(
        ProviderMessage(
            measured=Measured(
                round_trip_seconds=speed.round_trip_seconds,
                up_bytes_per_second=speed.up_bytes_per_second,
                down_bytes_per_second=speed.down_bytes_per_second,
            )
        )
    )
    return speed


class PeerMeasuring:
    """Measures what the coordinator asks for, one after the other, beside whatever else the provider does."""

    def __init__(self, node: NodeIdentity, control: ControlStream) -> None:
        self._node = node
        self._control = control
        self._orders: asyncio.Queue[MeasurePeer] = asyncio.Queue(_MAX_WAITING)
        self._task = asyncio.create_task(self._work())

    def take(self, order: MeasurePeer) -> None:
        """Takes an order; PeerError when the coordinator gives more of them than anybody needs."""
        try:
            self._orders.put_nowait(order)
        except asyncio.QueueFull:
            raise PeerError(f"the coordinator wants more than {_MAX_WAITING} connections measured at once") from None

    async def close(self) -> None:
        """Ends what is under way."""
        await cancel_and_wait(self._task)

    async def _work(self) -> None:
        while True:
            order = await self._orders.get()
            # When the stream is broken, whoever reads it notices and ends the provider.
            await self._control.send(ProviderMessage(peer_measured=await self._measure(order)))

    async def _measure(self, order: MeasurePeer) -> PeerMeasured:
        try:
            async with asyncio.timeout(_PEER_SECONDS):
                speed = await measure_peer(order.address, order.node, self._node)
        except TimeoutError:
            error = f"{order.node} at {order.address} did not answer within {_PEER_SECONDS:g} seconds"
            return PeerMeasured(node=order.node, error=error)
        except PeerError as failure:
            return PeerMeasured(node=order.node, error=str(failure))
        return PeerMeasured(
            node=order.node,
            round_trip_seconds=speed.round_trip_seconds,
            up_bytes_per_second=speed.up_bytes_per_second,
            down_bytes_per_second=speed.down_bytes_per_second,
        )

"""Presence of a provider in the network: its servers, its addresses, and the connections that other nodes make."""

import contextlib
from collections.abc import Collection
from dataclasses import dataclass

from ravnest.errors import RefusedError
from ravnest.net.address import is_wildcard, join_address, own_address_towards
from ravnest.net.direct_server import DirectServer
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.identity.swarm_invite import SwarmInvite
from ravnest.net.rpc.server import ProviderServer
from ravnest.net.streams.frame_stream import Link
from ravnest.provider.console import Console
from ravnest.provider.replicas.service import ReplicaService
from ravnest.provider.stage.slot import StageSlot


@dataclass(frozen=True)
class NetworkPresence:
    """How other nodes know and reach this provider."""

    node: NodeIdentity
    server: ProviderServer
    links: "IncomingLinks"
    address: str
    """The address that neighbouring stages dial; empty without a port."""
    direct_port: int
    """Port for direct lines between owners of a ring; 0 without one."""


async def appear(
    node: NodeIdentity,
    invite: SwarmInvite,
    listen: tuple[str, int] | None,
    advertise: tuple[str, int] | None,
    slot: StageSlot,
    console: Console,
    stack: contextlib.AsyncExitStack,
) -> NetworkPresence:
    """Start the servers of this provider, which end with the stack; with `listen` None, there are none."""
    links = IncomingLinks(slot)
    server = ProviderServer(links, node, lambda report: console.say(str(report)))
    stack.push_async_callback(server.stop)

    def allow(neighbours: Collection[str]) -> None:
        server.neighbours = neighbours

    slot.on_neighbours = allow
    if listen is None:
        return NetworkPresence(node, server, links, address="", direct_port=0)
    host, port = listen
    address = _address(invite, advertise, host, await server.start(host, port))
    direct = DirectServer(node, slot.is_neighbour, slot.take_direct)
    # Next to the port that the user chose: a user who forwards one port of a router can forward two.
    direct_port = direct.start(host, port + 1 if 0 < port < 65535 else 0)
    stack.callback(direct.stop)
    return NetworkPresence(node, server, links, address, direct_port)


def _address(invite: SwarmInvite, advertise: tuple[str, int] | None, listen_host: str, port: int) -> str:
    """The address at which neighbouring stages reach this provider."""
    if advertise is not None:
        return join_address(advertise[0], advertise[1] or port)
    if is_wildcard(listen_host):
        return join_address(own_address_towards(invite.host, invite.port), port)
    return join_address(listen_host, port)


class IncomingLinks:
    """Passes the connections of other nodes to the stage, or to the exchange of replicas."""

    def __init__(self, slot: StageSlot) -> None:
        self.parts: ReplicaService | None = None
        """The exchange of replicas, while there is a session."""
        self._slot = slot

    async def link(self, peer: str, connection: Link) -> None:
        """Serve a connection until it breaks. A neighbouring stage may dial before the own stage is built."""
        if self.parts is not None and await self.parts.accept(peer, connection):
            return
        if not self._slot.is_neighbour(peer):
            raise RefusedError(f"there is no link {connection.label[:80]!r} with {peer} here")
        await (await self._slot.next_stage()).accept(peer, connection)

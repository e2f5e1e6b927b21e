"""Budgets for a port: how many connections may wait to prove who they are, and which of them are closed.

Anyone on the internet can open a connection, and each takes a file descriptor until it is closed. This file decides;
ravnest/net/door/doorkeeper.py looks at the connections and closes them.
"""

import ipaddress
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_MAX_INCOMING: Final = 16_384
_MIN_INCOMING: Final = 64
_WAITING_PER_ADDRESS: Final = 128
"""A hundred machines behind one router may join in the same second."""
_SHARE_OF_ADDRESS: Final = 16
"""An address may have this part of all that wait, where that is more: an embedded swarm on a large machine is one."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """How many connections one port takes, and how long each may take to prove who it is."""

    incoming: int
    """Connections of every kind."""
    waiting: int
    """Connections that have not proved that they belong to a node."""
    waiting_per_address: int
    """The same from one address."""
    per_node: int = 32
    """Connections of one node. A provider has a few with each neighbour, and the dead ones of a line that broke."""
    silent_seconds: float = 5.0
    """Time for the first byte. A caller speaks first in TLS; a lost packet is sent again after 1 s and 3 s."""
    proving_seconds: float = 25.0
    """Time for the handshake and the first call."""
    invited_seconds: float = 120.0
    """Time for the holder of an invite, who joins or measures the line and then comes back as a node."""


@dataclass(frozen=True, slots=True)
class IncomingConnection:
    """One connection that came in."""

    peer: tuple[str, int]
    """Address and port of the other end."""
    since: float
    """When it was first seen."""
    has_spoken: bool
    """Whether a byte has come over it."""
    caller: str = ""
    """The node or `invite:ID` that made a call over it; empty before the first call."""

    @property
    def origin(self) -> str:
        """The address that its budget belongs to."""
        return origin_of(self.peer[0])

    @property
    def is_node(self) -> bool:
        return bool(self.caller) and ":" not in self.caller


@dataclass(frozen=True, slots=True)
class Closing:
    """A decision to close one connection."""

    connection: IncomingConnection
    reason: str


def budgets_for(descriptors: int) -> Budgets:
    """The budgets of a process that may have this many file descriptors open.

    Half of them are for connections that come in; the process needs the others for its files, its own connections and
    its children. Half of the connections are for nodes.
    """
    incoming = min(max(descriptors // 2, _MIN_INCOMING), _MAX_INCOMING)
    waiting = incoming // 2
    return Budgets(incoming, waiting, min(waiting, max(_WAITING_PER_ADDRESS, waiting // _SHARE_OF_ADDRESS)))


def origin_of(host: str) -> str:
    """The address that a budget belongs to: the host, or the /64 network of an IPv6 host, which one customer has."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        if not address.is_loopback:
            return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def connections_to_close(connections: Sequence[IncomingConnection], now: float, budgets: Budgets) -> list[Closing]:
    """Which connections to close, each with the reason.

    Of too many that wait, the silent ones go first, then the oldest: an honest caller speaks at once and is through its
    handshake within a second or two. Where all addresses together are over the budget, those with most connections
    lose theirs first, so that an attacker with many connections does not shut out a caller with one.
    """
    waiting = [connection for connection in connections if not connection.is_node]
    closing = [Closing(connection, reason) for connection in waiting if (reason := _overdue(connection, now, budgets))]
    overdue = {each.connection for each in closing}
    left = sorted((c for c in waiting if c not in overdue), key=lambda c: (c.has_spoken, c.since))
    counts = Counter(connection.origin for connection in left)
    total = len(left)
    max_first = sorted(left, key=lambda c: -min(counts[c.origin], budgets.waiting_per_address + 1))
    for connection in max_first:
        if counts[connection.origin] > budgets.waiting_per_address:
            reason = f"more than {budgets.waiting_per_address} connections waited to prove who they are"
        elif total > budgets.waiting:
            reason = f"more than {budgets.waiting} connections of all addresses waited to prove who they are"
        else:
            continue
        counts[connection.origin] -= 1
        total -= 1
        closing.append(Closing(connection, reason))
    return closing + _too_many_of_a_node(connections, budgets)


def _overdue(connection: IncomingConnection, now: float, budgets: Budgets) -> str:
    age = now - connection.since
    if connection.caller:
        return f"stayed with an invite for {budgets.invited_seconds:g} s" if age > budgets.invited_seconds else ""
    if not connection.has_spoken and age > budgets.silent_seconds:
        return f"said nothing for {budgets.silent_seconds:g} s"
    return f"did not prove who it is in {budgets.proving_seconds:g} s" if age > budgets.proving_seconds else ""


def _too_many_of_a_node(connections: Sequence[IncomingConnection], budgets: Budgets) -> list[Closing]:
    """The oldest connections of a node that has too many: of a line that broke again and again, the dead ones."""
    closing = []
    newest_first = sorted((c for c in connections if c.is_node), key=lambda c: -c.since)
    counts: Counter[str] = Counter()
    for connection in newest_first:
        counts[connection.caller] += 1
        if counts[connection.caller] > budgets.per_node:
            reason = f"{connection.caller} had more than {budgets.per_node} connections"
            closing.append(Closing(connection, reason))
    return closing

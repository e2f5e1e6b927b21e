"""Budgets for a port: limits on the connections that have not proved their identity, and which of them to close.

Anyone on the internet can open a connection, and each takes a file descriptor until it is closed. This module decides;
ravnest/net/door/doorkeeper.py lists the connections and closes them.
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
"""One address may have 1/16 of all waiting connections if that is more: an embedded swarm on a large machine is one."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Maximum number of connections of a port, and the time that each of them may take to prove its identity."""

    incoming: int
    """All connections."""
    waiting: int
    """Connections that have not proved that they belong to a node."""
    waiting_per_address: int
    """Connections from one address that have not proved that they belong to a node."""
    per_node: int = 32
    """Connections of one node. A provider has a few with each neighbour, and dead ones after a connection broke."""
    silent_seconds: float = 5.0
    """Timeout of the first byte. In TLS the caller speaks first; TCP sends a lost packet again after 1 s and 3 s."""
    proving_seconds: float = 25.0
    """Timeout of the handshake and the first call."""
    invited_seconds: float = 120.0
    """Time for the holder of an invite, which joins or measures its connection, and then comes back as a node."""


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

    Half of the descriptors are for incoming connections; the process needs the others for its files, its own
    connections and its children. Half of the incoming connections are for nodes.
    """
    incoming = min(max(descriptors // 2, _MIN_INCOMING), _MAX_INCOMING)
    waiting = incoming // 2
    return Budgets(incoming, waiting, min(waiting, max(_WAITING_PER_ADDRESS, waiting // _SHARE_OF_ADDRESS)))


def origin_of(host: str) -> str:
    """The address whose budget a host uses: the host itself, or the /64 network of an IPv6 host, which one customer
    owns."""
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

    Connections that have waited too long are closed first. Over a budget, silent connections go before the others, and
    older ones before newer ones: an honest caller speaks at once and completes its handshake within a second or two. If
    all addresses together are over the budget, the address with the most connections loses some first, so that an
    attacker with many connections does not shut out a caller with one.
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
            reason = f"more than {budgets.waiting_per_address} connections waited to prove their identity"
        elif total > budgets.waiting:
            reason = f"more than {budgets.waiting} connections of all addresses waited to prove their identity"
        else:
            continue
        counts[connection.origin] -= 1
        total -= 1
        closing.append(Closing(connection, reason))
    return closing + _too_many_of_a_node(connections, budgets)


def _overdue(connection: IncomingConnection, now: float, budgets: Budgets) -> str:
    age = now - connection.since
    if connection.caller:
        return f"used an invite for more than {budgets.invited_seconds:g} s" if age > budgets.invited_seconds else ""
    if not connection.has_spoken and age > budgets.silent_seconds:
        return f"said nothing for {budgets.silent_seconds:g} s"
    return f"did not prove its identity within {budgets.proving_seconds:g} s" if age > budgets.proving_seconds else ""


def _too_many_of_a_node(connections: Sequence[IncomingConnection], budgets: Budgets) -> list[Closing]:
    """The oldest connections of a node that has too many: after many broken connections, these are the dead ones."""
    closing = []
    newest_first = sorted((c for c in connections if c.is_node), key=lambda c: -c.since)
    counts: Counter[str] = Counter()
    for connection in newest_first:
        counts[connection.caller] += 1
        if counts[connection.caller] > budgets.per_node:
            reason = f"{connection.caller} had more than {budgets.per_node} connections"
            closing.append(Closing(connection, reason))
    return closing

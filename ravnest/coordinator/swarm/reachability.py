"""Reachability of providers, and which end dials a link between two of them."""

from dataclasses import dataclass

from ravnest.errors import PeerError
from ravnest.net.address import join_address, split_address
from ravnest.net.identity.certificates import Certificate
from ravnest.net.probe.handshake import probe
from ravnest.net.v1.control_pb2 import (
    DIALLING_AWAIT,
    DIALLING_DIRECT,
    DIALLING_RELAY,
    Dialling,
)

PROBE_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class Reach:
    """Address at which a provider can be dialled, empty if it is unreachable, and the reason."""

    address: str
    reason: str


async def find_reach(node_id: str, address: str, seen_host: str, authority: Certificate) -> Reach:
    """Dials the provider at its address and, if that fails, at the host from which its connections come: the latter is
    right for a machine behind a router that forwards the port."""
    if not address:
        return Reach("", f"{node_id} dials out only")
    host, port = split_address(address)
    candidates = [address]
    if seen_host and seen_host != host:
        candidates.append(join_address(seen_host, port))
    failures = []
    for candidate in candidates:
        try:
            await probe(candidate, node_id, authority, PROBE_SECONDS)
        except PeerError as error:
            failures.append(str(error))
            continue
        return Reach(candidate, f"{node_id} answers at {candidate}")
    return Reach("", "; ".join(failures))


def choose_dialling(before: Reach, after: Reach) -> tuple[Dialling, Dialling, str]:
    """The dialling of a link between two stages: what the earlier one does, what the later one does, and why."""
    if after.address:
        return DIALLING_DIRECT, DIALLING_AWAIT, after.reason
    if before.address:
        return DIALLING_AWAIT, DIALLING_DIRECT, f"{after.reason}, but {before.reason}"
    return DIALLING_RELAY, DIALLING_AWAIT, f"{before.reason}, and {after.reason}"

"""State of the failure detector for one provider, from when a run begins to watch it until its session ends."""

import asyncio
from dataclasses import dataclass, field

from ravnest.coordinator.health.lease import Lease, State
from ravnest.coordinator.health.other_work import OtherWork
from ravnest.coordinator.swarm.members import Members
from ravnest.net.v1.control_pb2 import Report


@dataclass
class ProviderHealth:
    """One session of one provider, as the watchdog sees it."""

    lease: Lease
    moved_at: float
    """When the counters of its work were last seen to grow."""
    state: State = State.WELL
    connections: int = 0
    """Connections that its control link had had when the provider was suspected."""
    refuses: bool = False
    """Whether the provider's address refuses connections, though its machine answers."""
    probe: "asyncio.Task[None] | None" = None
    """The task that dials the provider's address to find that out."""
    counts: tuple[int, ...] = ()
    """Forwards, backwards and updates of the last report."""
    other_work: OtherWork = field(default_factory=OtherWork)
    """The time that page faults have excused."""
    report: Report | None = None
    claim: str = ""
    """The upload of its state that the provider reports, and how much of it has arrived; empty without one."""
    stalls: bool = False
    """Whether the provider is suspected of blocking its cluster."""


def is_well(members: Members, node_id: str) -> bool:
    """Whether the provider is connected and not suspected, so that it may take a stage."""
    if not members.is_present(node_id):
        return False
    member = members[node_id]
    is_suspected = member.health is None or member.health.state is not State.WELL
    return not is_suspected and member.control.link.connected and member.feed.connected

"""State of the failure detector for one provider, from when a run begins to watch it until its stay ends."""

import asyncio
from dataclasses import dataclass

from ravnest.coordinator.health.lease import Lease, State
from ravnest.net.v1.control_pb2 import Report


@dataclass
class ProviderHealth:
    """One stay of one provider, as the watchdog sees it."""

    lease: Lease
    moved_at: float
    """When the work that the provider has done was last seen to grow."""
    state: State = State.WELL
    connections: int = 0
    """Connections that its control link had had when the provider was suspected."""
    refuses: bool = False
    """Whether nothing listens any more at the provider's address, though its machine answers."""
    knocking: "asyncio.Task[None] | None" = None
    """The task that dials the provider's address to find that out."""
    counts: tuple[int, ...] = ()
    """Forwards, backwards and updates of the last report."""
    report: Report | None = None
    sends: str = ""
    """The upload of its state that the provider claims, and what the coordinator sees of it."""
    stalls: bool = False
    """Whether the provider was told of as the one that holds its cluster up."""

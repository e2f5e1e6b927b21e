"""Record of one provider: everything that the coordinator knows of it, in one object.

`Members.records` has it. The latest session is in `member`. The other fields outlive a session, so that a provider
cannot clear them by joining again. They end with the run (`Members.begin_run`), except for the presence, which the
swarm remembers. Each value belongs to the package that decides by it; the record only holds them together.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ravnest.coordinator.swarm.event_quota import EventQuota
from ravnest.coordinator.swarm.presence import Presence

if TYPE_CHECKING:
    from ravnest.coordinator.swarm.members import Member


@dataclass
class Conduct:
    """Accusations by the neighbours of a provider, see health/accusations.py."""

    accused_by: set[str] = field(default_factory=set)
    barred_because: str = ""
    """Why the provider gets no stage any more; empty if it may have one."""


@dataclass
class ProviderRecord:
    """Everything that the swarm and its run know of one provider."""

    node_id: str
    member: "Member | None" = None
    """The latest session; None before the first, and once the provider was removed."""
    events: EventQuota = field(default_factory=EventQuota)
    """Rate limit for events that the provider causes."""
    presence: Presence = field(default_factory=Presence)
    """Its sessions, losses and departures, from which its reliability is estimated."""
    is_lost: bool = False
    """Whether the provider was given up and has not joined again."""
    reported_at: float | None = None
    """When the provider last reported on a stage, on the clock `time.monotonic`."""
    conduct: Conduct = field(default_factory=Conduct)


class ProviderRecords(dict[str, ProviderRecord]):
    """The records of a swarm's providers by node id; a missing one is created."""

    def __missing__(self, node_id: str) -> ProviderRecord:
        record = self[node_id] = ProviderRecord(node_id)
        return record

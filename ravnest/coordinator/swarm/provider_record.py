"""Record of one provider: everything that the coordinator knows of it, in one object.

`Members.records` has it. The provider's present stay is in `stay` and ends with it; the other fields outlive a stay,
so that a provider which leaves and joins again does not get rid of them. They end with the run (`Members.begin_run`),
except for its presence, which the swarm remembers.
Each value belongs to the room that decides by it; this record only holds them together.
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
    """Why the provider gets no stage any more; empty where it may have one."""


@dataclass
class ProviderRecord:
    """What the swarm and its run know of one provider."""

    node_id: str
    stay: "Member | None" = None
    """The present stay; None once it has ended for good."""
    events: EventQuota = field(default_factory=EventQuota)
    """Rate limit for events that the provider causes."""
    presence: Presence = field(default_factory=Presence)
    """Its stays, losses and departures: the provider's reliability follows from them."""
    is_lost: bool = False
    """Whether the provider was given up and has not joined again."""
    reported_at: float | None = None
    """When the provider last reported on a stage, on the clock `time.monotonic`."""
    conduct: Conduct = field(default_factory=Conduct)


class ProviderRecords(dict[str, ProviderRecord]):
    """The records of a swarm's providers by node id; asking for one that is not there creates it."""

    def __missing__(self, node_id: str) -> ProviderRecord:
        record = self[node_id] = ProviderRecord(node_id)
        return record

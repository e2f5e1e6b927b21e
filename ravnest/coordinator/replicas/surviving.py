"""Surviving replicas: what the providers still hold when a coordinator is restarted.

The coordinator records where the data stood at every replica that it announces; the parts are on the providers' disks.
When the providers of a restarted coordinator rejoin with all parts of a replica that is newer than the last checkpoint,
the run continues from that replica.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.replicas.part_uploads import PartRequest
from ravnest.coordinator.swarm.members import Member
from ravnest.errors import RunError
from ravnest.safe_json import read_json


@dataclass(frozen=True, slots=True)
class AnnouncedReplica:
    """Record of a replica that the coordinator announced."""

    key: str
    """The cluster's key, with which the keys of its stages' parts begin."""
    number: int
    place: DataPosition
    starts: tuple[int, ...]
    """For each stage, where it begins in the model."""

    def part_key(self, stage: int) -> str:
        return f"{self.key}-{stage}"

    def to_json(self) -> str:
        return json.dumps({"key": self.key, "number": self.number, "place": asdict(self.place), "starts": self.starts})

    @classmethod
    def from_json(cls, text: str) -> "AnnouncedReplica":
        """RunError when the text is no such record."""
        try:
            record = read_json(text)
            place = DataPosition(**record["place"])
            return cls(str(record["key"]), int(record["number"]), place, tuple(map(int, record["starts"])))
        except (LookupError, TypeError, ValueError) as error:
            raise RunError(f"the store of the run is damaged: a replica cannot be read ({error})") from None


@dataclass(frozen=True, slots=True)
class SurvivingReplica:
    """A replica of which every part is on the disk of a provider that is connected."""

    announced: AnnouncedReplica
    parts: dict[int, PartRequest]
    """By stage."""
    reason: str


def find_surviving_replica(
    announced: Iterable[AnnouncedReplica], members: Sequence[Member], updates: int
) -> SurvivingReplica | None:
    """The newest replica with more than this number of updates of which the members have all parts, or None."""
    for each in sorted(announced, key=lambda each: (each.place.updates, each.number), reverse=True):
        if each.place.updates <= updates:
            return None
        parts: dict[int, PartRequest] = {}
        for stage in range(len(each.starts)):
            key = each.part_key(stage)
            nodes = sorted(member.node_id for member in members if (key, each.number) in member.parts)
            parts[stage] = PartRequest(key, tuple(nodes))
        if all(part.nodes for part in parts.values()):
            reason = f"the providers still hold all stages after {each.place.updates} updates"
            return SurvivingReplica(each, parts, f"{reason}; the last checkpoint has {updates}")
    return None

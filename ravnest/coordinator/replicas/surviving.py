"""A coordinator that is started again: what its providers have kept since the last checkpoint.

The replicas of a run are announced by the coordinator, which notes where the data stood at each; their parts are with
the providers. When these come back with all parts of one, the run goes on from there instead of from a checkpoint that
is older.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from ravnest.coordinator.feed.ledger import Place
from ravnest.coordinator.replicas.part_uploads import Wanted
from ravnest.coordinator.swarm.members import Member
from ravnest.errors import RunError
from ravnest.safe_json import read_json


@dataclass(frozen=True, slots=True)
class Announced:
    """A replica that was announced."""

    key: str
    """Of its cluster: those of its stages' parts begin with it."""
    number: int
    place: Place
    starts: tuple[int, ...]
    """Where its stages begin in the model."""

    def part_key(self, stage: int) -> str:
        return f"{self.key}-{stage}"

    def to_json(self) -> str:
        return json.dumps({"key": self.key, "number": self.number, "place": asdict(self.place), "starts": self.starts})

    @classmethod
    def from_json(cls, text: str) -> "Announced":
        """RunError where the text is something else."""
        try:
            record = read_json(text)
            return cls(
                str(record["key"]), int(record["number"]), Place(**record["place"]), tuple(map(int, record["starts"]))
            )
        except (LookupError, TypeError, ValueError) as error:
            raise RunError(f"the store of the run is damaged: a replica cannot be read ({error})") from None


@dataclass(frozen=True, slots=True)
class Found:
    """A replica of which all parts are there."""

    announced: Announced
    parts: dict[int, Wanted]
    """By stage."""
    reason: str


def find_replica(announced: Iterable[Announced], members: Sequence[Member], updates: int) -> Found | None:
    """The newest replica of more updates than these of which those who are there have all parts; None without one."""
    for each in sorted(announced, key=lambda each: (each.place.updates, each.number), reverse=True):
        if each.place.updates <= updates:
            return None
        parts: dict[int, Wanted] = {}
        for stage in range(len(each.starts)):
            key = each.part_key(stage)
            nodes = sorted(member.node_id for member in members if (key, each.number) in member.parts)
            parts[stage] = Wanted(key, tuple(nodes))
        if all(part.nodes for part in parts.values()):
            reason = f"its providers have kept all stages as they were after {each.place.updates} updates"
            return Found(each, parts, f"{reason}; the last checkpoint has {updates}")
    return None

"""Surviving replicas: what the providers still hold when a coordinator is restarted.

The coordinator records where the data stood at every replica that it announces, and keeps a manifest of the newest
complete one: each part's hash and size, and the providers that have it. The parts are on the providers' disks. When the
providers of a restarted coordinator rejoin with all parts of a replica that is newer than the last checkpoint, the run
continues from that replica. The coordinator waits for them as long as repeating the lost training would take.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.replicas.replica import Replica
from ravnest.coordinator.swarm.members import Member
from ravnest.errors import RunError
from ravnest.safe_json import read_json
from ravnest.units import counted, duration

MAX_WAIT_SECONDS: Final = 600.0
"""Longest wait for providers that have parts of a replica."""


@dataclass(frozen=True, slots=True)
class RecordedPart:
    """A part of a complete replica."""

    sha256: str
    size_bytes: int
    nodes: tuple[str, ...]
    """The providers that had it when the replica was complete."""
    rounded_sha256: str = ""
    """The sha256 of the rounded part of the holder; empty if that is the owner's."""


@dataclass(frozen=True, slots=True)
class AnnouncedReplica:
    """Record of a replica that the coordinator announced."""

    key: str
    """The cluster's key, with which the keys of its stages' parts begin."""
    number: int
    place: DataPosition
    starts: tuple[int, ...]
    """For each stage, where it begins in the model."""
    parts: tuple[RecordedPart, ...] = ()
    """By stage; empty until the replica is complete."""
    at: float = 0.0
    """When it was announced, in seconds since 1970; 0 in an announcement."""

    def part_key(self, stage: int) -> str:
        return f"{self.key}-{stage}"

    def sha256(self, stage: int) -> str:
        return self.parts[stage].sha256 if self.parts else ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "AnnouncedReplica":
        """RunError when the text is no such record."""
        try:
            record = read_json(text)
            place, starts = DataPosition(**record["place"]), tuple(map(int, record["starts"]))
            parts = tuple(
                RecordedPart(
                    str(part["sha256"]),
                    int(part["size_bytes"]),
                    tuple(map(str, part["nodes"])),
                    str(part.get("rounded_sha256", "")),
                )
                for part in record.get("parts", ())
            )
            if len(parts) not in (0, len(starts)):
                raise ValueError(f"it has {len(parts)} parts of {len(starts)} stages")
            return cls(str(record["key"]), int(record["number"]), place, starts, parts, float(record.get("at", 0.0)))
        except (LookupError, TypeError, ValueError) as error:
            raise RunError(f"the store of the run is damaged: a replica cannot be read ({error})") from None


@dataclass(frozen=True, slots=True)
class SurvivingReplica:
    """A replica of which every part is on the disk of a provider that is connected."""

    announced: AnnouncedReplica
    replica: Replica
    reason: str


def find_surviving_replica(
    announced: Iterable[AnnouncedReplica],
    members: Sequence[Member],
    updates: int,
    failed: Collection[tuple[str, int]] = (),
) -> SurvivingReplica | None:
    """The newest replica with more than this number of updates of which the members have all parts, or None. `failed`
    are keys and numbers of replicas that could not be used."""
    # The manifest's record of a replica comes before the announcement of the same one, because it has the hashes.
    ordered = sorted(announced, key=lambda each: (each.place.updates, each.number, bool(each.parts)), reverse=True)
    for each in ordered:
        if each.place.updates <= updates:
            return None
        if (each.key, each.number) in failed:
            continue
        replica = _found(each, members)
        if all(replica.nodes):
            reason = f"the providers still hold all stages after {each.place.updates} updates"
            return SurvivingReplica(each, replica, f"{reason}; the last checkpoint has {updates}")
    return None


def absent_holders(newest: AnnouncedReplica, members: Sequence[Member]) -> dict[int, tuple[str, ...]]:
    """By stage of a complete replica of which no connected provider has the part: the recorded providers that are
    absent. Empty if nothing is missing, or if a missing part cannot come with any of them."""
    present, found = {member.node_id for member in members}, _found(newest, members)
    missing = {
        stage: tuple(node for node in part.nodes if node not in present)
        for stage, part in enumerate(newest.parts)
        if not found.nodes[stage]
    }
    return missing if all(missing.values()) else {}


def wait_for_holders(
    newest: AnnouncedReplica, updates: int, checkpoint_at: float | None, limit_seconds: float = MAX_WAIT_SECONDS
) -> tuple[float, str]:
    """How long to wait for providers that have parts of this replica, and what would be lost otherwise.

    Repeating the lost training takes about as long as it took the first time, so a longer wait does not pay.
    `updates` and `checkpoint_at` (seconds since 1970; None without a checkpoint) are of the newest checkpoint.
    """
    lost = newest.place.updates - updates
    if checkpoint_at is None:
        return limit_seconds, f"otherwise the run begins again and loses {counted(lost, 'update')}"
    seconds = max(0.0, newest.at - checkpoint_at)
    reason = (
        f"otherwise the run continues from the checkpoint after {counted(updates, 'update')} and loses "
        f"{counted(lost, 'update')}, {duration(seconds)} of training"
    )
    return min(limit_seconds, seconds), reason


def _found(each: AnnouncedReplica, members: Sequence[Member]) -> Replica:
    """The replica, with the parts that the members have."""
    stages = range(len(each.starts))
    hashes = tuple(each.sha256(stage) for stage in stages)
    rounded = tuple((frozenset[str](), part.rounded_sha256) for part in each.parts)
    found = Replica(each.number, each.place, tuple(frozenset[str]() for _ in stages), hashes, rounded)
    for member in members:
        for stage in stages:
            if (part := (each.part_key(stage), each.number)) in member.parts:
                found = found.with_part(stage, member.node_id, member.parts[part])
    return found

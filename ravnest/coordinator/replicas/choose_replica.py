"""Choice of the replica that becomes the next checkpoint, and of the providers that upload its parts."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.run.collecting import ReplicaChoice
from ravnest.settings import Checkpoint
from ravnest.units import counted, duration

_MAX_MISSING: Final = 1 / 4
"""Share of a checkpoint interval that a complete replica may lack to be collected instead of a new one."""
_UNKNOWN_LINE: Final = 1e9
"""Bytes per second assumed for a line without a measurement: both ends are on one machine."""


@dataclass(frozen=True, slots=True)
class KnownReplica:
    """A complete or pending replica."""

    number: int
    place: DataPosition
    age_seconds: float


def choose_replica(
    number: int,
    place: DataPosition,
    collected_updates: int,
    settings: Checkpoint,
    complete: KnownReplica | None,
    pending: KnownReplica | None,
) -> tuple[ReplicaChoice, str]:
    """The replica for a checkpoint that is due with the microbatch `number - 1`, which ends at `place`, and why.

    A complete replica is used if little is missing in it, then a pending one; a replica is announced only if there is
    neither. `collected_updates` is the number of updates in the newest checkpoint.
    """
    if complete is not None and complete.place.updates > collected_updates:
        missing = place.updates - complete.place.updates
        few_updates = settings.every_updates is None or missing <= _MAX_MISSING * settings.every_updates
        few_seconds = settings.every_seconds is None or complete.age_seconds <= _MAX_MISSING * settings.every_seconds
        if few_updates and few_seconds:
            lacks = f"it lacks {counted(missing, 'update')}" if missing else "it lacks nothing"
            reason = f"the newest replica is collected: {lacks} and is {duration(complete.age_seconds)} old"
            return ReplicaChoice(complete.number, complete.place, complete.age_seconds, False), reason
    if pending is not None and pending.place.updates > collected_updates:
        reason = f"the replica after {pending.place.updates} updates is collected once it is complete"
        return ReplicaChoice(pending.number, pending.place, pending.age_seconds, False), reason
    return ReplicaChoice(number, place, 0.0, True), f"a replica is made after {place.updates} updates"


@dataclass(frozen=True, slots=True)
class UploadLine:
    """Uplink of a provider that could upload a part."""

    bytes_per_second: float | None
    """Rate of its uplink; None if unknown."""
    sending_bytes: int = 0
    """Bytes of state that it is still sending to others."""


def choose_senders(
    parts: Mapping[int, tuple[int, Collection[str]]], lines: Mapping[str, UploadLine]
) -> tuple[dict[int, tuple[str, ...]], str]:
    """For each stage, the providers that have its part in the order in which they are asked, and why.

    `parts` has the size of each part and who has it. A part is asked of the provider that would have sent it first,
    after everything that it sends already. The largest part is assigned first.
    """
    load = {node: line.sending_bytes for node, line in lines.items()}
    found: dict[int, tuple[str, ...]] = {}
    words: dict[int, str] = {}
    for stage, (size_bytes, nodes) in sorted(parts.items(), key=lambda each: (-each[1][0], each[0])):
        seconds = {}
        for node in nodes:
            rate = lines[node].bytes_per_second or _UNKNOWN_LINE
            seconds[node] = (load[node] + size_bytes) / rate
        found[stage] = tuple(sorted(nodes, key=lambda node: (seconds[node], node)))
        if nodes:
            first = found[stage][0]
            load[first] += size_bytes
            words[stage] = f"stage {stage} from {first} ({duration(seconds[first])} at its line's rate)"
    return found, ", ".join(words[stage] for stage in sorted(words))

"""The small nested settings of a job: how the pipeline runs and when checkpoints are written.

Each is a frozen value, checked when it is made; a wrong one raises JobError with the field and the fix.
"""

import math
from dataclasses import dataclass

from ravnest.errors import JobError


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How microbatches flow through a cluster and how a stage turns them into updates."""

    in_flight: int | None = None
    """Microbatches between their forward and their backward in one cluster, at most. 1 trains exactly as a
    plain loop would; more keep every stage busy at the price of staleness. None: chosen from the number of
    stages."""

    max_staleness: int | None = None
    """Updates a stage may apply between a microbatch's forward and its backward, at most. None: whatever
    `in_flight` leads to."""

    accumulate: int = 1
    """Microbatches whose gradients are averaged into one update."""

    clip_norm: float | None = None
    """Largest norm of a stage's own gradient; a longer one is scaled down to it. It is each stage's norm and
    not the whole model's: the norm over all stages is known only after the last backward of a microbatch, so
    every stage would have to wait for all others at each update."""

    clip_value: float | None = None
    """Largest absolute value of a gradient entry. Unlike `clip_norm` it means the same for every cut."""

    record_updates: bool = False
    """Write one line per update of a stage to updates.jsonl in the run directory."""

    def __post_init__(self) -> None:
        check_whole("pipeline.in_flight", self.in_flight, least=1, optional=True)
        check_whole("pipeline.max_staleness", self.max_staleness, least=0, optional=True)
        check_whole("pipeline.accumulate", self.accumulate, least=1)
        check_positive("pipeline.clip_norm", self.clip_norm)
        check_positive("pipeline.clip_value", self.clip_value)
        check_flag("pipeline.record_updates", self.record_updates)
        if self.clip_norm is not None and self.clip_value is not None:
            raise JobError(
                "pipeline.clip_norm and pipeline.clip_value are both set and would clip one another: set one of them"
            )


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When the state of all stages is saved. One checkpoint is always written when a run ends."""

    every_seconds: float | None = 60.0
    """Seconds between two checkpoints. None: not by time."""

    every_updates: int | None = None
    """Updates between two checkpoints. None: not by count."""

    keep: int = 2
    """How many of the latest checkpoints stay on disk."""

    def __post_init__(self) -> None:
        check_positive("checkpoint.every_seconds", self.every_seconds)
        check_whole("checkpoint.every_updates", self.every_updates, least=1, optional=True)
        check_whole("checkpoint.keep", self.keep, least=1)


def check_whole(field: str, value: object, *, least: int, optional: bool = False) -> None:
    """Raise JobError unless `value` is an int of at least `least` (or None, where `optional`)."""
    if value is None and optional:
        return
    # bool is an int in Python, and `epochs=True` is a mistake.
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        or_none = " or None" if optional else ""
        raise JobError(f"{field} is {value!r}: give a whole number of at least {least}{or_none}")


def check_positive(field: str, value: object) -> None:
    """Raise JobError unless `value` is None or a finite number above zero."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise JobError(f"{field} is {value!r}: give a number above 0, or None to switch it off")


def check_flag(field: str, value: object) -> None:
    """Raise JobError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise JobError(f"{field} is {value!r}: give True or False")

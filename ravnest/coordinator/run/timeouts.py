"""Timeouts of a run that a caller may change: how long the coordinator waits for stages, replicas and rounds."""

from dataclasses import dataclass
from typing import Final

from ravnest.averaging.deadlines import DEFAULT_LIMITS, RoundLimits


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Durations in seconds. The defaults suit every swarm; a test shortens what it waits for."""

    vanished_seconds: float = 0.2
    """Delay between the end of a provider's connection and its loss: the reason may come from the process that started
    it."""
    return_seconds: float = 1.5
    """Timeout for the other providers of a deployment to return to a restarted coordinator, once enough are present."""
    gather_seconds: float = 60.0
    """Time that the providers of an interrupted run have to come back, once those that are there can hold the model."""
    stage_ready_seconds: float = 300.0
    """Timeout for a provider that deploys a stage and receives no more of it: it reads a disk, or builds the stage."""
    fresh_replica_seconds: float = 15.0
    """Timeout for a fresh replica, which saves replaying the microbatches since the last one."""
    return_limit_seconds: float = 600.0
    """Longest wait of a restarted coordinator for providers whose disks have newer state than the last checkpoint."""
    part_silence_seconds: float = 60.0
    """Timeout of an upload of a replica's part while nothing of it arrives; the next provider is asked then. The whole
    of a large part may take longer."""
    replica_event_seconds: float = 30.0
    """Minimum time between two events about a cluster's replicas: one completes every few seconds."""
    rounds: RoundLimits = DEFAULT_LIMITS
    """Limits of the deadlines of averaging."""


DEFAULT_TIMEOUTS: Final = Timeouts()

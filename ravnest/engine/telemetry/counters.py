"""Counters of a stage: totals that the provider reports and that survive a change of worker."""

from dataclasses import dataclass, field

from ravnest.engine.telemetry.training_time import TrainingTime


@dataclass(slots=True)
class Counters:
    """Totals over all workers that the stage has had."""

    forwards: int = 0
    backwards: int = 0
    busy_seconds: float = 0.0
    staleness: dict[int, int] = field(default_factory=dict)
    """Number of updates by their staleness."""
    updates: int = 0
    samples: int = 0
    """Samples of the microbatches that were applied, each counted once."""
    flight_seconds: float = 0.0
    """Time that microbatches have spent between forward and backward, summed; only of workers that have ended."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Total time by kind of work, named as in `Span`."""
    training: TrainingTime = field(default_factory=TrainingTime)
    """Training time and busy time, without start-up and evaluations."""

"""Counters of a stage, kept from worker to worker."""

from dataclasses import dataclass, field

from ravnest.engine.telemetry.training_time import TrainingTime


@dataclass(slots=True)
class Counters:
    """What a worker, and those of the same stage before it, have done; the provider reports it."""

    forwards: int = 0
    backwards: int = 0
    busy_seconds: float = 0.0
    staleness: dict[int, int] = field(default_factory=dict)
    updates: int = 0
    samples: int = 0
    """Of the microbatches that were applied, each once."""
    flight_seconds: float = 0.0
    """What microbatches spent between forward and backward under workers that have ended."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By kind of work, how long it took in all; as `Span` names them."""
    training: TrainingTime = field(default_factory=TrainingTime)
    """How much of its training the stage has worked, without start-up and evaluations."""

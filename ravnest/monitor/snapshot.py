"""Snapshot of a running job, which the coordinator passes to the display a few times a second."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ravnest.monitor.summary import AveragingSummary, ClusterSummary, StageSummary


@dataclass(frozen=True, kw_only=True)
class RunSnapshot:
    """A job at one moment; None where a number is not known yet."""

    phase: str
    """Phase of the run, as the user reads it: "starting providers", "training", …"""

    detail: str = ""
    """Progress of the phase, if the phase reports any: "anna 43 %, ben 100 %"."""

    standstill: str = ""
    """Why no microbatch has completed for a while; empty while training makes progress."""

    epoch: int = 0
    """The current epoch, counted from 1; 0 before the first."""

    epochs: int = 0
    samples_done: int = 0
    samples_total: int | None = None
    updates: int = 0
    train_loss: float | None = None
    eval: Mapping[str, float] | None = field(default=None)
    samples_per_second: float = 0.0
    predicted_samples_per_second: float | None = None
    eta_seconds: float | None = None
    elapsed_seconds: float = 0.0
    stages: tuple[StageSummary, ...] = ()
    """Stages, cluster by cluster."""
    clusters: tuple[tuple[ClusterSummary, str], ...] = ()
    """Clusters, if there are several, each with the reason why it no longer trains; empty while it does."""
    averaging: AveragingSummary | None = None
    """Totals of the averaging rounds so far; None for a single cluster."""
    in_flight: str = ""
    """In-flight limit of a single cluster, and why; empty for several clusters."""
    last_round: str = ""
    title: str = ""
    """The job's name."""

"""Snapshot of a running job, which the coordinator passes to the display a few times a second."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ravnest.monitor.summary import AveragingSummary


@dataclass(frozen=True, kw_only=True)
class StageSnapshot:
    """One stage of a running job."""

    provider: str
    stage: int
    role: str
    device: str
    parameters: int
    busy_fraction: float = 0.0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    memory_bytes: int = 0
    cluster: int = 0


@dataclass(frozen=True, kw_only=True)
class ClusterSnapshot:
    """One cluster of a job that runs on several."""

    id: int
    samples: int = 0
    samples_per_second: float = 0.0
    lost: str = ""
    """Why the cluster no longer trains; empty while it does."""
    in_flight: int | None = None


@dataclass(frozen=True, slots=True)
class InFlightLimit:
    """How many microbatches a cluster may have in flight, and why."""

    microbatches: int | None
    reason: str


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
    stages: tuple[StageSnapshot, ...] = ()
    """Stages, cluster by cluster."""
    clusters: tuple[ClusterSnapshot, ...] = ()
    """Clusters, if there are several; otherwise empty."""
    averaging: AveragingSummary | None = None
    """Totals of the averaging rounds so far; None for a single cluster."""
    in_flight: InFlightLimit | None = None
    """In-flight limit of a single cluster; None for several clusters."""
    last_round: str = ""
    title: str = ""
    """The job's name."""

"""What a run looks like at one moment: the coordinator hands this to the display a few times a second."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ravnest.monitor.summary import Averaging


@dataclass(frozen=True, kw_only=True)
class StageView:
    """One stage at work."""

    provider: str
    stage: int
    role: str
    device: str
    parameters: int
    busy_fraction: float = 0.0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    memory_bytes: int = 0
    updates: int = 0
    samples_per_second: float = 0.0
    cluster: int = 0


@dataclass(frozen=True, kw_only=True)
class ClusterView:
    """One of several clusters at work."""

    id: int
    samples: int = 0
    samples_per_second: float = 0.0
    lost: str = ""
    """Why it does not train any more."""
    in_flight: int | None = None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One run at one moment; None where a number is not known yet."""

    phase: str
    """What the run is doing, as the user reads it: "starting providers", "training", …"""

    detail: str = ""
    """How far the phase is, where it tells: "anna 43 %, ben 100 %"."""

    standstill: str = ""
    """Why nothing has been completed for a while, where that is so."""

    epoch: int = 0
    """The epoch that is being trained, counted from 1; 0 before the first."""

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
    stages: tuple[StageView, ...] = ()
    """Cluster by cluster."""
    clusters: tuple[ClusterView, ...] = ()
    """Where there are several."""
    averaging: Averaging | None = None
    """What they have averaged so far."""
    in_flight: int | None = None
    """Microbatches in flight, at most, and why; of a single cluster."""
    in_flight_reason: str = ""
    last_round: str = ""
    title: str = ""
    """The job's name."""

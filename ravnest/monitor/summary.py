"""summary.json: the state and the result of a run; a contract with other programs."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ravnest.errors import RunError
from ravnest.monitor.files import read_error, write_atomic
from ravnest.monitor.json_lines import strict
from ravnest.monitor.run_directory import RunPaths
from ravnest.safe_json import read_json

Status = Literal["running", "finished", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """Updates applied between a microbatch's forward and its backward."""

    mean: float = 0.0
    p95: float = 0.0
    max: int = 0


@dataclass(frozen=True, kw_only=True)
class LinkSummary:
    to: str
    """Provider at the other end of the link."""
    route: str
    """"direct", "relayed", or "" while there is no connection."""
    connections: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_raw: int = 0
    """Bytes that the sent data would take without a codec."""
    codec: str = "float32"
    """Codec of activations and gradients, in both directions."""
    delay_seconds: float | None = None
    """Round-trip delay of a microbatch on the link, measured on microbatches that hardly queued; None: not known."""


@dataclass(frozen=True, kw_only=True)
class StageSummary:
    provider: str
    stage: int
    role: str
    device: str
    parameters: int
    peak_memory_bytes: int
    busy_fraction: float
    updates: int
    staleness: Staleness = field(default_factory=Staleness)
    bytes_sent: int = 0
    bytes_received: int = 0
    baseline_memory_bytes: int | None = None
    """Memory that the provider's process used before it loaded any part of the model."""
    links: tuple[LinkSummary, ...] = ()
    """Links to the previous and the next stage, as this stage measures them."""


@dataclass(frozen=True, kw_only=True)
class ClusterSummary:
    id: int
    samples: int
    samples_per_second: float
    stages: tuple[StageSummary, ...] = ()
    in_flight: int | None = None
    """Current limit of microbatches between forward and backward at the root."""
    in_flight_reason: str = ""
    limit: str = ""
    """Shared resource that limits it in the plan, such as the requester's uplink; empty if there is none."""


@dataclass(frozen=True, kw_only=True)
class AveragingSummary:
    rounds: int = 0
    rings: int = 0
    seconds_mean: float | None = None
    bytes: int = 0
    skipped: int = 0


@dataclass(frozen=True, kw_only=True)
class MicrobatchCounts:
    """Numbers of microbatches by outcome."""

    fed: int = 0
    completed: int = 0
    replayed: int = 0
    lost: int = 0
    applied_twice: int = 0


@dataclass(frozen=True, kw_only=True)
class Fault:
    kind: str
    provider: str
    cluster: int
    at: float
    recovered_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Check:
    """Comparison of the saved model with the model that the swarm evaluated."""

    status: Literal["passed", "failed", "none"] = "none"
    reason: str = ""
    """Result of the comparison, or why there was none."""
    on: str = ""
    """Source of the batches: "eval_data" or "train_data"."""
    samples: int = 0
    batches: int = 0
    reported: Mapping[str, float | None] = field(default_factory=dict)
    """Loss and metrics on these batches, as the swarm reported them."""
    measured: Mapping[str, float | None] = field(default_factory=dict)
    """Loss and metrics on these batches, computed from the saved model."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """A state from which the run could continue."""

    updates: int = 0
    at: float = 0.0
    """When it was recorded, in seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class StateSummary:
    """How often the run's state is saved, what a loss costs, and from where the run could continue."""

    at_most_lost_seconds: float | None = None
    """Work of one stage that is repeated at most when a machine is lost; None where nothing was told."""
    replica_seconds: float | None = None
    checkpoint_seconds: float | None = None
    told: str = ""
    """The intervals and the cost in words."""
    checkpoint: SavedState | None = None
    """The newest checkpoint; None before the first."""
    replica: SavedState | None = None
    """The newest state of all stages that the providers hold on their disks; None without one."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    status: Status
    reason: str
    samples: int = 0
    epochs: float = 0
    seconds: float = 0.0
    samples_per_second: float = 0.0
    predicted_samples_per_second: float | None = None
    train_loss: float | None = None
    eval: Mapping[str, float | None] = field(default_factory=dict)
    clusters: tuple[ClusterSummary, ...] = ()
    averaging: AveragingSummary = field(default_factory=AveragingSummary)
    ledger: MicrobatchCounts = field(default_factory=MicrobatchCounts)
    faults: tuple[Fault, ...] = ()
    updates: int = 0
    started_at: float | None = None
    first_update_seconds: float | None = None
    model: str | None = None
    """Path of model.safetensors, once it is written."""
    standstill: str = ""
    """Why no microbatch has completed for a while; empty while training makes progress."""
    check: Check = field(default_factory=Check)
    state: StateSummary = field(default_factory=StateSummary)

    @property
    def limits(self) -> str:
        """The shared resources that limit the clusters in the plan; empty if there is none."""
        return " and ".join(dict.fromkeys(cluster.limit for cluster in self.clusters if cluster.limit))

    def to_json(self) -> dict[str, Any]:
        """The summary as plain values; numbers that are not finite become None."""
        record = strict(dataclasses.asdict(self))
        assert isinstance(record, dict)
        return record

    def write(self, run_directory: RunPaths) -> None:
        """Replaces the run's summary.json atomically; raises RunError if the disk fails."""
        write_atomic(run_directory.summary_path, json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Summary":
        """The summary in the file at `path`; raises RunError if it is missing or malformed."""
        try:
            record = read_json(path.read_bytes())
            return _summary(record)
        except OSError as error:
            raise read_error(path, error) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RunError(f"{path} is not a summary of a run ({error}); look at events.jsonl next to it") from None


def _summary(record: dict[str, Any]) -> Summary:
    nested = {
        "clusters": tuple(_cluster(item) for item in record.get("clusters", ())),
        "averaging": _made(AveragingSummary, record.get("averaging", {})),
        "ledger": _made(MicrobatchCounts, record.get("ledger", {})),
        "check": _made(Check, record.get("check", {})),
        "state": _state(record.get("state", {})),
        "faults": tuple(_made(Fault, item) for item in record.get("faults", ())),
    }
    return _made(Summary, record | nested)


def _state(record: dict[str, Any]) -> StateSummary:
    saved = {name: record.get(name) for name in ("checkpoint", "replica")}
    return _made(StateSummary, record | {name: each and _made(SavedState, each) for name, each in saved.items()})


def _cluster(record: dict[str, Any]) -> ClusterSummary:
    stages = tuple(
        _made(
            StageSummary,
            item
            | {
                "staleness": _made(Staleness, item.get("staleness", {})),
                "links": tuple(_made(LinkSummary, link) for link in item.get("links", ())),
            },
        )
        for item in record.get("stages", ())
    )
    return _made(ClusterSummary, record | {"stages": stages})


T = TypeVar("T")


def _made(kind: type[T], record: Mapping[str, Any]) -> T:
    # Unknown fields are ignored, so that an older program can read the summary of a newer one.
    known = get_type_hints(kind)
    values = {name: value for name, value in record.items() if name in known}
    for name, value in values.items():
        if value is None and known[name] is float:
            # to_json writes a number that is not finite as null.
            values[name] = math.nan
        elif not _fits(value, known[name]):
            raise ValueError(f"{name} is {str(value)[:80]!r}")
    return kind(**values)


def _fits(value: object, wanted: Any) -> bool:
    """Whether a value from JSON, or an object built from such values, fits a field of this type."""
    outer = get_origin(wanted)
    if outer is Literal:
        return value in get_args(wanted)
    if outer is UnionType:
        return any(_fits(value, each) for each in get_args(wanted))
    if outer is Mapping:
        return isinstance(value, dict) and all(_fits(item, get_args(wanted)[1]) for item in value.values())
    if outer is tuple:
        return isinstance(value, tuple)
    if wanted is float:
        return isinstance(value, float) or _fits(value, int)
    if wanted is int:
        return type(value) is int and abs(value) < 2**64
    return isinstance(value, wanted)

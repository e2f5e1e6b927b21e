"""Figures of a run on home lines, read from its run directory and from the counters of the lab. Pure functions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.pipeline_parts.steady import Moment, steady

Line = Mapping[str, Any]

_HOUR_SECONDS = 3600.0
_LOST = ("lost", "evicted", "cluster_lost", "stage_failed")
_MIN_MICROBATCHES = 3
"""Microbatches of a meaningful slope."""
_PAUSE = "snapshot_pause_seconds"
"""Figure of a stage in metrics.jsonl, where it is reported: its longest pause for a snapshot."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Traffic of all machines until one moment."""

    at: float
    """Wall-clock time."""
    sent: Mapping[str, int]
    """Bytes of IP packets that each machine has sent."""
    received: Mapping[str, int]
    between_stages: Mapping[str, int]
    """Bytes of activations and gradients that each provider has sent, by the run's own summary."""
    summary_at: float
    """When that summary was written."""
    idle_seconds: float = 0.0
    """Seconds that the cores of this machine have been idle, added up."""
    cores: int = 1


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one machine sends in an hour of the measured time."""

    sent: float
    received: float
    between_stages: float
    """Activations and gradients, without the headers of TCP and IP."""


@dataclass(frozen=True, slots=True)
class Round:
    """A round that averaged."""

    told_seconds: float | None
    """Its predicted duration; None where none was told."""
    seconds: float

    @property
    def of_told(self) -> float | None:
        return self.seconds / self.told_seconds if self.told_seconds else None


@dataclass(frozen=True, slots=True)
class HomesRun:
    """Figures of one run."""

    samples_per_second: float
    """Rate in the measured time."""
    predicted_samples_per_second: float
    lost: int
    """Providers and clusters that were given up."""
    suspected: int
    """Times that a provider was suspected."""
    replicas: int
    replicas_failed: int
    rounds: tuple[Round, ...]
    rounds_skipped: int
    checkpoint_seconds: tuple[float, ...]
    """For each checkpoint, the time from its beginning until it was complete."""
    traffic: Mapping[str, Traffic]
    ledger: Mapping[str, int]
    stages: tuple[int, ...]
    """Number of stages in each cluster."""
    longest_pause_seconds: float | None
    """Longest pause of a stage for a snapshot; None where no stage reports it."""
    finish_seconds: float | None
    """Time from the end of the data to the end of the run; None if it did not finish or was not waited for."""
    idle_share: float
    """Share of this machine's cores that was idle in the measured time. Homes share these cores."""
    losses: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    """Seconds since the first microbatch was completed, and the loss of each microbatch until the end of the measured
    time."""

    @property
    def of_predicted(self) -> float:
        return self.samples_per_second / self.predicted_samples_per_second if self.predicted_samples_per_second else 0.0

    def of(self, other: "HomesRun") -> float:
        """The rate relative to that of another run."""
        return self.samples_per_second / other.samples_per_second if other.samples_per_second else 0.0

    @property
    def latest_round(self) -> float | None:
        """The round that was latest, relative to its predicted duration."""
        return max((late for each in self.rounds if (late := each.of_told) is not None), default=None)


def read_run(
    events: Sequence[Line],
    metrics: Sequence[Line],
    summary: Line,
    first: Snapshot,
    last: Snapshot,
    batch: int,
    finish_seconds: float | None = None,
) -> HomesRun:
    """The figures of a run that was measured between two snapshots.

    Each line of the training loss is one microbatch, of `batch` samples.
    """
    completed = [line for line in metrics if line["kind"] == "train"]
    rate = batch * _microbatches_per_second([line["at"] for line in completed], first.at, last.at)
    pauses = [line[_PAUSE] for line in metrics if line["kind"] == "stage" and line.get(_PAUSE) is not None]
    return HomesRun(
        samples_per_second=rate,
        predicted_samples_per_second=summary.get("predicted_samples_per_second") or 0.0,
        lost=sum(event["kind"] in _LOST for event in events),
        suspected=count(events, "suspected"),
        replicas=count(events, "replica"),
        replicas_failed=count(events, "replica_failed"),
        rounds=tuple(rounds(events)),
        rounds_skipped=count(events, "round_skipped"),
        checkpoint_seconds=tuple(checkpoints(events)),
        traffic=traffic(first, last),
        ledger=summary.get("ledger", {}),
        stages=tuple(len(cluster["stages"]) for cluster in summary.get("clusters", ())),
        longest_pause_seconds=max(pauses, default=None),
        finish_seconds=finish_seconds,
        idle_share=(last.idle_seconds - first.idle_seconds) / ((last.at - first.at) * last.cores),
        losses=tuple((line["at"] - completed[0]["at"], line["loss"]) for line in completed if line["at"] <= last.at),
    )


def _microbatches_per_second(times: Sequence[float], after: float, until: float) -> float:
    within = [at for at in times if after <= at <= until]
    if len(within) < _MIN_MICROBATCHES:
        # A run that stands still has a rate, too.
        return len(within) / (until - after)
    return steady([Moment(at) for at in within], after, until).microbatches_per_second


def count(events: Iterable[Line], kind: str) -> int:
    return sum(event["kind"] == kind for event in events)


def rounds(events: Iterable[Line]) -> Iterable[Round]:
    """Every round that averaged, with the duration that the plan, or a correction of it, had told before."""
    told = None
    for event in events:
        if event["kind"] == "rings":
            told = event.get("round_seconds")
        elif event["kind"] == "rounds_corrected":
            told = event["seconds"]
        elif event["kind"] == "round":
            yield Round(told, event["seconds"])


def checkpoints(events: Iterable[Line]) -> Iterable[float]:
    """The duration of every checkpoint that became complete."""
    begun = None
    for event in events:
        if event["kind"] == "checkpoint_begun":
            begun = event["elapsed"]
        elif event["kind"] == "checkpoint" and begun is not None:
            yield event["elapsed"] - begun
            begun = None


def traffic(first: Snapshot, last: Snapshot) -> dict[str, Traffic]:
    """The traffic of each machine between two snapshots, per hour."""
    seconds, told_seconds = last.at - first.at, last.summary_at - first.summary_at

    def hourly(before: Mapping[str, int], after: Mapping[str, int], name: str, seconds: float) -> float:
        # A provider that got another stage meanwhile counts its traffic from zero again.
        return max(0, after.get(name, 0) - before.get(name, 0)) / seconds * _HOUR_SECONDS if seconds > 0 else 0.0

    return {
        name: Traffic(
            hourly(first.sent, last.sent, name, seconds),
            hourly(first.received, last.received, name, seconds),
            hourly(first.between_stages, last.between_stages, name, told_seconds),
        )
        for name in last.sent
    }


def state_bytes(with_state: Traffic, without: Traffic) -> float:
    """Bytes of state that a machine sends per hour: those that it sends beyond its activations and what goes with them
    (headers, acknowledgements, reports), which the same run without state shows."""
    if without.between_stages <= 0:
        return max(0.0, with_state.sent - without.sent)
    return max(0.0, with_state.sent - with_state.between_stages * without.sent / without.between_stages)

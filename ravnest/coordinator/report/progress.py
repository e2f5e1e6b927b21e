"""Progress: what the coordinator knows about a run while it goes on, as a snapshot for the display and as the summary.

The rates are in `TrainingClock`, the figures of a stage in `stage_figures`. Nothing here decides anything.
"""

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ravnest.coordinator.feed.cluster_state import Clusters
from ravnest.coordinator.feed.ledger import Ledger
from ravnest.coordinator.report.phase import Phase
from ravnest.coordinator.report.stage_figures import shares_in_words, stage_summary
from ravnest.coordinator.report.training_clock import TrainingClock
from ravnest.monitor.run_directory import RunPaths
from ravnest.monitor.snapshot import RunSnapshot
from ravnest.monitor.summary import (
    AveragingSummary,
    Check,
    ClusterSummary,
    Fault,
    MicrobatchCounts,
    StageSummary,
    StateSummary,
    Status,
    Summary,
)
from ravnest.net.v1.control_pb2 import Report
from ravnest.planner.plan import Plan, StagePlan

_LOSSES = 50
"""Microbatches over which the training loss is averaged."""


class RoundsView(Protocol):
    """Rounds of averaging, as a display and a summary see them."""

    last: str

    def summary(self) -> AveragingSummary: ...


@dataclass
class EpochProgress:
    """Which epoch is being fed, and how large an epoch is, as far as that is known."""

    epochs: int
    current: int = 0
    """The epoch that is being fed, counted from 0."""
    samples: int | None = None
    """Samples in an epoch: as the data promises, and as counted once an epoch has been fed completely."""
    batches: int | None = None
    """Microbatches in an epoch."""
    max_samples: int | None = None
    """Samples after which `max_updates` ends the run."""

    def samples_total(self) -> int | None:
        total = None if self.samples is None else self.samples * self.epochs
        return total if self.max_samples is None else min(self.max_samples, total or self.max_samples)


class _SummaryWriter:
    """Writes the summaries of one run, in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_over = False

    def write(self, summary: Summary, run: RunPaths) -> None:
        with self._lock:
            if summary.status == "running" and self._is_over:
                return
            self._is_over = summary.status != "running"
            summary.write(run)


class Progress:
    """The counters of one run. `samples` and `updates` include what was done before a resume."""

    def __init__(
        self,
        title: str,
        epochs: int,
        ledger: Ledger,
        clock: TrainingClock | None = None,
        plan: Plan | None = None,
    ) -> None:
        self.title = title
        self.epochs = EpochProgress(epochs, current=ledger.applied.epoch)
        self.ledger = ledger
        self.clock = TrainingClock(ledger) if clock is None else clock
        self.phase = Phase.PREPARING
        self.step = "starting"
        """The current step of the phase, in words; empty while the phase says enough."""
        self.fetching: dict[str, float] = {}
        """While stages are deployed, the share of its stage that each provider has, in the order of the stages."""
        self.standstill = ""
        """Why nothing has been completed for a while; empty while the run goes on."""
        self.plan = plan
        self.clusters: Clusters | None = None
        self.rounds: RoundsView | None = None
        self.devices: Mapping[str, str] = {}
        self.reports: dict[str, Report] = {}
        """By provider, its last report."""
        self.losses: deque[tuple[float, int]] = deque(maxlen=_LOSSES)
        """The losses of the last microbatches, each with its samples."""
        self.eval: dict[str, float] | None = None
        self.faults: list[Fault] = []
        self.check = Check()
        """Result of evaluating the model from its file."""
        self.state = StateSummary()
        self._writer = _SummaryWriter()

    @property
    def train_loss(self) -> float | None:
        """Mean over the last microbatches, by samples."""
        weight = sum(samples for _, samples in self.losses)
        return sum(loss * samples for loss, samples in self.losses) / weight if weight else None

    @property
    def activity(self) -> str:
        """The current work of the run, in words."""
        return self.step or self.phase.value

    def snapshot(self) -> RunSnapshot:
        rate, total = self.clock.recent_samples_per_second(), self.epochs.samples_total()
        clusters = self.clusters.all if self.clusters is not None and self.plan is not None else ()
        lost = [cluster.reason if cluster.is_lost else "" for cluster in clusters]
        # A cluster of one stage has nothing in flight to a next stage.
        flying = clusters[0] if len(clusters) == 1 and len(clusters[0].plan.stages) > 1 else None
        return RunSnapshot(
            phase=self.activity,
            detail=shares_in_words(self.fetching),
            standstill=self.standstill,
            epoch=self._epoch_shown(),
            epochs=self.epochs.epochs,
            samples_done=self.ledger.samples,
            samples_total=total,
            updates=self.ledger.updates,
            train_loss=self.train_loss,
            eval=self.eval,
            samples_per_second=rate,
            predicted_samples_per_second=self.plan.predicted_samples_per_second if self.plan else None,
            eta_seconds=(total - self.ledger.samples) / rate if total is not None and rate > 0 else None,
            elapsed_seconds=self.clock.elapsed_seconds,
            stages=tuple(self._stage(stage) for stage in (self.plan.stages if self.plan else ())),
            clusters=tuple(zip(self._cluster_summaries(rate), lost, strict=True)) if len(lost) > 1 else (),
            averaging=None if self.rounds is None else self.rounds.summary(),
            in_flight="" if flying is None else f"{flying.in_flight}   {flying.flight_reason}",
            last_round="" if self.rounds is None else self.rounds.last,
            title=self.title,
        )

    def summary(self, status: Status, reason: str, model: str | None = None) -> Summary:
        rate, counts = self.clock.samples_per_second(), self.ledger.counts()
        if status == "running":
            # Microbatches in flight are not lost yet.
            counts["lost"] = 0
        return Summary(
            status=status,
            reason=reason,
            samples=self.ledger.samples,
            epochs=self._epochs_done(),
            seconds=self.clock.elapsed_seconds,
            samples_per_second=rate,
            predicted_samples_per_second=self.plan.predicted_samples_per_second if self.plan else None,
            train_loss=self.train_loss,
            eval=self.eval or {},
            clusters=tuple(self._cluster_summaries(rate)),
            averaging=AveragingSummary() if self.rounds is None else self.rounds.summary(),
            ledger=MicrobatchCounts(**counts),
            faults=tuple(self.faults),
            updates=self.ledger.updates,
            started_at=self.clock.started_at,
            first_update_seconds=self.clock.first_update_seconds,
            model=model,
            standstill=self.standstill if status == "running" else "",
            check=self.check,
            state=self.state,
        )

    def write(self, summary: Summary, run: RunPaths) -> None:
        """Writes the summary, from any thread; RunError when the disk refuses.

        A summary of the running run that comes after the final one is dropped: it was taken by a slower thread.
        """
        self._writer.write(summary, run)

    def _cluster_summaries(self, rate: float) -> Iterator[ClusterSummary]:
        """Each cluster with its share of the samples of this session, and therefore of the rate."""
        if self.plan is None or self.clusters is None:
            return
        together = sum(cluster.samples for cluster in self.clusters.all)
        for cluster in self.clusters.all:
            share = cluster.samples / together if together else 0.0
            only = len(self.clusters.all) == 1
            yield ClusterSummary(
                id=cluster.id,
                samples=self.ledger.samples if only else cluster.samples,
                samples_per_second=rate if only else rate * share,
                stages=tuple(self._stage(stage) for stage in cluster.plan.stages),
                in_flight=cluster.in_flight,
                in_flight_reason=cluster.flight_reason,
                limit=self.plan.limit,
            )

    def _stage(self, stage: StagePlan) -> StageSummary:
        stages = self.plan.stages if self.plan is not None else ()
        report = self.reports.get(stage.node, Report())
        return stage_summary(stage, stages, report, self.devices.get(stage.node, ""))

    def _epoch_shown(self) -> int:
        """Counted from 1. An evaluation belongs to the epoch before it, though its data has been fed to the end."""
        if self.plan is None:
            return 0
        return max(1, min(self.epochs.current + (self.phase is not Phase.EVALUATING), self.epochs.epochs))

    def _epochs_done(self) -> float:
        place, batches = self.ledger.applied, self.epochs.batches
        part = place.position / batches if batches else 0.0
        return round(place.epoch + min(1.0, part), 4)

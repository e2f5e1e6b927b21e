"""What is known of a run while it goes on, and its two pictures: the snapshot for the display, the summary for the
disk."""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ravnest.coordinator.feed.cluster_state import Clusters
from ravnest.coordinator.feed.ledger import Ledger
from ravnest.monitor.run_directory import RunPaths
from ravnest.monitor.snapshot import ClusterSnapshot, InFlightLimit, RunSnapshot, StageSnapshot
from ravnest.monitor.summary import (
    AveragingSummary,
    Check,
    ClusterSummary,
    Fault,
    LinkSummary,
    MicrobatchCounts,
    StageSummary,
    Staleness,
    Status,
    Summary,
)
from ravnest.net.v1.control_pb2 import Report
from ravnest.planner.plan import Plan, StagePlan

_RATE_SECONDS = 5.0
_HALT_SECONDS = 2.0
_LOSSES = 50
_SHARES = 6
"""Of so many providers each one's share is told."""


class RoundsView(Protocol):
    """Rounds of averaging, as far as a display and a summary tell of them."""

    last: str

    def summary(self) -> AveragingSummary: ...


@dataclass
class Progress:
    """Counters of a run, kept by the coordinator. `samples` and `updates` include what was done before a resume."""

    title: str
    epochs: int
    ledger: Ledger
    started: float = field(default_factory=time.perf_counter)
    started_at: float = field(default_factory=time.time)
    phase: str = "starting"
    fetching: dict[str, float] = field(default_factory=dict)
    """While stages are deployed: which share of its stage each provider has, in the order of the stages."""
    standstill: str = ""
    """Why nothing has been completed for a while; empty while the run goes on."""
    epoch: int = 0
    """The epoch that is being fed, counted from 0."""
    epoch_samples: int | None = None
    """Samples in an epoch: as the data promises, and once one has been seen whole, as counted."""
    epoch_batches: int | None = None
    """Microbatches in an epoch, as far as known."""
    samples_limit: int | None = None
    """Samples after which `max_updates` ends the run."""
    eval: dict[str, float] | None = None
    plan: Plan | None = None
    clusters: Clusters | None = None
    rounds: RoundsView | None = None
    devices: Mapping[str, str] = field(default_factory=dict)
    reports: dict[str, Report] = field(default_factory=dict)
    first_update_seconds: float | None = None
    training_started: float | None = None
    training_seconds: float = 0.0
    samples_at_start: int = 0
    faults: list[Fault] = field(default_factory=list)
    check: Check = field(default_factory=Check)
    """What came of evaluating the model from its file."""
    losses: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_LOSSES))
    _before_counting: float = 0.0
    _uncounted: int = 0
    _recent: deque[tuple[float, int]] = field(default_factory=deque)
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _is_over: bool = False

    @property
    def elapsed_seconds(self) -> float:
        return time.perf_counter() - self.started

    @property
    def train_loss(self) -> float | None:
        """Mean over the last microbatches, by samples."""
        weight = sum(samples for _, samples in self.losses)
        return sum(loss * samples for loss, samples in self.losses) / weight if weight else None

    def completed(self) -> None:
        """A microbatch has been completed."""
        now = time.perf_counter()
        if self.first_update_seconds is None:
            self.first_update_seconds = now - self.started
            self._count_from_here(now)
        self._recent.append((now, self.ledger.samples))
        while len(self._recent) > 2 and now - self._recent[0][0] > _RATE_SECONDS:
            self._recent.popleft()

    def pause_clock(self) -> None:
        """Training stands still (evaluation, saving): its rate is not to be measured."""
        if self.training_started is not None:
            self.training_seconds += time.perf_counter() - self.training_started
            self.training_started = None
            self._recent.clear()

    def run_clock(self) -> None:
        if self.training_started is None:
            self.training_started = time.perf_counter()
            self._recent.append((self.training_started, self.ledger.samples))

    def samples_per_second(self) -> float:
        """Over the whole training time so far, from the first completed microbatch on."""
        seconds = self.training_seconds
        if self.training_started is not None:
            seconds += time.perf_counter() - self.training_started
        samples = self.ledger.samples - self.samples_at_start
        if samples > self._uncounted:
            samples -= self._uncounted
        else:
            # There is no other to go by.
            seconds += self._before_counting
        return samples / seconds if seconds else 0.0

    def _count_from_here(self, now: float) -> None:
        """The first microbatch has every process to wake up and a pipeline to fill: it says nothing of the rate."""
        if self.training_started is not None:
            self._before_counting = now - self.training_started
            self.training_started = now
            self._uncounted = self.ledger.samples - self.samples_at_start

    def recent_samples_per_second(self) -> float:
        if len(self._recent) < 2 or self._recent[-1][0] <= self._recent[0][0]:
            return self.samples_per_second()
        (first, before), (last, after) = self._recent[0], self._recent[-1]
        now = time.perf_counter()
        # A run that has come to a halt must not go on showing the rate it had.
        return (after - before) / ((now if now - last > _HALT_SECONDS else last) - first)

    def samples_total(self) -> int | None:
        total = None if self.epoch_samples is None else self.epoch_samples * self.epochs
        return total if self.samples_limit is None else min(self.samples_limit, total or self.samples_limit)

    def snapshot(self) -> RunSnapshot:
        rate, total = self.recent_samples_per_second(), self.samples_total()
        # Of one stage nothing is ever in flight to the next.
        single = self.clusters is not None and len(self.clusters.all) == 1
        flying = self.clusters.all[0] if self.clusters is not None and single else None
        flying = flying if flying is not None and len(flying.plan.stages) > 1 else None
        return RunSnapshot(
            phase=self.phase,
            detail=shares_in_words(self.fetching),
            standstill=self.standstill,
            epoch=self._epoch_shown(),
            epochs=self.epochs,
            samples_done=self.ledger.samples,
            samples_total=total,
            updates=self.ledger.updates,
            train_loss=self.train_loss,
            eval=self.eval,
            samples_per_second=rate,
            predicted_samples_per_second=self.plan.predicted_samples_per_second if self.plan else None,
            eta_seconds=(total - self.ledger.samples) / rate if total is not None and rate > 0 else None,
            elapsed_seconds=self.elapsed_seconds,
            stages=tuple(self._view(self._stage(s), s.cluster) for s in (self.plan.stages if self.plan else ())),
            clusters=tuple(self._cluster_views(rate)),
            averaging=None if self.rounds is None else self.rounds.summary(),
            in_flight=None if flying is None else InFlightLimit(flying.in_flight, flying.flight_reason),
            last_round="" if self.rounds is None else self.rounds.last,
            title=self.title,
        )

    def _cluster_views(self, rate: float) -> Iterator[ClusterSnapshot]:
        """Each with its share of the rate of now; none where there is one cluster."""
        found = list(self._cluster_summaries(rate))
        if self.clusters is None or len(found) < 2:
            return
        for cluster, seen in zip(self.clusters.all, found, strict=True):
            yield ClusterSnapshot(
                id=seen.id,
                samples=seen.samples,
                samples_per_second=seen.samples_per_second,
                lost=cluster.lost,
                in_flight=cluster.in_flight,
            )

    def _epoch_shown(self) -> int:
        """Counted from 1. An evaluation belongs to the epoch before it, though its data has been fed to the end."""
        if self.plan is None:
            return 0
        return max(1, min(self.epoch + (self.phase != "evaluating"), self.epochs))

    def write(self, summary: Summary, run: RunPaths) -> None:
        """Writes the summary, from any thread; RunError when the disk refuses. That a run goes on is not written once
        its end has been: whoever looks now and then may come late with it."""
        with self._writing:
            if summary.status == "running" and self._is_over:
                return
            self._is_over = summary.status != "running"
            summary.write(run)

    def summary(self, status: Status, reason: str, model: str | None = None) -> Summary:
        seconds = self.elapsed_seconds
        samples = self.ledger.samples
        rate = self.samples_per_second()
        counts = self.ledger.counts()
        if status == "running":
            # What is in flight is not lost yet.
            counts["lost"] = 0
        return Summary(
            status=status,
            reason=reason,
            samples=samples,
            epochs=self._epochs_done(),
            seconds=seconds,
            samples_per_second=rate,
            predicted_samples_per_second=self.plan.predicted_samples_per_second if self.plan else None,
            train_loss=self.train_loss,
            eval=self.eval or {},
            clusters=tuple(self._cluster_summaries(rate)),
            averaging=AveragingSummary() if self.rounds is None else self.rounds.summary(),
            ledger=MicrobatchCounts(**counts),
            faults=tuple(self.faults),
            updates=self.ledger.updates,
            started_at=self.started_at,
            first_update_seconds=self.first_update_seconds,
            model=model,
            standstill=self.standstill if status == "running" else "",
            check=self.check,
        )

    def _cluster_summaries(self, rate: float) -> Iterator[ClusterSummary]:
        """Each with its share of the samples of this session, and so of the rate."""
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
            )

    def _epochs_done(self) -> float:
        place = self.ledger.applied
        part = place.position / self.epoch_batches if self.epoch_batches else 0.0
        return round(place.epoch + min(1.0, part), 4)

    def _codec(self, stage: StagePlan, is_next: bool) -> str:
        """Of the link between a stage and the one after it, or the one before it."""
        after = stage.stage + is_next
        stages = self.plan.stages if self.plan is not None else ()
        return next((s.codec for s in stages if (s.cluster, s.stage) == (stage.cluster, after)), "float32")

    def _stage(self, stage: StagePlan) -> StageSummary:
        report = self.reports.get(stage.node, Report())
        updates = report.updates
        return StageSummary(
            provider=stage.node,
            stage=stage.stage,
            role=stage.role,
            device=self.devices.get(stage.node, ""),
            parameters=stage.parameters,
            peak_memory_bytes=report.peak_memory_bytes,
            baseline_memory_bytes=report.baseline_memory_bytes,
            busy_fraction=_busy_fraction(report),
            updates=updates,
            staleness=Staleness(
                mean=report.staleness_sum / updates if updates else 0.0,
                p95=_percentile(list(report.staleness_counts), 0.95),
                max=report.staleness_max,
            ),
            bytes_sent=report.bytes_sent,
            bytes_received=report.bytes_received,
            links=tuple(
                LinkSummary(
                    to=link.node,
                    route=link.route,
                    connections=link.connections,
                    bytes_sent=link.bytes_sent,
                    bytes_received=link.bytes_received,
                    bytes_raw=link.raw_bytes_sent,
                    codec=self._codec(stage, link.next),
                    delay_seconds=link.delay_seconds or None,
                )
                for link in report.links
            ),
        )

    def _view(self, stage: StageSummary, cluster: int) -> StageSnapshot:
        return StageSnapshot(
            provider=stage.provider,
            stage=stage.stage,
            role=stage.role,
            device=stage.device,
            parameters=stage.parameters,
            busy_fraction=stage.busy_fraction,
            staleness_mean=stage.staleness.mean,
            staleness_max=stage.staleness.max,
            memory_bytes=stage.peak_memory_bytes,
            cluster=cluster,
        )


def shares_in_words(shares: Mapping[str, float]) -> str:
    """Like "anna 43 %, ben 100 %"; of many, how many are done and who has the longest way to go."""
    if len(shares) <= _SHARES:
        return ", ".join(f"{node} {int(100 * share)} %" for node, share in shares.items())
    left = sorted((share, node) for node, share in shares.items() if share < 1)
    slowest = ", ".join(f"{node} {int(100 * share)} %" for share, node in left[: _SHARES // 2])
    return f"{len(shares) - len(left)} of {len(shares)}" + (f", {slowest}" if slowest else "")


def _busy_fraction(report: Report) -> float:
    """Of the time that the stage trained with a full pipeline; before that, of all its time."""
    if report.training_seconds > 0:
        return report.training_busy_seconds / report.training_seconds
    return report.busy_seconds / report.seconds if report.seconds else 0.0


def _percentile(counts: list[int], share: float) -> float:
    """The smallest staleness that `share` of the updates do not exceed."""
    passed, total = 0, sum(counts)
    for value, count in enumerate(counts):
        passed += count
        if total and passed >= share * total:
            return float(value)
    return 0.0

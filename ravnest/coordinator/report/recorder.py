"""Recorder: writes the stages' reports to the progress and to the run's curves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.report.progress import Progress
from ravnest.coordinator.report.trace_collector import Tracing
from ravnest.monitor.json_lines import JsonLines
from ravnest.monitor.metrics import MetricLog
from ravnest.net.v1.control_pb2 import Report
from ravnest.planner.plan import StagePlan

_MAX_EARLY: Final = 4096


class Recorder:
    """Receives the stages' reports; RunError when the disk refuses a line."""

    def __init__(self, progress: Progress, metrics: MetricLog) -> None:
        self._progress = progress
        self._metrics = metrics
        self._places: dict[int, DataPosition] = {}
        self._early: dict[int, float] = {}
        """Losses of microbatches that a coordinator before this one fed, until the data reaches them."""
        self._updates: JsonLines | None = None
        self._trace: tuple[Path, int] | None = None
        self.tracing: Tracing | None = None
        """The trace collector, from the first deployment of a job that asks for a trace."""

    def record_updates(self, path: Path) -> None:
        """Writes every update of every stage as a line to the file at `path`, from now on."""
        self._updates = JsonLines(path)

    def trace(self, path: Path, microbatches: int) -> None:
        """Collects a trace of this many microbatches of each cluster in the file at `path`; 0 for none."""
        self._trace = (path, microbatches) if microbatches else None

    def deployed(self, stages: Sequence[StagePlan]) -> None:
        """A deployment with these stages has begun. The trace is of the first one."""
        if self._trace is not None and self.tracing is None:
            self.tracing = Tracing(*self._trace, stages)

    def write_trace(self) -> None:
        """Updates the file of the trace, if there is one; RunError when the disk refuses. On any thread."""
        if self.tracing is not None:
            self.tracing.write()

    def fed(self, microbatch: int, after: DataPosition) -> None:
        """A microbatch has been fed; its loss belongs at this position on the curves."""
        loss = self._early.pop(microbatch, None)
        if loss is not None:
            self._metrics.write("train", samples=after.samples, updates=after.updates, values={"loss": loss})
            return
        self._places[microbatch] = after

    def take(self, node_id: str, cluster: int, stage: int, report: Report) -> None:
        """Receives the report of a stage's provider."""
        before = self._progress.reports.get(node_id)
        if self.tracing is not None:
            self.tracing.take(node_id, report)
        self._progress.reports[node_id] = report
        self._write_staleness(cluster, stage, report, before if before is not None else Report())
        for record in report.losses:
            self._progress.losses.append((record.loss, record.samples))
            place = self._places.pop(record.microbatch, None)
            if place is not None:
                values = {"loss": record.loss}
                self._metrics.write("train", samples=place.samples, updates=place.updates, values=values)
            elif record.microbatch >= self._progress.ledger.fed and len(self._early) < _MAX_EARLY:
                self._early[record.microbatch] = record.loss
        if self._updates is not None:
            for update in report.records:
                line: dict[str, object] = {
                    "cluster": cluster,
                    "stage": stage,
                    "microbatch": update.microbatch,
                    "forward_version": update.forward_version,
                    "version": update.version,
                }
                if update.rows or update.lookup_version:
                    line |= {"lookup_version": update.lookup_version, "rows": list(update.rows)}
                self._updates.append(line)

    def _write_staleness(self, cluster: int, stage: int, report: Report, before: Report) -> None:
        """Writes the staleness of the updates since the stage's last report."""
        updates = report.updates - before.updates
        known = dict(enumerate(before.staleness_counts))
        newer = [k for k, count in enumerate(report.staleness_counts) if count > known.get(k, 0)]
        if updates > 0 and newer:
            ledger = self._progress.ledger
            values = {
                "staleness": (report.staleness_sum - before.staleness_sum) / updates,
                # A maximum beyond the counted range is reported only as the maximum over the whole run.
                "staleness_max": max(
                    newer[-1], report.staleness_max if report.staleness_max > before.staleness_max else 0
                ),
            }
            self._metrics.write(
                "stage", samples=ledger.samples, updates=report.updates, values=values, cluster=cluster, stage=stage
            )

    def evaluated(self, values: dict[str, float]) -> None:
        """An evaluation is complete."""
        self._progress.eval = values
        ledger = self._progress.ledger
        self._metrics.write("eval", samples=ledger.samples, updates=ledger.updates, values=values)

    def close(self) -> None:
        if self._updates is not None:
            self._updates.close()

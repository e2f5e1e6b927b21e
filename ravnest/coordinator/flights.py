"""How many microbatches each cluster has in flight while a run goes on: what its stages report decides, the root is
told, and the feeding follows."""

import math
from collections.abc import Sequence
from typing import Final

from ravnest.coordinator.clusters import ClusterRun
from ravnest.coordinator.course import Course
from ravnest.coordinator.planning import ahead_of
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Flight, Report
from ravnest.planner.flight_control import FlightControl, StageCounts

_BELIEVED: Final = 1e12
"""Seconds, or microbatches: more than that nobody has counted."""


class Flights:
    """Of all clusters of a run. One with a single stage has nothing to decide, and where the job says how many are in
    flight, it stays at that."""

    def __init__(self, course: Course, deployment: str, clusters: Sequence[ClusterRun], fixed: bool) -> None:
        self._course = course
        self._deployment = deployment
        self._controls = {
            cluster.id: FlightControl(len(cluster.plan.stages), cluster.in_flight, cluster.plan.most_in_flight)
            for cluster in clusters
            if not fixed and len(cluster.plan.stages) > 1
        }

    def restart(self) -> None:
        """Training stands still for a moment, or did: what was counted up to now says nothing of how fast it is."""
        for control in self._controls.values():
            control.restart()

    def reported(self, cluster: ClusterRun, stage: int, report: Report) -> None:
        """What a stage has done so far."""
        control, counts = self._controls.get(cluster.id), counts_of(report)
        if control is None or counts is None:
            return
        decision = control.take(stage, counts)
        if control.reason:
            cluster.flight_reason = control.reason
        if stage == 0 and control.period_seconds:
            self._feed_ahead(cluster, control)
        if decision is None:
            return
        before, cluster.in_flight = cluster.in_flight, decision.limit
        self._course.emit(
            "in_flight",
            f"{decision.limit} in flight instead of {before}: {decision.reason}",
            cluster=cluster.id,
            old=before,
            new=decision.limit,
        )
        order = Flight(deployment=self._deployment, in_flight=decision.limit)
        self._course.spawn(self._course.tell(cluster.nodes[0], CoordinatorMessage(flight=order)))
        # There may be room for more.
        self._course.notify()

    def _feed_ahead(self, cluster: ClusterRun, control: FlightControl) -> None:
        """As many ahead as are trained on while the next is on its way there; more where that is not enough."""
        more = control.is_starved and cluster.room <= 0
        ahead = ahead_of(cluster.plan.feed_seconds, control.period_seconds)
        most = ahead_of(math.inf, 1.0)
        if more or ahead > cluster.ahead:
            cluster.ahead = min(most, max(ahead, cluster.ahead + more))
            self._course.notify()


def counts_of(report: Report) -> StageCounts | None:
    """What a report says of a stage's speed; None where it cannot be."""
    delays = [link.delay_seconds for link in report.links if link.next]
    counts = StageCounts(
        seconds=report.seconds,
        forwards=report.forwards,
        forward_seconds=report.forward_seconds,
        backwards=report.backwards,
        backward_seconds=report.backward_seconds + report.update_seconds,
        flight_seconds=report.flight_seconds,
        delay_seconds=delays[0] if delays else 0.0,
    )
    figures = (
        *(counts.seconds, counts.forward_seconds, counts.backward_seconds, counts.flight_seconds),
        *(counts.delay_seconds, counts.forwards, counts.backwards),
    )
    # Not so of what is no number.
    return counts if all(0 <= figure <= _BELIEVED for figure in figures) else None

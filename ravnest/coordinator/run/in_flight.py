"""How many microbatches each cluster has in flight while a run goes on: what its stages report decides, the root is
told, and the feeding follows. A stage whose memory is nearly exhausted sets a bound, and so does a high learning
rate."""

import math
from collections.abc import Callable, Sequence
from typing import Final

from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.plan.feed_ahead import ahead_of
from ravnest.coordinator.run.context import Course
from ravnest.errors import printable
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Flight, Report, Strained
from ravnest.planner.in_flight.control import FlightControl, StageCounts

_MAX_BOUND: Final = 1 << 16
_AT_THIS_RATE: Final = " at the learning rate of now"
_BELIEVED: Final = 1e12
"""Seconds, or microbatches: more than that nobody has counted."""


class InFlightLimits:
    """Of all clusters of a run. One with a single stage has nothing to decide, and where the job says how many are in
    flight, it stays at that."""

    def __init__(
        self,
        course: Course,
        deployment: str,
        clusters: Sequence[ClusterRun],
        fixed: bool,
        allowed: Callable[[int], int] | None = None,
    ) -> None:
        """`allowed` says how many may be in flight in a cluster of so many stages at the learning rate of the moment;
        None: as many as are enough."""
        self._course = course
        self._deployment = deployment
        self._clusters = clusters
        self._allowed = allowed
        self._bounds: dict[str, int] = {}
        """What stages whose memory is short have asked for, by provider."""
        self._controls = {
            cluster.id: FlightControl(
                len(cluster.plan.stages), cluster.in_flight, cluster.plan.max_in_flight, cluster.plan.cost.line_seconds
            )
            for cluster in clusters
            if not fixed and len(cluster.plan.stages) > 1
        }
        for cluster in clusters:
            if why := self._allow(cluster):
                cluster.in_flight, cluster.flight_reason = self._controls[cluster.id].limit, why

    def began(self) -> None:
        """The stages have begun, with as many in flight as was planned."""
        for cluster in self._clusters:
            if cluster.in_flight != cluster.plan.in_flight:
                self._tell(cluster, cluster.plan.in_flight, cluster.flight_reason)

    def formed(self, cluster: ClusterRun) -> None:
        """This one has been formed anew: its stages count from another beginning, and one of them is another."""
        if cluster.id in self._controls:
            stages, most = len(cluster.plan.stages), cluster.plan.max_in_flight
            self._controls[cluster.id] = FlightControl(stages, self._controls[cluster.id].wanted, most)
            self._follow_rate(cluster)

    def restart(self) -> None:
        """Training stands still for a moment, or did: what was counted up to now says nothing of how fast it is."""
        for control in self._controls.values():
            control.restart()

    def reported(self, cluster: ClusterRun, stage: int, report: Report) -> None:
        """What a stage has done so far."""
        control, counts = self._controls.get(cluster.id), counts_of(report)
        if control is None or counts is None:
            return
        if stage == 0:
            self._follow_rate(cluster)
        decision = control.take(stage, counts)
        if control.reason:
            cluster.flight_reason = f"{control.reason}{_AT_THIS_RATE if control.is_held else ''}"
        if stage == 0 and control.period_seconds:
            self._feed_ahead(cluster, control)
        if decision is None:
            return
        self._set(cluster, decision.limit, decision.reason)

    def strained(self, cluster: ClusterRun, node_id: str, message: Strained) -> None:
        """A stage's memory is nearly exhausted, or there is plenty again: as many are in flight at most as it says."""
        reason = printable(message.reason)
        bound = min(message.in_flight, _MAX_BOUND)
        values = {"in_flight": bound, "recomputes": message.recomputes, "free_bytes": message.free_bytes}
        self._course.emit("strained", f"{node_id}: {reason}", provider=node_id, cluster=cluster.id, **values)
        if bound:
            self._bounds[node_id] = bound
        else:
            self._bounds.pop(node_id, None)
        control = self._controls.get(cluster.id)
        planned = cluster.plan.in_flight if control is None else cluster.plan.max_in_flight
        most = min([max(1, planned), *(self._bounds[node] for node in cluster.nodes if node in self._bounds)])
        if control is not None:
            if control.hold(most):
                self._set(cluster, control.limit, reason)
        elif len(cluster.plan.stages) > 1 and most != cluster.in_flight:
            # Where the job sets a number, it is kept to as far as memory lasts.
            self._set(cluster, most, reason)

    def _follow_rate(self, cluster: ClusterRun) -> None:
        """As many are in flight as the learning rate allows."""
        if why := self._allow(cluster):
            cluster.flight_reason = why
            self._set(cluster, self._controls[cluster.id].limit, why)

    def _allow(self, cluster: ClusterRun) -> str:
        """Allows as many as the learning rate does; why, where that makes another number of what the cluster has."""
        control = self._controls.get(cluster.id)
        if control is None or self._allowed is None:
            return ""
        most = self._allowed(len(cluster.plan.stages))
        control.allow(most)
        return "" if control.limit == cluster.in_flight else f"no more than {most} may be in flight{_AT_THIS_RATE}"

    def _set(self, cluster: ClusterRun, limit: int, reason: str) -> None:
        before, cluster.in_flight = cluster.in_flight, limit
        self._tell(cluster, before, reason)

    def _tell(self, cluster: ClusterRun, before: int, reason: str) -> None:
        limit = cluster.in_flight
        self._course.emit(
            "in_flight", f"{limit} in flight instead of {before}: {reason}", cluster=cluster.id, old=before, new=limit
        )
        order = Flight(deployment=self._deployment, in_flight=limit)
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

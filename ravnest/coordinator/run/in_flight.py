"""Limits on the microbatches in flight in each cluster, adjusted while a run goes on.

The reports of a cluster's stages decide its limit. The coordinator tells the root each new limit, and feeds the cluster
accordingly. A stage whose memory is nearly exhausted lowers the limit, and so does a high learning rate.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.plan.feed_ahead import ahead_of
from ravnest.coordinator.run.context import RunContext
from ravnest.errors import printable
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Flight, Report, Strained
from ravnest.planner.in_flight.control import FlightControl, StageCounts

_MAX_BOUND: Final = 1 << 16
"""Highest bound that is accepted from a stage whose memory is short."""
_MAX_FIGURE: Final = 1e12
"""Highest number of seconds or microbatches that is accepted from a report."""
_AT_THIS_RATE: Final = " at the current learning rate"


class InFlightLimits:
    """The limits of all clusters of a deployment.

    - A cluster with a single stage has a fixed limit.
    - If the job sets the number in flight, only short memory lowers it.
    """

    def __init__(
        self,
        context: RunContext,
        deployment: str,
        clusters: Sequence[ClusterRun],
        fixed: bool,
        allowed: Callable[[int], int] | None = None,
    ) -> None:
        """`fixed` when the job sets the number in flight. `allowed` returns the maximum for a cluster with this number
        of stages at the current learning rate; None without such a bound."""
        self._context = context
        self._deployment = deployment
        self._clusters = clusters
        self._allowed = allowed
        self._bounds: dict[str, int] = {}
        """By provider whose memory is short, the maximum in flight that its stage has asked for."""
        self._controls = {
            cluster.id: FlightControl(
                len(cluster.plan.stages),
                cluster.in_flight,
                cluster.plan.max_in_flight,
                cluster.plan.cost.line_seconds,
                looks_up=cluster.plan.looks_up,
                cores_in_use=cluster.plan.cores_in_use,
            )
            for cluster in clusters
            if not fixed and len(cluster.plan.stages) > 1
        }
        for cluster in clusters:
            if why := self._allow(cluster):
                cluster.in_flight, cluster.flight_reason = self._controls[cluster.id].limit, why

    def began(self) -> None:
        """The stages have started with the planned limits. Tells each root whose limit has changed since the plan."""
        for cluster in self._clusters:
            if cluster.in_flight != cluster.plan.in_flight:
                self._tell(cluster, cluster.plan.in_flight, cluster.flight_reason)

    def formed(self, cluster: ClusterRun) -> None:
        """A cluster has been rebuilt: its stages count from zero, and at least one of them may be at another
        provider, so that earlier counts say nothing."""
        if cluster.id in self._controls:
            plan, wanted = cluster.plan, self._controls[cluster.id].wanted
            self._controls[cluster.id] = FlightControl(
                len(plan.stages),
                wanted,
                plan.max_in_flight,
                looks_up=plan.looks_up,
                cores_in_use=plan.cores_in_use,
            )
            self._follow_rate(cluster)

    def restart(self) -> None:
        """Training pauses, or has paused: the counts up to this moment do not show its rate, and are forgotten."""
        for control in self._controls.values():
            control.restart()

    def reported(self, cluster: ClusterRun, stage: int, report: Report) -> None:
        """Takes a stage's report, and changes the limit of its cluster if the report calls for it."""
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
        """A stage asks for a maximum in flight because its memory is nearly exhausted; 0 when it has enough again."""
        reason = printable(message.reason)
        bound = min(message.in_flight, _MAX_BOUND)
        values = {"in_flight": bound, "recomputes": message.recomputes, "free_bytes": message.free_bytes}
        self._context.emit("strained", f"{node_id}: {reason}", provider=node_id, cluster=cluster.id, **values)
        if bound:
            self._bounds[node_id] = bound
        else:
            self._bounds.pop(node_id, None)
        control = self._controls.get(cluster.id)
        planned = cluster.plan.in_flight if control is None else cluster.plan.max_in_flight
        maximum = min([max(1, planned), *(self._bounds[node] for node in cluster.nodes if node in self._bounds)])
        if control is not None:
            if control.hold(maximum):
                self._set(cluster, control.limit, reason)
        elif len(cluster.plan.stages) > 1 and maximum != cluster.in_flight:
            # The job sets a number: it applies as far as memory suffices.
            self._set(cluster, maximum, reason)

    def _follow_rate(self, cluster: ClusterRun) -> None:
        """Adjusts the limit to the current learning rate."""
        if why := self._allow(cluster):
            cluster.flight_reason = why
            self._set(cluster, self._controls[cluster.id].limit, why)

    def _allow(self, cluster: ClusterRun) -> str:
        """Caps the control at what the learning rate allows. The reason if that changes the limit, else empty."""
        control = self._controls.get(cluster.id)
        if control is None or self._allowed is None:
            return ""
        maximum = self._allowed(len(cluster.plan.stages))
        control.allow(maximum)
        return "" if control.limit == cluster.in_flight else f"no more than {maximum} may be in flight{_AT_THIS_RATE}"

    def _set(self, cluster: ClusterRun, limit: int, reason: str) -> None:
        before, cluster.in_flight = cluster.in_flight, limit
        self._tell(cluster, before, reason)

    def _tell(self, cluster: ClusterRun, before: int, reason: str) -> None:
        limit = cluster.in_flight
        self._context.emit(
            "in_flight", f"{limit} in flight instead of {before}: {reason}", cluster=cluster.id, old=before, new=limit
        )
        order = Flight(deployment=self._deployment, in_flight=limit)
        for node_id in cluster.plan.beginners:
            self._context.spawn(self._context.tell(node_id, CoordinatorMessage(flight=order)))
        # The dispatcher waits for room, and there may be more of it.
        self._context.notify()

    def _feed_ahead(self, cluster: ClusterRun, control: FlightControl) -> None:
        """Raises the number fed ahead to what the cluster trains on until the next microbatch arrives, and by one if
        the root still waits for microbatches."""
        more = control.is_starved and cluster.room <= 0
        ahead = ahead_of(cluster.plan.feed_seconds, control.period_seconds)
        max_ahead = ahead_of(math.inf, 1.0)
        if more or ahead > cluster.ahead:
            cluster.ahead = min(max_ahead, max(ahead, cluster.ahead + more))
            self._context.notify()


def counts_of(report: Report) -> StageCounts | None:
    """The counts in a report from which a stage's speed follows; None if a figure is impossible."""
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
    # NaN fails the comparison and is rejected.
    return counts if all(0 <= figure <= _MAX_FIGURE for figure in figures) else None

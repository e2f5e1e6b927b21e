"""What follows when a stage says that it cannot go on: another machine gets it, its cluster gets new links, the machine
gets no stage any more, or the run ends.

Whether the machine or the stage is at fault is judged in failure_verdicts.py; who takes a stage, in recovery.py.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Final

from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.deploy.failure_verdicts import FailureCounts, Judged
from ravnest.coordinator.deploy.recovery import Recovery
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.feed.ledger import Ledger
from ravnest.coordinator.health.accusations import judge_accusation
from ravnest.coordinator.health.not_finite import StageWord, judge_not_finite
from ravnest.coordinator.plan.observed_limits import ObservedLimits
from ravnest.coordinator.run.context import Course
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.errors import TrainingError, printable
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Failed, Trace, Traced

_TRACE_SECONDS: Final = 20.0
"""Within which a stage says what it knows of a microbatch: it computes its forward once more."""
_BETTER_REASON_SECONDS: Final = 1.0
"""How long after a link was lost it may show that its other end was."""


class StageFailures:
    """Of one run. All methods belong to the network's loop."""

    def __init__(
        self,
        course: Course,
        swarm: Swarm,
        ledger: Ledger,
        formation: Callable[[], Deployment],
        recovery: Recovery,
        believed: ObservedLimits,
        set_aside: Callable[[str, str], None],
        what_now: Callable[[], str],
        lose: Callable[[str, str], None],
        take_back: Callable[[str], None],
    ) -> None:
        """`set_aside` gives a provider no stage any more, for a reason, and `take_back` takes that back; `lose` ends a
        provider's stay; `what_now` says what a user can do when the run has ended."""
        self._course = course
        self._swarm = swarm
        self._ledger = ledger
        self._formation = formation
        self._recovery = recovery
        self._believed = believed
        self._aside = set_aside
        self._what_now = what_now
        self._lose = lose
        self._take_back = take_back
        self._traced: int | None = None
        """The microbatch that stages are asked about."""
        self._words: dict[str, Traced] = {}
        self._failures = FailureCounts()

    def take(self, node_id: str, failed: Failed) -> None:
        """A stage has failed."""
        message, kind = printable(failed.message), printable(failed.kind)
        formation = self._formation()
        cluster = formation.clusters.of(node_id)
        if cluster is None or 0 < failed.generation < cluster.generation:
            # It was formed anew meanwhile, and that one has another stage or other neighbours.
            return
        if not self._swarm.members.records[node_id].events.take(time.monotonic()):
            # It has said so often enough, and what follows from that is under way.
            return
        self._course.emit("stage_failed", message, provider=node_id, failure=kind, microbatch=failed.microbatch)
        if kind == "memory":
            self._evict(formation, node_id, message)
        if kind == "not_finite":
            self._course.spawn(self._trace(formation, cluster, node_id, failed.microbatch, message))
            return
        if kind == "neighbour" and self._accuse(node_id, printable(failed.about), cluster.nodes, message):
            return
        if kind in ("link", "neighbour") and not self._set_aside(
            node_id, self._failures.lost_link(node_id, self._ledger.completed)
        ):
            # Its stage is well, and its neighbour may be: if that is gone, that is the better reason.
            reason, generation = f"{node_id}: {message}", cluster.generation
            self._course.later(_BETTER_REASON_SECONDS, lambda: self._recovery.link_lost(node_id, reason, generation))
            return
        if kind == "no_part":
            giver = formation.part_missing(node_id)
            self._course.emit("part_missing", f"{node_id} did not get it: {message}", provider=giver or node_id)
        judged = self._failures.failed(node_id, failed.microbatch, self._ledger.completed)
        if judged.ends_run:
            self._course.fail(TrainingError(f"{node_id} failed: {message}; {judged.ends_run}; {self._what_now()}"))
            return
        self._set_aside(node_id, judged, message)
        reason = f"{node_id} failed: {message}"
        self._recovery.stage_lost(node_id, reason, time.monotonic(), failed=kind != "no_part")

    def joined(self, node_id: str) -> None:
        """A provider is here, perhaps again: one that broke the rules of this run gets no stage of it."""
        if why := self._swarm.members.records[node_id].conduct.barred_because:
            self._aside(node_id, why)

    def traced(self, node_id: str, said: Traced) -> None:
        """What a stage knows of a microbatch that is not finite."""
        if said.microbatch == self._traced:
            self._words.setdefault(node_id, said)
            self._course.notify()

    async def _trace(
        self, formation: Deployment, cluster: ClusterRun, node_id: str, microbatch: int, message: str
    ) -> None:
        """Finds out where what is not finite arose. Who sent it without having computed it loses its place, and the run
        goes on; else it is the model's or the data's, and the run ends."""
        if self._traced is not None:
            return
        if microbatch < 0 or node_id not in cluster.nodes:
            self._course.fail(TrainingError(f"{node_id}: {message}; {self._what_now()}"))
            return
        self._traced, self._words = microbatch, {}
        nodes = list(cluster.nodes)
        try:
            for node in nodes:
                order = Trace(deployment=formation.id, microbatch=microbatch)
                await self._course.tell(node, CoordinatorMessage(trace=order))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TRACE_SECONDS):
                    await self._course.until(lambda: self._words.keys() >= set(nodes))
            words = [_word(node, self._words.get(node)) for node in nodes]
        finally:
            self._traced = None
        ruling = judge_not_finite(words, nodes.index(node_id))
        what = f"{message.partition('; ')[0]}: {ruling.reason}"
        self._course.emit("not_finite", what, provider=node_id, microbatch=microbatch, accused=ruling.accused)
        if ruling.accused and self._accuse(ruling.accuser, ruling.accused, nodes, what):
            return
        self._course.fail(TrainingError(f"{what}; {self._what_now()}"))

    def _accuse(self, node_id: str, about: str, nodes: Sequence[str], message: str) -> bool:
        """A stage says that its neighbour broke the rules; whether that costs either of the two its place."""
        places = [nodes.index(node) for node in (node_id, about) if node in nodes]
        if len(places) < 2 or abs(places[0] - places[1]) != 1:
            return False
        records = self._swarm.members.records
        culprit, reason, cleared = judge_accusation(records, node_id, about, message)
        if not culprit:
            return False
        self._course.emit("rules_broken", reason, provider=culprit, accuser=node_id, accused=about)
        for node in cleared:
            self._take_back(node)
        self._lose(culprit, f"{culprit} broke the rules: {reason}")
        # Not before: what a provider was set aside for ends with its stay.
        self._aside(culprit, reason)
        return True

    def _set_aside(self, node_id: str, judged: Judged, message: str = "") -> bool:
        """Whether this one is given no stage any more."""
        if judged.set_aside:
            self._course.emit("set_aside", judged.set_aside, provider=node_id)
            self._aside(node_id, message or judged.set_aside)
        return bool(judged.set_aside)

    def _evict(self, formation: Deployment, node_id: str, why: str) -> None:
        """A provider has not the memory that it said: it gets no stage as large again."""
        stages = [stage for cluster in formation.planned.clusters for stage in cluster.stages]
        needed = next((stage.memory_bytes for stage in stages if stage.provider == node_id), None)
        if needed is not None and node_id in self._swarm.members:
            found = self._believed.note_failure(self._swarm.members[node_id], needed, why)
            self._course.emit("evicted", found.reason, provider=node_id, memory_bytes=found.memory_bytes)


def _word(node_id: str, said: Traced | None) -> StageWord:
    if said is None:
        return StageWord(node_id)
    return StageWord(
        node_id,
        printable(said.received),
        printable(said.sent),
        printable(said.kind),
        printable(said.where),
        printable(said.gradients_received),
        printable(said.gradients_sent),
        printable(said.steep),
    )

"""Stage failures: what follows when a stage reports that it cannot go on.

Another provider takes the stage, its cluster gets new links, the provider gets no stage any more, or the run ends.
`failure_verdicts` decides whether the provider or the stage is at fault, and `recovery` who takes the stage.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Final

from ravnest.coordinator.deploy.current_deployment import CurrentDeployment
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.health.accusations import judge_accusation
from ravnest.coordinator.health.not_finite import StageWord, judge_not_finite
from ravnest.coordinator.recovery.failure_verdicts import FailureCounts, FailureVerdict
from ravnest.coordinator.recovery.recovery import Recovery
from ravnest.coordinator.run.job_run import JobRun
from ravnest.errors import TrainingError, printable
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Failed, Trace, Traced

_TRACE_SECONDS: Final = 20.0
"""Timeout for a stage's report on a microbatch: the stage computes its forward again."""
_BETTER_REASON_SECONDS: Final = 1.0
"""Delay between the loss of a link and the rebuild: the loss of a neighbour is the better reason."""


class StageFailures:
    """The failures of one run's stages. All methods run on the network's event loop."""

    def __init__(self, run: JobRun, current: CurrentDeployment, recovery: Recovery) -> None:
        self._run = run
        self._context = run.context
        self._current = current
        self._recovery = recovery
        self._counts = FailureCounts()
        self._traced: int | None = None
        """The microbatch that is being traced; None without one."""
        self._answers: dict[str, Traced] = {}

    def failed(self, node_id: str, failed: Failed) -> None:
        """A provider reports that its stage has failed."""
        message, kind = printable(failed.message), printable(failed.kind)
        cluster = self._current.cluster_of(node_id)
        if cluster is None or 0 < failed.generation < cluster.generation:
            # The cluster was rebuilt meanwhile, and the stage has other neighbours.
            return
        if not self._context.members.records[node_id].events.take(time.monotonic()):
            # The provider exceeds its rate limit for events; its earlier reports have been handled.
            return
        self._context.emit("stage_failed", message, provider=node_id, failure=kind, microbatch=failed.microbatch)
        if kind == "memory":
            self._note_memory(node_id, message)
        if kind == "not_finite":
            deployment = self._current.now.id
            self._context.spawn(self._trace(deployment, cluster, node_id, failed.microbatch, message))
            return
        if kind == "neighbour" and self._accuse(node_id, printable(failed.about), cluster.nodes, message):
            return
        completed = self._context.ledger.completed
        if kind in ("link", "neighbour") and not self._exclude(node_id, self._counts.lost_link(node_id, completed)):
            # Both stages may be well. If the neighbour is lost, that is the better reason for the rebuild.
            reason, generation = f"{node_id}: {message}", cluster.generation
            self._context.later(_BETTER_REASON_SECONDS, lambda: self._recovery.link_lost(node_id, reason, generation))
            return
        if kind == "no_part":
            sender = self._current.now.on_part_missing(node_id)
            text = f"{node_id} did not receive a part of its stage: {message}"
            self._context.emit("part_missing", text, provider=sender or node_id)
        verdict = self._counts.failed(node_id, failed.microbatch, completed)
        if verdict.ends_run:
            self._end_run(f"{node_id} failed: {message}; {verdict.ends_run}")
            return
        self._exclude(node_id, verdict, message)
        reason = f"{node_id} failed: {message}"
        self._recovery.stage_lost(node_id, reason, time.monotonic(), failed=kind != "no_part")

    def joined(self, node_id: str) -> None:
        """A provider has joined, perhaps again. One that broke the rules of this run gets no stage of it."""
        if why := self._context.members.records[node_id].conduct.barred_because:
            self._run.exclusions.fail(node_id, why)

    def traced(self, node_id: str, answer: Traced) -> None:
        """A stage reports what it computed of a microbatch that is not finite."""
        if answer.microbatch == self._traced:
            self._answers.setdefault(node_id, answer)
            self._context.notify()

    async def _trace(self, deployment: str, cluster: ClusterRun, node_id: str, microbatch: int, message: str) -> None:
        """Finds the stage where a value became not finite. A provider that sent such a value without having computed it
        loses its stage, and the run goes on. Otherwise the model or the data is the cause, and the run ends."""
        if self._traced is not None:
            return
        if microbatch < 0 or node_id not in cluster.nodes:
            self._end_run(f"{node_id}: {message}")
            return
        self._traced, self._answers = microbatch, {}
        nodes = list(cluster.nodes)
        try:
            for node in nodes:
                order = Trace(deployment=deployment, microbatch=microbatch)
                await self._context.tell(node, CoordinatorMessage(trace=order))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TRACE_SECONDS):
                    await self._context.until(lambda: self._answers.keys() >= set(nodes))
            words = [_word(node, self._answers.get(node)) for node in nodes]
        finally:
            self._traced = None
        ruling = judge_not_finite(words, nodes.index(node_id))
        what = f"{message.partition('; ')[0]}: {ruling.reason}"
        self._context.emit("not_finite", what, provider=node_id, microbatch=microbatch, accused=ruling.accused)
        if ruling.accused and self._accuse(ruling.accuser, ruling.accused, nodes, what):
            return
        self._end_run(what)

    def _accuse(self, node_id: str, about: str, nodes: Sequence[str], message: str) -> bool:
        """A stage reports that its neighbour broke the rules; whether one of the two loses its stage for that."""
        places = [nodes.index(node) for node in (node_id, about) if node in nodes]
        # The leaf and the root are neighbours where the leaf looks rows up; elsewhere they have no link.
        if len(places) < 2 or abs(places[0] - places[1]) not in (1, len(nodes) - 1):
            return False
        culprit, reason, cleared = judge_accusation(self._context.members.records, node_id, about, message)
        if not culprit:
            return False
        self._context.emit("rules_broken", reason, provider=culprit, accuser=node_id, accused=about)
        for node in cleared:
            self._run.exclusions.forgive(node)
        self._context.give_up(culprit, f"{culprit} broke the rules: {reason}")
        # Only now, because the end of a session ends its exclusion too.
        self._run.exclusions.fail(culprit, reason)
        return True

    def _exclude(self, node_id: str, verdict: FailureVerdict, message: str = "") -> bool:
        """Excludes the provider from stages if the verdict says so; whether it does."""
        if verdict.set_aside:
            self._context.emit("set_aside", verdict.set_aside, provider=node_id)
            self._run.exclusions.fail(node_id, message or verdict.set_aside)
        return bool(verdict.set_aside)

    def _note_memory(self, node_id: str, why: str) -> None:
        """A provider has less memory than it promised: it gets no stage as large again."""
        stages = [stage for cluster in self._current.now.planned.clusters for stage in cluster.stages]
        needed = next((stage.memory_bytes for stage in stages if stage.provider == node_id), None)
        if needed is not None and node_id in self._context.members:
            found = self._run.limits.note_failure(self._context.members[node_id], needed, why)
            self._context.emit("evicted", found.reason, provider=node_id, memory_bytes=found.memory_bytes)

    def _end_run(self, reason: str) -> None:
        self._context.fail(TrainingError(f"{reason}; {self._run.checkpointer.advice}"))


def _word(node_id: str, answer: Traced | None) -> StageWord:
    if answer is None:
        return StageWord(node_id)
    return StageWord(
        node_id,
        printable(answer.received),
        printable(answer.sent),
        printable(answer.kind),
        printable(answer.where),
        printable(answer.gradients_received),
        printable(answer.gradients_sent),
        printable(answer.steep),
    )

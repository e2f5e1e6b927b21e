"""Messages of providers: which part of the run handles each kind.

Messages about a deployment count only if they come from a provider with a stage of the current one.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from ravnest.coordinator.deploy.current_deployment import CurrentDeployment
from ravnest.coordinator.health.slow_links import SlowLinks
from ravnest.coordinator.recovery.upkeep import Upkeep
from ravnest.coordinator.replicas.part_uploads import PartUploads
from ravnest.coordinator.run.job_run import JobRun
from ravnest.errors import printable
from ravnest.net.v1.control_pb2 import (
    Failed,
    Fetching,
    Leave,
    ProviderMessage,
    Ready,
    Replicated,
    Report,
    Saved,
    Strained,
)

Handler = Callable[[str, Any], None]
"""Takes the provider's id and the body of its message."""


class StageMessages:
    """Dispatch of one run's messages. All methods run on the network's event loop."""

    def __init__(self, run: JobRun, current: CurrentDeployment, upkeep: Upkeep, uploads: PartUploads) -> None:
        self._run = run
        self._context = run.context
        self._current = current
        self._upkeep = upkeep
        self._uploads = uploads
        self._slow_links = SlowLinks(run.context.emit)
        self._of_any_provider: Mapping[str, Handler] = {
            "leave": self._on_leave,
            "replicated": self._on_replicated,
            "failed": self._on_failed,
        }
        self._of_a_stage: Mapping[str, Handler] = {
            "ready": self._on_ready,
            "fetching": self._on_fetching,
            "report": self._on_report,
            "strained": self._on_strained,
            "saved": self._on_saved,
            "traced": upkeep.failures.traced,
        }

    def handle(self, node_id: str, message: ProviderMessage) -> None:
        """Passes a message on to its handler; messages about another deployment are dropped."""
        kind = message.WhichOneof("body")
        if kind is None:
            return
        body = getattr(message, kind)
        if kind in self._of_any_provider:
            self._of_any_provider[kind](node_id, body)
            return
        deployment = self._current.deployment
        if deployment is None or not self._is_of_a_stage(node_id, body):
            return
        if kind in self._of_a_stage:
            self._of_a_stage[kind](node_id, body)
        elif deployment.rounds is not None:
            deployment.rounds.heard(node_id, message)

    def _on_leave(self, node_id: str, body: Leave) -> None:
        self._upkeep.changes.wants_to_leave(node_id, printable(body.reason))

    def _on_replicated(self, node_id: str, body: Replicated) -> None:
        deployment = self._current.deployment
        if deployment is not None:
            deployment.replicas.on_replicated(node_id, body, deployment.clusters.whole)

    def _is_of_a_stage(self, node_id: str, body: Any) -> bool:
        """Whether the message is about a stage that the provider holds in the current deployment."""
        deployment = self._current.deployment
        is_current = deployment is not None and getattr(body, "deployment", None) == deployment.id
        return is_current and node_id in self._current.stage_of

    def _on_failed(self, node_id: str, body: Failed) -> None:
        """A stage has failed, or a provider cannot upload a part of a replica: then the field `deployment` is the key
        of the part, and `replica` the number of its replica."""
        if body.kind != "part":
            if self._is_of_a_stage(node_id, body):
                self._upkeep.failures.failed(node_id, body)
            return
        is_asked = self._uploads.is_asked(node_id, body.deployment, body.replica)
        if is_asked and self._context.members.records[node_id].events.take(time.monotonic()):
            self._context.emit("part_missing", printable(body.message), provider=node_id)
        self._uploads.on_part_unavailable(node_id, body.deployment, body.replica)

    def _on_ready(self, node_id: str, body: Ready) -> None:
        self._current.now.delivery.on_ready(node_id, body)
        self._show_fetched(node_id, 1.0)

    def _on_fetching(self, node_id: str, body: Fetching) -> None:
        self._current.now.delivery.on_fetching(node_id)
        self._show_fetched(node_id, min(1.0, body.received_bytes / max(1, body.total_bytes)))

    def _on_strained(self, node_id: str, body: Strained) -> None:
        cluster = self._current.cluster_of(node_id)
        if cluster is not None and self._context.members.records[node_id].events.take(time.monotonic()):
            self._current.now.in_flight.strained(cluster, node_id, body)

    def _on_saved(self, node_id: str, body: Saved) -> None:
        self._run.checkpointer.saved(node_id, body.checkpoint)
        self._current.now.in_flight.restart()

    def _on_report(self, node_id: str, body: Report) -> None:
        deployment, cluster = self._current.now, self._current.cluster_of(node_id)
        assert cluster is not None, "the provider has a stage"
        stage = deployment.stage_of[node_id]
        with self._context.failing():
            self._context.recorder.take(node_id, cluster.id, stage, body)
        self._context.members.records[node_id].reported_at = time.monotonic()
        self._upkeep.watchdog.reported(node_id, body)
        self._context.notify()
        is_evaluating = self._run.walk.evaluation is not None
        if not is_evaluating and not cluster.is_forming:
            deployment.in_flight.reported(cluster, stage, body)
        self._slow_links.reported(node_id, body)
        if not is_evaluating:
            self._upkeep.slow_stages.reported(deployment, cluster, node_id, body)
        if deployment.rounds is not None:
            deployment.rounds.reported(node_id, body)

    def _show_fetched(self, node_id: str, share: float) -> None:
        """Shows the share of its stage that a provider has, unless it has all of it at once."""
        progress, deployment = self._context.progress, self._current.now
        if progress.fetching or share < 1:
            ready = deployment.delivery.ready
            before = progress.fetching or {node: float(node in ready) for node in deployment.stage_of}
            progress.fetching = before | {node_id: share}

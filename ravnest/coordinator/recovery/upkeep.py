"""Upkeep of a deployed run: the parts that watch its providers, and react when one joins, fails or is lost."""

import time

from ravnest.coordinator.deploy.current_deployment import CurrentDeployment
from ravnest.coordinator.deploy.present_planner import PresentPlanner
from ravnest.coordinator.deploy.redeployment import Redeployment
from ravnest.coordinator.health.checkpoint_watch import CheckpointWatch
from ravnest.coordinator.health.watchdog import Watchdog
from ravnest.coordinator.recovery.lost_providers import LostProviders
from ravnest.coordinator.recovery.membership_changes import MembershipChanges
from ravnest.coordinator.recovery.recovery import Recovery
from ravnest.coordinator.recovery.replace_slow import SlowStageReplacement
from ravnest.coordinator.recovery.replacements import Replacements
from ravnest.coordinator.recovery.stage_failures import StageFailures
from ravnest.coordinator.recovery.standbys import Standbys
from ravnest.coordinator.run.job_run import JobRun
from ravnest.coordinator.swarm.members import Member


class Upkeep:
    """The upkeep of one run, from the preparation of its job. All methods run on the network's event loop."""

    def __init__(
        self, run: JobRun, current: CurrentDeployment, planner: PresentPlanner, redeployment: Redeployment
    ) -> None:
        context = run.context
        self.standbys = Standbys(run, current)
        self.recovery = Recovery(run, current, redeployment, self.standbys)
        self.changes = MembershipChanges(run, current, planner, self.recovery, redeployment)
        self.standbys.on_new = self.changes.joined
        self.losses = LostProviders(run, current, self.standbys, self.recovery, self.changes)
        context.give_up = self.losses.lost
        self.failures = StageFailures(run, current, self.recovery)
        replacements = Replacements(context, current, self.standbys)
        self.watchdog = Watchdog(
            context.swarm,
            blocks=replacements.blocks,
            replacement=replacements.replacement,
            emit=context.emit,
            on_lost=self._on_lost,
            clusters=replacements.busy_clusters,
            awaited_upload=lambda: run.checkpointer.upload_name,
        )
        self.slow_stages = SlowStageReplacement(self.standbys, run.limits, self.watchdog)
        self.checkpoint_watch = CheckpointWatch(
            context.members,
            lambda: run.checkpointer.awaited,
            replacements.replacement,
            self.watchdog.give_up,
            lambda: context.standstill.patience_seconds,
        )
        self._current = current

    def joined(self, member: Member) -> None:
        """A provider has joined, perhaps again."""
        self.failures.joined(member.node_id)
        deployment, cluster = self._current.deployment, self._current.cluster_of(member.node_id)
        if cluster is not None:
            # It was lost, and has joined again before another provider took its stage: it may have the stage again.
            cluster.losses.returned.add(member.node_id)
        if deployment is not None:
            deployment.replicas.add_parts(member.node_id, member.parts)
        self.standbys.look()

    def _on_lost(self, node_id: str, reason: str, silent_seconds: float) -> None:
        self.losses.lost(node_id, reason, time.monotonic() - silent_seconds)

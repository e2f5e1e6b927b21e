"""Lost providers: what follows when a provider's session ends, or the coordinator gives the provider up.

A lost provider may join again, and is a standby then: its stage is given to another provider.
"""

import time

from ravnest.coordinator.deploy.current_deployment import CurrentDeployment
from ravnest.coordinator.recovery.membership_changes import MembershipChanges
from ravnest.coordinator.recovery.recovery import Recovery
from ravnest.coordinator.recovery.standbys import Standbys
from ravnest.coordinator.run.context import RunContext
from ravnest.coordinator.run.job_run import JobRun
from ravnest.errors import RefusedError, TrainingError
from ravnest.monitor.summary import Fault


def note_lost(context: RunContext, node_id: str, reason: str, *, has_left: bool = False, is_back: bool = False) -> None:
    """Records that a provider is lost, or `has_left` as announced, and ends its session. If it `is_back`, it has joined
    again since, without its stage, and its new session goes on."""
    record, now = context.members.records[node_id], time.monotonic()
    record.is_lost = not is_back
    if has_left:
        record.presence.note_departure(now)
    else:
        record.presence.note_loss(now, is_back=is_back)
    context.emit("lost", reason, provider=node_id)
    if not is_back:
        # Others take its stage, so nothing that it still sends is of use.
        context.swarm.dismiss(node_id, RefusedError(f"{node_id} was given up: {reason}; it may join again"))


def lost_before_the_job(context: RunContext, node_id: str, reason: str, *, is_back: bool = False) -> None:
    """A provider is lost before the job is prepared; for `is_back` see `note_lost`."""
    members = context.members
    if not context.is_closing and not members.records[node_id].is_lost and not members.is_present(node_id):
        note_lost(context, node_id, reason, is_back=is_back)
        _fail_if_too_few(context, f"{node_id} is gone: {reason}")
        context.notify()


def _fail_if_too_few(context: RunContext, reason: str) -> None:
    """Ends a run that is not deployed if fewer providers than it needs are connected or can still join."""
    limit = context.swarm.most
    if limit is not None and limit - context.members.lost_count < context.min_providers:
        context.fail(TrainingError(reason))


class LostProviders:
    """The losses of one run, after its job is prepared. All methods run on the network's event loop."""

    def __init__(
        self,
        run: JobRun,
        current: CurrentDeployment,
        standbys: Standbys,
        recovery: Recovery,
        changes: MembershipChanges,
    ) -> None:
        self._context = run.context
        self._exclusions = run.exclusions
        self._current = current
        self._standbys = standbys
        self._recovery = recovery
        self._changes = changes

    def lost(self, node_id: str, reason: str, last_well_at: float | None = None, *, is_back: bool = False) -> None:
        """A provider is lost. It was last well at `last_well_at` on the clock `time.monotonic` (None: now); for
        `is_back` see `note_lost`."""
        context, deployment = self._context, self._current.deployment
        if context.is_closing or context.members.records[node_id].is_lost:
            return
        cluster, stage = self._current.cluster_of(node_id), self._current.stage_of.get(node_id)
        if stage is None and context.members.is_present(node_id):
            # It has joined again meanwhile, and had no stage to lose.
            return
        note_lost(context, node_id, reason, has_left=node_id in self._exclusions, is_back=is_back)
        was_dismissed = self._changes.gone(node_id)
        held = "" if stage is None else f", which held stage {stage},"
        text = f"{node_id}{held} is gone: {reason}"
        if deployment is None:
            _fail_if_too_few(context, text)
        elif cluster is not None and not was_dismissed:
            fault = Fault(kind="provider_lost", provider=node_id, cluster=cluster.id, at=time.time())
            context.progress.faults.append(fault)
            self._recovery.stage_lost(node_id, text, time.monotonic() if last_well_at is None else last_well_at)
            if is_back:
                deployment.replicas.add_parts(node_id, context.members[node_id].parts)
        else:
            deployment.holders.remove(node_id)
            self._standbys.look()
        context.notify()

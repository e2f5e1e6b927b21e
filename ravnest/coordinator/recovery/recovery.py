"""Recovery of lost stages: a standby takes the stage, or the run is redeployed, or it waits for other providers.

The planner decides (find_takers.py), and this module carries the decision out. If another provider is lost while a
cluster is being rebuilt, the planner decides again with the providers that are left.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from ravnest.coordinator.deploy.cluster_rebuild import BorrowedState, ClusterRebuild, RebuiltCluster
from ravnest.coordinator.deploy.current_deployment import CurrentDeployment
from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.deploy.redeployment import Redeployment
from ravnest.coordinator.feed.cluster_losses import LostStage
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.recovery.find_takers import TakerChoice
from ravnest.coordinator.recovery.standbys import Standbys
from ravnest.coordinator.recovery.state_sources import StateSources
from ravnest.coordinator.replicas.replica import Replica
from ravnest.coordinator.replicas.sources import DeploymentAbortedError
from ravnest.coordinator.run.job_run import JobRun
from ravnest.planner.plan import Plan
from ravnest.planner.recovery.choose_taker import Taking
from ravnest.units import counted

_TRIES: Final = 8
"""Maximum number of attempts to rebuild a cluster before the run is redeployed."""
_NOTED_SECONDS: Final = 1.0
"""Timeout for the swarm to report a disconnected provider as lost: that report has the better reason."""


@dataclass
class _Attempts:
    """The attempts to rebuild one cluster."""

    repaired: list[LostStage] = field(default_factory=list)
    """Losses of stages that were taken in an aborted attempt."""
    taken: dict[int, str] = field(default_factory=dict)
    """By stage, its taker, in all attempts."""
    plan: Plan | None = None
    """The plan that would replace the deployment, if the last decision needed one."""


@dataclass(frozen=True)
class _Decision:
    """The takers of the lost stages, and the state that they start from. Times are of the clock `time.monotonic`."""

    takers: Mapping[int, str]
    replica: Replica | None
    borrowed: BorrowedState | None
    reason: str
    last_well_at: float
    noticed_at: float
    decided_at: float


class Recovery:
    """The recovery of one run. All methods run on the network's event loop."""

    def __init__(
        self,
        run: JobRun,
        current: CurrentDeployment,
        redeployment: Redeployment,
        standbys: Standbys,
    ) -> None:
        self._run = run
        self._context = run.context
        self._current = current
        self._redeployment = redeployment
        self._standbys = standbys
        self._choice = TakerChoice(run.context, current, standbys, redeployment)
        self._state_sources = StateSources(run)
        self._since: dict[int, dict[str, float]] = {}
        """By cluster, the providers that were lost since it was last complete, and when each was last well."""
        redeployment.on_ready = self.begin

    def begin(self, deployment: Deployment) -> None:
        """All stages of a deployment are ready: its clusters are fed from now on. A cluster that has lost a provider
        meanwhile is rebuilt first."""
        for cluster in deployment.clusters.whole:
            if cluster.losses.stages or self._context.missing_from(cluster):
                self._context.spawn(self._recover(deployment, cluster))
            else:
                deployment.resume(cluster)
        self._standbys.look()

    def stage_lost(self, node_id: str, reason: str, last_well_at: float, *, failed: bool = False) -> None:
        """A provider does not hold its stage any more: it is gone, or has `failed` with it."""
        deployment = self._current.now
        cluster = deployment.clusters.of(node_id)
        if cluster is None:
            return
        stage, losses = cluster.nodes.index(node_id), cluster.losses
        if failed:
            losses.unfit.add((node_id, stage))
        losses.note(stage, node_id, reason, last_well_at, time.monotonic())
        losses.gone.add(node_id)
        self._since.setdefault(cluster.id, {})[node_id] = last_well_at
        if not self._context.members.is_present(node_id):
            # A provider that is still connected has its replicas on its disk.
            deployment.holders.remove(node_id)
        if cluster.is_forming:
            self._context.notify()
            return
        cluster.begin_forming(reason)
        self._context.spawn(self._recover(deployment, cluster))

    def stage_left(self, node_id: str, reason: str) -> None:
        """A provider that is well gives its stage up, and keeps it until it is told to stop."""
        deployment = self._current.now
        cluster = deployment.clusters.of(node_id)
        if cluster is None or cluster.is_forming:
            return
        now = time.monotonic()
        stage = cluster.nodes.index(node_id)
        cluster.losses.stages.pop(stage, None)
        cluster.losses.note(stage, node_id, reason, now, now)
        cluster.begin_forming(reason)
        self._context.spawn(self._recover(deployment, cluster))

    def link_lost(self, node_id: str, reason: str, generation: int) -> None:
        """A stage has lost its link to a neighbour for good, and both providers are well: the cluster gets new links,
        unless it already has links of a later generation."""
        deployment = self._current.now
        cluster = deployment.clusters.of(node_id)
        if cluster is not None and not cluster.is_forming and cluster.generation == generation:
            cluster.begin_forming(reason)
            self._context.spawn(self._recover(deployment, cluster))

    async def _recover(self, deployment: Deployment, cluster: ClusterRun) -> None:
        """Rebuilds a cluster, or does without it."""
        attempts = _Attempts()
        for attempt in range(_TRIES):
            await self._until_noted(cluster)
            if not self._current.is_current(deployment) or cluster.is_lost:
                return
            cluster.losses.gone = set()
            decision = await self._decide(deployment, cluster, attempts) if attempt < _TRIES - 1 else None
            if decision is None:
                break
            self._tell_begun(cluster, decision)
            rebuild = ClusterRebuild(
                self._run, deployment, cluster, decision.takers, decision.replica, decision.borrowed
            )
            try:
                rebuilt = await rebuild.run(self._standbys.ready())
            except DeploymentAbortedError as error:
                self._context.emit("failover_broken_off", str(error), cluster=cluster.id)
                self._keep_taken(deployment, cluster, decision, attempts)
                continue
            attempts.taken |= decision.takers
            self._complete(deployment, cluster, decision, attempts, rebuilt)
            return
        await self._without_takers(deployment, cluster, attempts.plan)

    async def _decide(self, deployment: Deployment, cluster: ClusterRun, attempts: _Attempts) -> _Decision | None:
        """The takers of all lost stages; None if a stage has no taker, or no state to start from."""
        now = time.monotonic()
        losses = [*attempts.repaired, *(each for loss in cluster.losses.stages.values() for each in loss.chain)]
        takings, attempts.plan = await self._choice.choose(cluster)
        if takings is None:
            return None
        decided_at = time.monotonic()
        takers = {stage: taking.taker or "" for stage, taking in takings.items()}
        replica = deployment.replicas.newest(cluster)
        borrowed = None
        if missing := self._choice.without_state(cluster, replica, takers):
            if len(deployment.clusters.whole) > 1:
                borrowed = await self._state_sources.state_for(deployment, cluster, missing)
            if borrowed is None:
                why = "; ".join(dict.fromkeys(missing.values()))
                self._context.emit("nobody_takes", why, cluster=cluster.id, stage=min(missing))
                return None
        return _Decision(
            takers,
            replica,
            borrowed,
            reason=_reason(takings) or cluster.reason,
            last_well_at=min((loss.last_well_at for loss in losses), default=now),
            noticed_at=min((loss.noticed_at for loss in losses), default=now),
            decided_at=decided_at,
        )

    def _keep_taken(
        self, deployment: Deployment, cluster: ClusterRun, decision: _Decision, attempts: _Attempts
    ) -> None:
        """The takers that have their stage already keep it, although the rebuild was aborted."""
        missing = self._context.missing_from(cluster)
        for stage, taker in decision.takers.items():
            node = cluster.nodes[stage]
            if deployment.delivery.is_ready(cluster, node) and node not in missing:
                attempts.repaired += cluster.losses.stages.pop(stage).chain
                attempts.taken[stage] = taker

    def _complete(
        self,
        deployment: Deployment,
        cluster: ClusterRun,
        decision: _Decision,
        attempts: _Attempts,
        rebuilt: RebuiltCluster,
    ) -> None:
        """A cluster is complete again."""
        cluster.losses.stages.clear()
        deployment.resume(cluster)
        now = cluster.resumed_at or time.monotonic()
        self._note_recovered(self._since.pop(cluster.id, {}), now)
        taken = attempts.taken
        self._context.emit(
            "failover",
            f"cluster {cluster.id} is complete again: {decision.reason}",
            cluster=cluster.id,
            stages=sorted(taken),
            takers=[taken[stage] for stage in sorted(taken)],
            seconds=now - decision.last_well_at,
            replayed=rebuilt.replayed,
            detect_seconds=decision.noticed_at - decision.last_well_at,
            decide_seconds=decision.decided_at - decision.noticed_at,
            fetch_seconds=rebuilt.fetch_seconds,
            resume_seconds=now - decision.decided_at - rebuilt.fetch_seconds,
        )
        self._standbys.look()

    async def _until_noted(self, cluster: ClusterRun) -> None:
        """Returns when every provider of a cluster that is disconnected is also known as lost."""
        stages, members = cluster.losses.stages, self._context.members

        def unnoted() -> list[tuple[int, str]]:
            return [
                (stage, node)
                for stage, node in enumerate(cluster.nodes)
                if not members.is_present(node) and (stage not in stages or stages[stage].node != node)
            ]

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_NOTED_SECONDS):
                await self._context.until(lambda: cluster.is_lost or not unnoted())
        now = time.monotonic()
        for stage, node in [] if cluster.is_lost else unnoted():
            cluster.losses.note(stage, node, f"{node} is gone", now, now)

    async def _without_takers(self, deployment: Deployment, cluster: ClusterRun, plan: Plan | None) -> None:
        """The other clusters go on without this one, or the run is redeployed."""
        why = "; ".join(loss.reason for loss in cluster.losses.stages.values()) or cluster.reason
        cluster.losses.stages.clear()
        cluster.losses.gone.clear()
        if len(deployment.clusters.whole) > 1:
            self._dissolve(deployment, cluster, why)
            self._note_recovered(self._since.pop(cluster.id, {}), time.monotonic())
            self._standbys.look()
            return
        await self._redeployment.redeploy(deployment, why, decided=plan)
        # The new deployment does without all of these, also without those that were lost meanwhile.
        since, self._since = self._since, {}
        for nodes in since.values():
            self._note_recovered(nodes, time.monotonic())

    def _dissolve(self, deployment: Deployment, cluster: ClusterRun, reason: str) -> None:
        """Dissolves a cluster. The others go on, and are fed the microbatches that it had not completed."""
        assert deployment.rounds is not None, "there are other clusters"
        unaveraged = cluster.samples - deployment.rounds.counted_samples(cluster.nodes)
        replayed = deployment.lose(cluster, reason)
        text = (
            f"cluster {cluster.id} is dissolved: {reason}; "
            f"{counted(len(deployment.clusters.whole), 'cluster remains', 'clusters remain')}, to be fed its "
            f"{counted(replayed, 'unfinished microbatch', 'unfinished microbatches')}; what it learned from its last "
            f"{unaveraged} samples had not been averaged and is lost"
        )
        self._context.emit("cluster_lost", text, cluster=cluster.id, replayed=replayed, samples=unaveraged)
        self._context.say(text)

    def _tell_begun(self, cluster: ClusterRun, decision: _Decision) -> None:
        for stage, taker in decision.takers.items():
            source, samples, reason = "start" if decision.replica is None else "replica", 0, decision.reason
            borrowed = decision.borrowed
            if borrowed is not None and stage in borrowed.stages:
                source, samples = borrowed.source, borrowed.samples_lost
                reason = f"{reason}; its state comes {borrowed.words}"
            self._context.emit(
                "failover_begun",
                reason,
                cluster=cluster.id,
                stage=stage,
                lost=cluster.losses.stages[stage].node,
                taker=taker,
                source=source,
                updates_lost=self._updates_in(samples) if samples else cluster.dropped,
            )

    def _updates_in(self, samples: int) -> int:
        """Approximate number of updates in these samples, from the mean number of samples of an update so far."""
        ledger = self._context.ledger
        return math.ceil(samples * ledger.updates / ledger.samples) if ledger.samples else 0

    def _note_recovered(self, since: Mapping[str, float], now: float) -> None:
        """The run goes on without these providers, which were last well at those times."""
        faults = self._context.progress.faults
        for index, fault in enumerate(faults):
            if fault.provider in since and fault.recovered_seconds is None:
                faults[index] = replace(fault, recovered_seconds=now - since[fault.provider])


def _reason(takings: Mapping[int, Taking]) -> str:
    return "; ".join(taking.reason for taking in takings.values())

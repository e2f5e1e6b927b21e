"""Resuming of running stages after a restart of the coordinator: the stages of the recorded deployment continue.

A cluster continues if its providers still hold all of its stages. Recovery then gives the missing stages of the other
clusters to other providers. If no cluster can continue, or the job has changed, nothing is resumed and the reason is
returned; the caller then deploys the run from a replica that survived, or from a checkpoint.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ravnest.coordinator.deploy.cluster_rebuild import ClusterRebuild
from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.deploy.deployment_record import DeploymentRecord, claims_of
from ravnest.coordinator.deploy.rollout import Rollout
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.replicas.sources import DeploymentAbortedError
from ravnest.coordinator.run.context import RunContext
from ravnest.coordinator.run.job_run import JobRun
from ravnest.coordinator.swarm.members import Held
from ravnest.errors import PlanError
from ravnest.net.v1.control_pb2 import Ready
from ravnest.planner.plan import Plan
from ravnest.planner.search.fixed_layout import ClusterLayout, filled

_MAX_ROUNDS_SINCE: Final = 1000
"""Maximum number of rounds that began after the last record, which is a few seconds old when a coordinator ends."""


@dataclass(frozen=True, slots=True)
class ResumedStages:
    """A deployment whose stages kept running."""

    deployment: Deployment
    stages: int
    """The number of stages that continue."""
    applied: int
    """Microbatches that they have applied since the recorded position."""
    lost: Mapping[int, Mapping[int, str]]
    """By cluster, the stages that must be replaced, each with the provider that held it."""


async def wait_for_return(context: RunContext, record: DeploymentRecord) -> None:
    """Returns when all providers of the recorded stages are connected, or after a timeout."""
    members = context.members
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(context.timeouts.return_seconds):
            back = members.changes.until(lambda: set(record.nodes) <= {m.node_id for m in members.in_order()})
            await context.while_well(back)


async def resume_stages(
    run: JobRun,
    rollout: Rollout,
    record: DeploymentRecord,
    plan: Callable[[Sequence[ClusterLayout]], Awaitable[Plan]],
) -> ResumedStages | str:
    """Continues with every cluster whose stages are all held; returns the reason if there is none. `plan` makes the
    plan of clusters with these layouts."""
    swarm = run.context.swarm
    held: dict[str, Held | None] = {member.node_id: member.held for member in swarm.members.in_order()}
    lost = [cluster.lost(record.deployment, held) for cluster in record.clusters]
    layouts = filled(record.layouts, held)
    if all(lost) or layouts is None:
        [(stage, name), *_] = [each for of_cluster in lost for each in of_cluster.items()]
        return f"{name} does not hold stage {stage} any more, and there is no other provider"
    swarm.generation = record.later_generation
    deployment = None
    try:
        deployment = rollout.create(run.prepared, await plan(layouts), record=record)
        if deployment.digest != record.digest:
            raise DeploymentAbortedError("the job has changed")
        of_layout = {layout.providers: stages for layout, stages in zip(layouts, lost, strict=True)}
        missing = {cluster.id: of_layout[tuple(cluster.nodes)] for cluster in deployment.clusters.all}
        complete = [cluster for cluster in deployment.clusters.all if not missing[cluster.id]]
        applied = await _resume(run, deployment, record, complete)
    except (PlanError, DeploymentAbortedError) as error:
        if deployment is not None:
            rollout.undo(deployment)
        return str(error)
    return ResumedStages(deployment, len(record.nodes) - sum(map(len, lost)), applied, missing)


async def _resume(run: JobRun, deployment: Deployment, record: DeploymentRecord, clusters: Sequence[ClusterRun]) -> int:
    """Links all stages of these clusters in a new generation; returns the number of microbatches that they have applied
    since the recorded position. DeploymentAbortedError if that fails."""
    rebuilt = await asyncio.gather(
        *(ClusterRebuild(run, deployment, cluster, takers={}).run(known={}) for cluster in clusters),
        return_exceptions=True,
    )
    for each in rebuilt:
        if isinstance(each, BaseException):
            raise each
    ready = {node: deployment.delivery.ready[node] for cluster in clusters for node in cluster.nodes}
    try:
        applied = [[ready[node].applied for node in cluster.nodes] for cluster in clusters]
        claims = claims_of(applied, record.place.microbatches)
    except ValueError as error:
        raise DeploymentAbortedError(str(error)) from None
    for cluster in deployment.clusters.all:
        # This coordinator has none of the microbatches before that position: until there is a replica, only the stages
        # themselves have the state.
        cluster.dropped = 1
    _resume_averaging(deployment, record, ready)
    run.dispatcher.claims = {number: (clusters[claim.cluster], claim.whole) for number, claim in claims.items()}
    return len(claims)


def _resume_averaging(deployment: Deployment, record: DeploymentRecord, ready: Mapping[str, Ready]) -> None:
    if deployment.rounds is None:
        return
    standings = {node: each.rings for node, each in ready.items()}
    for standing in (standing for each in standings.values() for standing in each):
        if not standing.committed <= standing.round <= record.rounds + _MAX_ROUNDS_SINCE:
            raise DeploymentAbortedError(f"an owner reports round {standing.round}, which cannot have begun")
    unaveraged: dict[str, int] = {}
    for cluster in deployment.clusters.all:
        # The providers that are left identify the recorded cluster.
        known = (each.unaveraged for each in record.clusters if not {*each.layout.providers}.isdisjoint(cluster.nodes))
        unaveraged |= dict.fromkeys(cluster.nodes, max(known, default=0))
    deployment.rounds.take_over(standings, unaveraged)

"""Taking stages over as they are, after the coordinator was killed and started again (from deployment_record.py).

What happens on failure: where somebody cannot go on with its stage, or the job is another one than it was, nothing is
taken over, and the reason is told; the run is deployed anew from what was kept or saved.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.deploy.deployment_record import DeploymentRecord, claims_of
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.replicas.sources import DeploymentAbortedError
from ravnest.coordinator.run.surroundings import Surroundings
from ravnest.coordinator.swarm.members import Held
from ravnest.errors import PlanError
from ravnest.net.v1.control_pb2 import Ready
from ravnest.planner.plan import Plan
from ravnest.planner.search.fixed_layout import ClusterLayout, filled

_MAX_ROUNDS_SINCE: Final = 1000
"""Rounds that may have begun after how the run stood was last noted, some seconds before its coordinator ended."""


@dataclass(frozen=True, slots=True)
class Takeover:
    """A formation whose stages are those of before."""

    formation: Deployment
    stages: int
    """How many go on."""
    applied: int
    """Microbatches that these have applied since the place that was noted."""
    lost: Mapping[int, Mapping[int, str]]
    """By cluster and stage, who held those that nobody holds any more."""


async def wait_for_those_of_before(around: Surroundings, standing: DeploymentRecord) -> None:
    """Returns when everybody who held a stage is there, or has not come for a while."""
    there = around.swarm.members
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(around.course.timeouts.return_seconds):
            back = there.changes.until(lambda: set(standing.nodes) <= {member.node_id for member in there.in_order()})
            await around.course.while_well(back)


async def take_over(
    around: Surroundings,
    standing: DeploymentRecord,
    plan: Callable[[Sequence[ClusterLayout]], Awaitable[Plan]],
    make: Callable[[Plan], Deployment],
) -> Takeover | str:
    """Goes on with every cluster all of whose stages are held by those who are there; why not, where there is none.

    `plan` plans clusters that lie so, and `make` makes the formation of a plan, which is listened to from then on.
    """
    swarm = around.swarm
    held: dict[str, Held | None] = {member.node_id: member.held for member in swarm.members.in_order()}
    lost = [stood.lost(standing.deployment, held) for stood in standing.clusters]
    layouts = filled(standing.layouts, held)
    if all(lost) or layouts is None:
        [(stage, name), *_] = [each for of_cluster in lost for each in of_cluster.items()]
        return f"{name} does not hold stage {stage} any more, and there are no others"
    swarm.generation = standing.later_generation
    formation = None
    try:
        formation = make(await plan(layouts))
        if formation.digest != standing.digest:
            raise DeploymentAbortedError("the job is another one than it was")
        of_layout = {layout.providers: stages for layout, stages in zip(layouts, lost, strict=True)}
        missing = {cluster.id: of_layout[tuple(cluster.nodes)] for cluster in formation.clusters.all}
        whole = [cluster for cluster in formation.clusters.all if not missing[cluster.id]]
        applied = await _go_on(formation, standing, whole)
    except (PlanError, DeploymentAbortedError) as error:
        if formation is not None:
            formation.close()
        return str(error)
    return Takeover(formation, len(standing.nodes) - sum(map(len, lost)), applied, missing)


async def _go_on(formation: Deployment, standing: DeploymentRecord, clusters: Sequence[ClusterRun]) -> int:
    """Brings all stages of these clusters into a new generation; how many microbatches they have applied since the
    place that was noted. DeploymentAbortedError where that cannot be."""
    formed = await asyncio.gather(
        *(formation.form_again(cluster, {}, None, {}) for cluster in clusters), return_exceptions=True
    )
    for each in formed:
        if isinstance(each, BaseException):
            raise each
    ready = {node: formation.ready[node] for cluster in clusters for node in cluster.nodes}
    try:
        applied = [[ready[node].applied for node in cluster.nodes] for cluster in clusters]
        claims = claims_of(applied, standing.place.microbatches)
    except ValueError as error:
        raise DeploymentAbortedError(str(error)) from None
    formation.feeding.claims = {number: (clusters[claim.cluster], claim.whole) for number, claim in claims.items()}
    for cluster in formation.clusters.all:
        # What it was fed before that place is not here: until there is a replica, its stages are all there is.
        cluster.dropped = 1
    _go_on_averaging(formation, standing, ready)
    return len(claims)


def _go_on_averaging(formation: Deployment, standing: DeploymentRecord, ready: Mapping[str, Ready]) -> None:
    if formation.averaging is None:
        return
    stands = {node: each.rings for node, each in ready.items()}
    for stand in (stand for each in stands.values() for stand in each):
        if not stand.committed <= stand.round <= standing.rounds + _MAX_ROUNDS_SINCE:
            raise DeploymentAbortedError(f"an owner says that it has heard of round {stand.round}, which cannot be")
    unaveraged: dict[str, int] = {}
    for cluster in formation.clusters.all:
        # Whoever of them is still there tells which one it was.
        known = (s.unaveraged for s in standing.clusters if not {*s.layout.providers}.isdisjoint(cluster.nodes))
        unaveraged |= dict.fromkeys(cluster.nodes, max(known, default=0))
    formation.averaging.rounds.take_over(stands, unaveraged)

"""Orders: the messages with which the coordinator gives providers their stages and the links between them."""

import asyncio
import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from ravnest.averaging.outer.nesterov import momentum_for
from ravnest.averaging.settings import RingSettings
from ravnest.coordinator.plan.lr_scaling import rate_factor, scaled_optimizer, scaled_schedule
from ravnest.coordinator.plan.prepared_job import (
    PreparedJob,
    constants_artifact,
    graph_artifact,
    sources_artifact,
    stage_settings,
    weights_artifact,
)
from ravnest.coordinator.swarm.artifacts import Artifact
from ravnest.coordinator.swarm.members import Member
from ravnest.coordinator.swarm.reachability import Reach, choose_dialling
from ravnest.engine.settings import StageSettings
from ravnest.job import Job
from ravnest.net.address import join_address, split_address
from ravnest.net.v1.control_pb2 import ArtifactRef, Deploy, Hold, Neighbour, Ring
from ravnest.planner.plan import ClusterPlan, Plan, RingPlan, StagePlan
from ravnest.planner.rings.ring_codecs import AUTO


@dataclass(frozen=True, slots=True)
class LinkOrder:
    """A link between two providers."""

    before: str
    """One end: on a link between stages, the provider of the earlier one."""
    after: str
    """The other end."""
    to_before: Neighbour
    """Tells the provider `after` how to reach `before`."""
    to_after: Neighbour
    """Tells the provider `before` how to reach `after`."""
    reason: str
    """Why one end dials the other, or why the relay forwards the link."""

    @property
    def name(self) -> str:
        return self.to_after.link


@dataclass(frozen=True, slots=True)
class StageFiles:
    """The artifacts that an order for one stage names."""

    graph: Artifact
    weights: Artifact
    sources: Artifact | None = None
    """How the provider gets tensors of the weights without the coordinator; None if it cannot."""

    @property
    def all(self) -> tuple[Artifact, ...]:
        return (self.graph, self.weights, *([] if self.sources is None else [self.sources]))

    def name_in(self, order: Deploy | Hold) -> None:
        """Names the artifacts in an order."""
        order.graph.CopyFrom(reference(self.graph))
        order.weights.CopyFrom(reference(self.weights))
        if self.sources is not None and isinstance(order, Deploy):
            order.sources.CopyFrom(reference(self.sources))


@dataclass(frozen=True, slots=True)
class Orders:
    """The orders for all stages of a plan."""

    by_node: dict[str, Deploy]
    """The order for each provider that gets a stage."""
    artifacts: dict[str, Artifact]
    """By id, the artifacts that the orders tell providers to fetch."""
    links: tuple[LinkOrder, ...]
    """Links between neighbouring stages."""
    ring_links: tuple[LinkOrder, ...] = ()
    """Links between any two owners of a ring, so that a round can leave out an owner and the others close the ring."""

    @classmethod
    async def make(
        cls,
        prepared: PreparedJob,
        plan: Plan,
        members: Mapping[str, Member],
        reaches: Mapping[str, Reach],
        deployment: str,
        generation: int,
        *,
        donated: bool = False,
    ) -> Self:
        """Orders for all stages of a plan. Hashes the weights of each stage in a thread, which takes a while.

        With `donated`, providers get the state of their stages from other providers, and the orders name only the
        constants, which the coordinator serves. RunError when a checkpoint does not fit the model.
        """

        def artifacts_of(stage: StagePlan) -> StageFiles:
            if donated:
                return StageFiles(graph_artifact(stage), constants_artifact(stage, prepared))
            weights = weights_artifact(stage, prepared, bool(plan.rings))
            return StageFiles(graph_artifact(stage), weights, sources_artifact(stage, prepared))

        made = await asyncio.to_thread(lambda: {s.node: artifacts_of(s) for s in plan.stages})
        links: dict[tuple[str, str], LinkOrder] = {}
        for cluster in plan.clusters:
            links |= stage_links(cluster, members, reaches, f"{deployment}-{generation}")
        ring_links = order_ring_links(plan, members, reaches, deployment)
        orders = {}
        for cluster in plan.clusters:
            for stage in cluster.stages:
                order = stage_order(
                    prepared, plan, cluster, stage, links, ring_links, deployment, generation, generation
                )
                made[stage.node].name_in(order)
                orders[stage.node] = order
        artifacts = {artifact.id: artifact for files in made.values() for artifact in files.all}
        return cls(orders, artifacts, tuple(links.values()), ring_links)


def stage_order(
    prepared: PreparedJob,
    plan: Plan,
    cluster: ClusterPlan,
    stage: StagePlan,
    links: Mapping[tuple[str, str], LinkOrder],
    ring_links: Iterable[LinkOrder],
    deployment: str,
    generation: int,
    ring_generation: int,
) -> Deploy:
    """The order for one stage of a cluster, without the artifacts that it begins with."""
    before, after = cluster.neighbours(stage.stage)
    return Deploy(
        deployment=deployment,
        stage=stage.stage,
        stages=len(cluster.stages),
        settings_json=_settings(prepared.job, stage, cluster, plan).to_json(),
        generation=generation,
        ring_generation=ring_generation,
        previous=links[before, stage.node].to_before if before else None,
        next=links[stage.node, after].to_after if after else None,
        rings=[ring_order(ring) for ring in plan.rings if stage.node in ring.owners],
        ring_peers=ring_neighbours(stage.node, ring_links),
        averaging_json=ring_settings(prepared.job, len(plan.clusters)).to_json() if plan.rings else "",
        key=stage_key(deployment, stage),
    )


def stage_key(deployment: str, stage: StagePlan) -> str:
    """The key of a stage's replicas. It stays the same when another provider gets the stage."""
    return f"{deployment}-{stage.cluster}-{stage.stage}"


def _settings(job: Job, stage: StagePlan, cluster: ClusterPlan, plan: Plan) -> StageSettings:
    settings = stage_settings(
        job,
        stage.stage,
        len(cluster.stages),
        cluster.in_flight,
        max_in_flight=plan.bound_in_flight,
        versions=plan.versions,
        split_backward=stage.split_backward,
        clusters=len(plan.clusters),
    )
    factor = rate_factor(job, len(plan.clusters)).factor
    schedule = scaled_schedule(job.schedule_spec, factor)
    return replace(
        settings,
        optimizer=scaled_optimizer(job.optimizer_spec, factor).to_json(),
        schedule=None if schedule is None else schedule.to_json(),
        # Microbatches are numbered across all clusters, and every cluster should trace the requested number.
        trace=settings.trace * len(plan.clusters),
    )


def ring_order(ring: RingPlan) -> Ring:
    """The description of a ring that all its owners get."""
    tensors = ring.tensors
    return Ring(
        ring=ring.ring,
        fragment=ring.fragment,
        parameters=[spec.key for spec in tensors.parameters],
        buffers=[spec.key for spec in tensors.buffers],
        counters=[spec.key for spec in tensors.counters],
    )


def ring_settings(job: Job, clusters: int) -> RingSettings:
    """The settings of averaging that all owners get, for this number of clusters."""
    averaging = job.averaging
    momentum = averaging.outer_momentum
    if averaging.outer == "nesterov" and momentum is None:
        momentum = momentum_for(clusters)
    return RingSettings(
        outer=averaging.outer,
        outer_rate=averaging.outer_rate,
        outer_momentum=momentum,
        # Each attempt names the codec of its ring.
        codec="float32" if averaging.codec == AUTO else averaging.codec,
        optimizer_state=averaging.optimizer_state,
    )


def stage_links(
    cluster: ClusterPlan, members: Mapping[str, Member], reaches: Mapping[str, Reach], prefix: str
) -> dict[tuple[str, str], LinkOrder]:
    """The links between neighbouring stages of a cluster, by the providers of the two stages. A leaf that looks rows up
    for the root has a link to it, as to a stage after it."""
    pairs = [*itertools.pairwise(cluster.stages)]
    if cluster.looks_up:
        pairs.append((cluster.stages[-1], cluster.stages[0]))
    return {
        (before.node, after.node): order_link(
            f"{prefix}-{cluster.id}-{before.stage}", members[before.node], members[after.node], reaches, after.codec
        )
        for before, after in pairs
    }


def order_ring_links(
    plan: Plan, members: Mapping[str, Member], reaches: Mapping[str, Reach], deployment: str
) -> tuple[LinkOrder, ...]:
    """The links between the owners of each ring. A link is named after its ends, so that it stays open as long as both
    own a part of the ring. Owners that are gone get no link."""
    pairs = dict.fromkeys(pair for ring in plan.rings for pair in itertools.combinations(sorted(ring.owners), 2))
    return tuple(
        order_link(f"{deployment}-ring-{_short_hash(one, other)}", members[one], members[other], reaches)
        for one, other in pairs
        if one in members and other in members
    )


def ring_neighbours(node_id: str, links: Iterable[LinkOrder]) -> list[Neighbour]:
    """The neighbours of this node on these links."""
    return [
        link.to_after if link.before == node_id else link.to_before
        for link in links
        if node_id in (link.before, link.after)
    ]


def order_link(name: str, before: Member, after: Member, reaches: Mapping[str, Reach], codec: str = "") -> LinkOrder:
    """The link between the stages of two providers. The end that can reach the other one dials; the coordinator's relay
    forwards the link if neither can. Both ends get the codec."""
    reach_before, reach_after = reaches[before.node_id], reaches[after.node_id]
    earlier, later, reason = choose_dialling(reach_before, reach_after)

    def neighbour(member: Member, reach: Reach, dialling: int) -> Neighbour:
        address = reach.address or member.address
        direct = ""
        if reach.address and member.direct_port:
            direct = join_address(split_address(reach.address)[0], member.direct_port)
        return Neighbour(
            node=member.node_id,
            address=address,
            link=name,
            dialling=dialling,  # type: ignore[arg-type]
            direct_address=direct,
            codec=codec,
        )

    return LinkOrder(
        before.node_id,
        after.node_id,
        to_before=neighbour(before, reach_before, later),
        to_after=neighbour(after, reach_after, earlier),
        reason=reason,
    )


def _short_hash(*nodes: str) -> str:
    return hashlib.sha256("\0".join(nodes).encode()).hexdigest()[:12]


def reference(artifact: Artifact) -> ArtifactRef:
    """The reference with which an order names an artifact."""
    return ArtifactRef(id=artifact.id, sha256=artifact.sha256, size_bytes=artifact.size_bytes)

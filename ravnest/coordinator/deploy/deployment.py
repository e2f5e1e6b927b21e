"""A formation: one deployment of a plan, from the orders to its stages until another takes its place.

A cluster of it may be formed anew while the others go on: somebody takes the stage of one that is lost, those who are
left keep theirs, and what not all of them have applied is fed again.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final

from ravnest.averaging.deadlines import Deadlines
from ravnest.coordinator.averaging.rounds import Rounds
from ravnest.coordinator.averaging.schedule import AveragingSchedule
from ravnest.coordinator.checkpoints.saver import Saver
from ravnest.coordinator.checkpoints.store import CheckpointStore
from ravnest.coordinator.deploy.deployment_record import ClusterRecord, DeploymentRecord, digest_of
from ravnest.coordinator.feed.cluster_state import ClusterRun, Clusters, FedMicrobatch
from ravnest.coordinator.plan.lr_schedule import rate_course_of
from ravnest.coordinator.plan.prepared_job import PreparedJob, constants_artifact, graph_artifact, weights_artifact
from ravnest.coordinator.replicas.holders import ReplicaHolders
from ravnest.coordinator.replicas.sources import DeploymentAbortedError, ReplicaSources, StateTransfers
from ravnest.coordinator.replicas.tracker import Replica, ReplicaTracker
from ravnest.coordinator.run.checkpointer import Checkpointer, saver_of
from ravnest.coordinator.run.dispatcher import Dispatcher
from ravnest.coordinator.run.in_flight import InFlightLimits
from ravnest.coordinator.run.orders import (
    LinkOrder,
    Orders,
    order_link,
    order_ring_links,
    reference,
    ring_neighbours,
    ring_settings,
    stage_key,
    stage_links,
    stage_order,
)
from ravnest.coordinator.run.surroundings import Surroundings
from ravnest.coordinator.swarm.members import Member
from ravnest.net.v1.control_pb2 import (
    CoordinatorMessage,
    Deploy,
    Flight,
    Give,
    Hold,
    Ready,
    RingPeers,
    Start,
    Threads,
)
from ravnest.planner.plan import ClusterPlan, Plan, StagePlan
from ravnest.planner.problem import Provider
from ravnest.planner.proposal import Proposal
from ravnest.planner.search.fixed_layout import ClusterLayout

_MAX_READY_SECONDS: Final = 3600.0
_MIN_RATE: Final = 1e5
"""Bytes a second at which a part of a replica comes from another provider; of that nothing is heard meanwhile."""


@dataclass(frozen=True, slots=True)
class BorrowedState:
    """What stages of a cluster begin with of which nobody has a replica."""

    stages: frozenset[int]
    source: str
    """Where it is from: `rings`, the owners in other clusters, or `checkpoint`."""
    samples_lost: int
    """Of what the cluster has been fed, so many are neither in it nor can they be fed again."""
    words: str
    donors: ReplicaSources | None = None
    """Who gives it."""
    prepared: PreparedJob | None = None
    """The job with that state, where nobody does."""


@dataclass(frozen=True, slots=True)
class ClusterReform:
    """How a cluster was formed anew."""

    replayed: int
    fetch_seconds: float
    """Until every stage was there."""


class Deployment:
    """All methods belong to the network's loop."""

    def __init__(
        self,
        around: Surroundings,
        prepared: PreparedJob,
        plan: Plan,
        store: CheckpointStore,
        before: "Deployment | None" = None,
        donors: ReplicaSources | None = None,
        standing: DeploymentRecord | None = None,
    ) -> None:
        """Nothing is deployed yet. It takes the place of the one `before`: whoever waits there waits here. Its stages
        begin with what the `donors` have, else with what was prepared; where one is `standing`, it has its stages."""
        deployment = secrets.token_hex(4) if standing is None else standing.deployment
        self.id = deployment
        self.prepared = prepared
        self.plan = plan
        self.clusters = Clusters(plan.clusters)
        self.ready: dict[str, Ready] = {}
        self.over = False
        """Whether another has taken its place."""
        self.transfers = StateTransfers(around.swarm, deployment, donors)
        self._heard_at: dict[str, float] = {}
        """When each was given its stage, or last got some more of it."""
        self._around = around
        course, swarm, job = around.course, around.swarm, prepared.job
        self._links: dict[str, tuple[LinkOrder, ...]] = {}
        """By what they are for."""
        self._asked: dict[str, str] = {}
        """By who took a stage last, who was to have its part: another, or itself."""
        swarm.generation += 1
        self._ring_generation = swarm.generation if standing is None else standing.ring_generation
        self._rings_name = deployment if standing is None else f"{deployment}-{swarm.generation}"
        """What the names of links between owners begin with. They lead by way of the coordinator, where nothing else
        does: of one that is gone, they are of no use."""
        for cluster in self.clusters.all:
            cluster.generation = swarm.generation
        name_constants = partial(self._name_artifacts, constants=True)
        self.holders = ReplicaHolders(around, deployment, self.clusters, self.transfers, self._allow, name_constants)
        fixed, rates, ledger = job.pipeline.in_flight is not None, rate_course_of(job), around.ledger
        allowed = None if rates is None else lambda stages: rates.allowed(stages, ledger.updates)
        self.flights = InFlightLimits(course, deployment, self.clusters.all, fixed, allowed)

        def make_saver(cluster: ClusterPlan) -> Saver:
            return saver_of(store, prepared, cluster, around.ledger.updates)

        if before is None:
            self.feeding = Dispatcher(course, swarm, self.clusters, around.ledger, around.recorder, around.progress)
            self.feeding.inputs = prepared.captured.graph.inputs
            self.checkpointing = Checkpointer(
                course, swarm, make_saver, self.clusters.all[0], deployment, around.ledger, around.say
            )
            course.make_room = self.checkpointing.make_room
        else:
            before.close()
            self.feeding, self.checkpointing = before.feeding, before.checkpointing
            self.feeding.clusters = self.clusters
            self.checkpointing.formed(self.clusters.all[0], deployment, make_saver)
        self.feeding.replica = self.replicas.announce_with
        self.averaging: AveragingSchedule | None = None
        """Where there are several clusters."""
        if plan.rings:
            self.averaging = AveragingSchedule(
                course,
                self.feeding,
                self.checkpointing,
                self._rounds(),
                around.ledger,
                plan.average_every,
                job.averaging.blocking,
                around.say,
            )

    @property
    def replicas(self) -> ReplicaTracker:
        return self.holders.replicas

    @property
    def donors(self) -> ReplicaSources | None:
        """Who has what its stages began with, until there is a replica of each cluster."""
        return self.transfers.sources

    @property
    def stage_of(self) -> dict[str, int]:
        """Of every provider that holds one in a cluster that trains, its number there."""
        return {stage.node: stage.stage for cluster in self.clusters.whole for stage in cluster.plan.stages}

    @property
    def planned(self) -> Proposal:
        """The plan of those clusters that train: whoever is left of the others is free."""
        return self.plan.proposal_of([cluster.id for cluster in self.clusters.whole])

    @property
    def is_settled(self) -> bool:
        """Whether all stages have applied all that was fed."""
        return self.clusters.is_drained(self._around.ledger)

    def heard_fetching(self, node_id: str) -> None:
        """A provider has got some more of its stage."""
        self._heard_at[node_id] = time.monotonic()

    def heard_ready(self, node_id: str, ready: Ready) -> None:
        self.ready[node_id] = ready
        self._around.course.notify()

    async def deploy(self, members: Sequence[Member]) -> None:
        """Returns when every stage is built and linked. DeploymentAbortedError when somebody of them is gone."""
        course, swarm = self._around.course, self._around.swarm
        by_id = {member.node_id: member for member in members}
        sources = self.transfers.plan(self.transfers.sources, self.plan.stages)
        givers = {source.sender for each in sources.values() for source in each if source.sender}
        there = {**{node: swarm.members[node] for node in givers}, **by_id}
        reaches = await course.while_well(swarm.reaches(list(there.values())))
        generation = self.clusters.all[0].generation
        orders = await Orders.make(self.prepared, self.plan, by_id, reaches, self.id, generation, donated=bool(sources))
        swarm.artifacts = orders.artifacts
        for cluster in self.clusters.all:
            self._allow(f"cluster {cluster.id}", [link for link in orders.links if link.before in cluster.nodes])
        self._allow("rings", orders.ring_links)
        gives, links = self.transfers.order(orders.by_node, sources, self.plan.stages, there, reaches, generation)
        self._allow("donors", links)
        for node_id, order in orders.by_node.items():
            await self._give_stage(by_id[node_id], order)
        for node_id, give in gives:
            await course.tell(node_id, CoordinatorMessage(give=give))
        await self._until_ready(self.clusters.all)
        swarm.artifacts = {}
        # Only now: a stage dials its neighbours, which must be there by then.
        for node_id in orders.by_node:
            await course.tell(node_id, CoordinatorMessage(start=Start(deployment=self.id)))
        self.flights.began()
        several = f" in {len(self.plan.clusters)} clusters" if len(self.plan.clusters) > 1 else ""
        course.emit("deployed", f"{len(self.plan.stages)} stages{several} are ready")

    async def form_again(
        self,
        cluster: ClusterRun,
        takers: Mapping[int, str],
        replica: Replica | None,
        known: Mapping[str, Provider],
        borrowed: BorrowedState | None = None,
    ) -> ClusterReform:
        """Forms a cluster anew, where these take stages of it, by number; the others keep theirs. Those who take one
        begin with what is `borrowed` for it, with the replica, or without one with what the deployment began with; they
        are among the `known` machines. Feeds again what not all stages have applied. DeploymentAbortedError when a
        provider of it is gone."""
        around, course, swarm = self._around, self._around.course, self._around.swarm
        began = time.monotonic()
        self._replace(cluster, takers, known)
        lent = borrowed.stages if borrowed is not None else frozenset()
        kept = {stage: taker for stage, taker in takers.items() if stage not in lent}
        givers = self.transfers.senders(replica, kept, cluster)
        self._asked |= {taker: givers.get(stage, taker) for stage, taker in takers.items()}
        stages = cluster.plan.stages
        sources = {}
        if replica is None:
            sources = self.transfers.plan(self.transfers.sources, [stages[stage] for stage in kept])
        if borrowed is not None:
            sources |= self.transfers.plan(borrowed.donors, [stages[stage] for stage in takers if stage in lent])
        others = {*givers.values(), *(source.sender for each in sources.values() for source in each if source.sender)}
        nodes = {node for node in (*self.stage_of, *others) if node in swarm.members}
        members = {node: swarm.members[node] for node in nodes}
        if missing := [node for node in (*cluster.nodes, *others) if node not in members]:
            raise DeploymentAbortedError(f"{missing[0]} is gone")
        reaches = await course.while_well(swarm.reaches(list(members.values())))
        prefix = f"{self.id}-{cluster.generation}"
        links = stage_links(cluster.plan, members, reaches, prefix)
        ring_links = order_ring_links(self.plan, members, reaches, self._rings_name)
        orders = {
            stage.node: self._order_again(cluster, stage, links, ring_links, takers, replica, borrowed)
            for stage in stages
        }
        parts = {
            stage: order_link(f"{prefix}-part-{stage}", members[giver], members[takers[stage]], reaches)
            for stage, giver in givers.items()
        }
        gives: list[tuple[str, Give]] = []
        for number, link in parts.items():
            order = orders[takers[number]]
            order.giver.CopyFrom(link.to_before)
            gives.append(
                (givers[number], Give(key=order.part_key, replica=order.part_replica, to=link.to_after)),
            )
        given, gift_links = self.transfers.order(orders, sources, stages, members, reaches, cluster.generation)
        self._allow(f"cluster {cluster.id}", [*links.values(), *parts.values(), *gift_links])
        self._allow("rings", ring_links)
        for node_id, order in orders.items():
            self._check_whole([cluster])
            self.ready.pop(node_id, None)
            await self._give_stage(members[node_id], order)
        for node_id, give in [*gives, *given]:
            await course.tell(node_id, CoordinatorMessage(give=give))
        await self._tell_ring_peers(ring_links, cluster)
        await self._until_ready([cluster])
        fetched = time.monotonic() - began
        for node_id in cluster.nodes:
            await course.tell(node_id, CoordinatorMessage(start=Start(deployment=self.id)))
        flight = Flight(deployment=self.id, in_flight=cluster.in_flight)
        await course.tell(cluster.nodes[0], CoordinatorMessage(flight=flight))
        self.flights.formed(cluster)
        left = self._left(cluster, lent)
        around.ledger.replayed += len(left)
        if self.checkpointing.is_of(cluster):
            # What was being saved came from stages that were given up.
            self.checkpointing.move_to(cluster)
        await self.feed_again(cluster, left)
        return ClusterReform(len(left), fetched)

    def note(self) -> None:
        """Writes down how it stands, for a coordinator that is started again."""
        state = self._around.swarm.state
        if state is None or self.over:
            return
        for cluster in self.clusters.whole:
            if not cluster.is_forming and not cluster.again:
                cluster.taking.clear()
        standing = self.standing()
        with self._around.course.failing():
            if standing is None:
                state.changes()
            else:
                state.stands(standing.to_json())

    def standing(self) -> DeploymentRecord | None:
        """How it stands; None while there is no cluster of which every stage is held."""
        clusters, rounds = self.clusters.whole, None if self.averaging is None else self.averaging.rounds
        if all(cluster.is_forming or cluster.again for cluster in clusters):
            return None
        return DeploymentRecord(
            deployment=self.id,
            generation=self._around.swarm.generation,
            ring_generation=self._ring_generation,
            clusters=tuple(
                ClusterRecord(
                    ClusterLayout(tuple(c.nodes), c.plan.places, c.in_flight),
                    0 if rounds is None else max(0, c.fed_samples - rounds.counted_samples(c.nodes)),
                    tuple(sorted(c.taking)),
                )
                for c in clusters
            ),
            rounds=0 if rounds is None else rounds.begun,
            place=self._around.ledger.last_applied,
            digest=self.digest,
        )

    @cached_property
    def digest(self) -> str:
        """Of the model and of all that its stages and owners are told of how to train it."""
        rings = self.plan.rings
        job, clusters = self.prepared.job, len(self.plan.clusters)
        return digest_of(self.prepared, rings, ring_settings(job, clusters) if rings else None)

    async def feed_again(self, cluster: ClusterRun, left: Sequence[FedMicrobatch]) -> None:
        """Feeds these, and what it has to evaluate, to a cluster that has just been formed; DeploymentAbortedError when
        somebody of it is gone before all is fed."""
        if not await self.feeding.again(cluster, left, lambda: self.over or bool(self._around.lacking(cluster))):
            self._check_whole([cluster])
            raise DeploymentAbortedError("somebody was gone for a moment")

    def lose(self, cluster: ClusterRun, reason: str) -> int:
        """A cluster does not train any more, and owns nothing of the rings: who is left of it may take another stage.
        How many microbatches of it the others are fed again."""
        again = self.feeding.lose(cluster, reason)
        self.note()
        self.plan = self._around.progress.plan = self.plan.without_owners_of(cluster.id)
        if self.averaging is not None:
            self.averaging.rounds.drop_owners(cluster.nodes, reason)
        if self.checkpointing.is_of(cluster):
            self.checkpointing.move_to(self.clusters.whole[0])
        return again

    def release(self, cluster: ClusterRun) -> None:
        """A cluster that has been formed anew is fed like the others from now on."""
        cluster.resume()
        self._around.course.notify()

    def part_missing(self, node_id: str) -> str:
        """Whoever took a stage has not got its part: that who should have had it has not is known from now on. Who that
        is; empty where nobody was asked."""
        named = {
            stage_key(self.id, s): (cluster, s.stage) for cluster in self.clusters.whole for s in cluster.plan.stages
        }
        for key, who in self.transfers.drop_failed(node_id):
            if key in named:
                self.replicas.remove_part(*named[key], who)
        own, asked = self.clusters.of(node_id), self._asked.get(node_id, "")
        if own is None or not asked:
            return ""
        self.replicas.remove_part(own, own.nodes.index(node_id), asked)
        # It may try again, with another's.
        own.returned.add(node_id)
        return asked

    def close(self) -> None:
        """Nothing of it counts any more."""
        self.over = True
        self.checkpointing.abort()
        if self.averaging is not None:
            self.averaging.close()
        for cluster in self.clusters.all:
            cluster.end("another deployment has taken its place")

    def _replace(self, cluster: ClusterRun, takers: Mapping[int, str], known: Mapping[str, Provider]) -> None:
        """From now on these have the stages, and nothing counts that comes of those who had them, or was under way."""
        swarm, before = self._around.swarm, cluster.nodes
        if takers:
            cluster.taking |= takers.keys()
            self.note()
        self.plan = self._around.progress.plan = self.plan.with_takers(cluster.id, takers, known)
        cluster.plan = self.plan.clusters[cluster.id]
        self.clusters.replaced()
        cluster.returned = set()
        if self.averaging is not None:
            # What was in flight is dropped, and word of a round with it: nobody waits for these in the one under way.
            cluster.mark = None
            for node_id in before:
                self.averaging.rounds.gone(node_id, "its cluster is being formed anew")
        swarm.generation += 1
        cluster.generation, cluster.sent, cluster.resumed_at = swarm.generation, set(), None
        self.replicas.cancel_pending(cluster)
        for number, taker in takers.items():
            if self.averaging is not None and before[number] != taker:
                self.averaging.rounds.replace_owner(before[number], taker)

    def _order_again(
        self,
        cluster: ClusterRun,
        stage: StagePlan,
        links: Mapping[tuple[str, str], LinkOrder],
        ring_links: Sequence[LinkOrder],
        takers: Collection[int],
        replica: Replica | None,
        borrowed: BorrowedState | None,
    ) -> Deploy:
        """What a provider of a cluster that is formed anew is told: to keep its stage, or where to take one from."""
        order = stage_order(
            self.prepared,
            self.plan,
            cluster.plan,
            stage,
            links,
            ring_links,
            self.id,
            cluster.generation,
            self._ring_generation,
        )
        if stage.stage not in takers:
            order.keep = True
        elif borrowed is not None and stage.stage in borrowed.stages:
            self._name_artifacts(order, stage, constants=borrowed.donors is not None, prepared=borrowed.prepared)
        elif replica is None:
            self._name_artifacts(order, stage, constants=self.transfers.sources is not None)
        else:
            self._name_artifacts(order, stage, constants=True)
            order.part_key, order.part_replica = stage_key(self.id, stage), replica.number
            order.part_sha256 = replica.sha256(stage.stage)
        return order

    def _name_artifacts(
        self, order: Deploy | Hold, stage: StagePlan, *, constants: bool = False, prepared: PreparedJob | None = None
    ) -> None:
        """Tells what to fetch of a stage beside a part, its `constants`, or else all of it, as it was `prepared`."""
        prepared = prepared or self.prepared
        graph = graph_artifact(stage)
        weights = (
            constants_artifact(stage, prepared)
            if constants
            else weights_artifact(stage, prepared, bool(self.plan.rings))
        )
        order.graph.CopyFrom(reference(graph))
        order.weights.CopyFrom(reference(weights))
        self._around.swarm.artifacts |= {graph.id: graph, weights.id: weights}

    def _left(self, cluster: ClusterRun, lent: Collection[int]) -> list[FedMicrobatch]:
        """What is to be fed again: of what was fed since the last replica, all that some stage has not applied. What
        was averaged is in the state of those stages that were lent theirs."""
        applied = [set(self.ready[node].applied) for node in cluster.nodes]
        if lent and self.averaging is not None:
            averaged = cluster.among_first(self.averaging.rounds.counted_samples(cluster.nodes))
            for stage in lent:
                applied[stage] |= averaged
        left = []
        for microbatch, kept in cluster.retained.items():
            if all(microbatch in stage for stage in applied):
                self.feeding.was_completed(cluster, microbatch)
                continue
            left.append(kept)
        cluster.again = {kept.item.microbatch for kept in left} - cluster.open.keys()
        return left

    async def _give_stage(self, member: Member, order: Deploy) -> None:
        if not member.machine.threads:
            message = CoordinatorMessage(threads=Threads(threads=self._around.threads))
            await self._around.course.tell(member.node_id, message)
        self._heard_at[member.node_id] = time.monotonic()
        await self._around.course.tell(member.node_id, CoordinatorMessage(deploy=order))

    async def _until_ready(self, clusters: Sequence[ClusterRun]) -> None:
        def unready() -> list[str]:
            nodes = [(node, cluster.generation) for cluster in clusters for node in cluster.nodes]
            return [node for node, now in nodes if node not in self.ready or self.ready[node].generation != now]

        def lacks() -> bool:
            return self.over or any(self._around.lacking(cluster) for cluster in clusters)

        patience = max(
            self._around.course.timeouts.stage_ready_seconds,
            min(_MAX_READY_SECONDS, self.replicas.largest_part_bytes / _MIN_RATE),
        )
        while unready() and not lacks():
            due = min(self._heard_at[node] for node in unready()) + patience
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - time.monotonic())):
                    await self._around.course.until(lambda: not unready() or lacks())
            for node in [] if lacks() else unready():
                silent = time.monotonic() - self._heard_at[node]
                if silent >= patience:
                    reason = f"it was given a stage {silent:.0f} s ago, and has not got it nor any more of it since"
                    self._around.overdue(node, reason)
        self._check_whole(clusters)

    def _check_whole(self, clusters: Sequence[ClusterRun]) -> None:
        """DeploymentAbortedError where somebody of these is gone, or they are of no use any more."""
        if self.over:
            raise DeploymentAbortedError("another formation has taken its place")
        if gone := [node for cluster in clusters for node in self._around.lacking(cluster)]:
            raise DeploymentAbortedError(f"{gone[0]} is gone")

    async def _tell_ring_peers(self, links: Sequence[LinkOrder], cluster: ClusterRun) -> None:
        """The other owners hear who averages with them from now on."""
        for other in self.clusters.whole:
            if other is not cluster and not other.is_forming:
                for node_id in other.nodes:
                    peers = RingPeers(deployment=self.id, peers=ring_neighbours(node_id, links))
                    await self._around.course.tell(node_id, CoordinatorMessage(ring_peers=peers))

    def _allow(self, purpose: str, links: Sequence[LinkOrder]) -> None:
        """These links may be relayed from now on; those that there were for this purpose, not any more."""
        known = {link.name for of_purpose in self._links.values() for link in of_purpose}
        self._links[purpose] = tuple(links)
        allowed = [link for of_purpose in self._links.values() for link in of_purpose]
        self._around.swarm.allow_relays({link.name: frozenset((link.before, link.after)) for link in allowed})
        for link in [link for link in links if link.name not in known]:
            self._around.course.emit("linked", f"{link.before} to {link.after}: {link.reason}", link=link.name)

    def _rounds(self) -> Rounds:
        plan, course = self.plan, self._around.course
        # A round reaches a cluster's stages when all that was fed before it has gone through, at the rate of as many as
        # are in flight at first.
        begin = [replace(running.plan.cost, in_flight=running.in_flight) for running in self.clusters.all]
        waits = [
            (running.in_flight + running.ahead) * cluster.period_seconds + cluster.round_trip_seconds
            for running, cluster in zip(self.clusters.all, begin, strict=True)
        ]
        return Rounds(
            plan.rings,
            self.id,
            self.prepared.job.averaging.outlier,
            Deadlines(max(waits), plan.round_seconds, course.timeouts.rounds),
            lambda node_id, message: course.spawn(course.tell(node_id, message)),
            course.emit,
            course.notify,
        )

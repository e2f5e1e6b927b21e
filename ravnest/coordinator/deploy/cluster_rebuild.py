"""Rebuild of one cluster: other providers take some of its stages, and the rest of the run goes on.

The providers that are left keep their stages. All stages get new links in a new generation, and frames of earlier
generations are dropped. A taker starts from a replica, from borrowed state, or from what the deployment
started from. Microbatches that not all stages have applied are fed again.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.feed.cluster_state import ClusterRun, FedMicrobatch
from ravnest.coordinator.plan.prepared_job import PreparedJob
from ravnest.coordinator.replicas.replica import Replica
from ravnest.coordinator.replicas.sources import DeploymentAbortedError, PartTransfer, ReplicaSources
from ravnest.coordinator.run.job_run import JobRun
from ravnest.coordinator.run.orders import (
    LinkOrder,
    order_link,
    order_ring_links,
    ring_neighbours,
    stage_key,
    stage_links,
    stage_order,
)
from ravnest.coordinator.swarm.members import Member
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Deploy, Flight, Give, RingPeers
from ravnest.planner.plan import StagePlan
from ravnest.planner.problem import Provider


@dataclass(frozen=True, slots=True)
class BorrowedState:
    """State for stages of a cluster of which no provider has a replica."""

    stages: frozenset[int]
    source: str
    """`rings` (the owners in another cluster) or `checkpoint`."""
    samples_lost: int
    """Samples that the cluster was fed, that the state does not include and that cannot be fed again."""
    words: str
    """Origin of the state, as text for the user."""
    sources: ReplicaSources | None = None
    """The providers that send it."""
    prepared: PreparedJob | None = None
    """The job with that state; None if providers send it."""


@dataclass(frozen=True, slots=True)
class RebuiltCluster:
    """Figures of a rebuild."""

    replayed: int
    fetch_seconds: float
    """Time until every stage was ready."""


class ClusterRebuild:
    """One rebuild of one cluster. All methods run on the network's event loop."""

    def __init__(
        self,
        run: JobRun,
        deployment: Deployment,
        cluster: ClusterRun,
        takers: Mapping[int, str],
        replica: Replica | None = None,
        borrowed: BorrowedState | None = None,
    ) -> None:
        """`takers` are the new providers by stage; without any, all stages stay where they are. A taker starts from the
        state `borrowed` for its stage, or from the `replica`. Without both, it starts where the deployment started."""
        self._run = run
        self._deployment = deployment
        self._cluster = cluster
        self._takers = takers
        self._replica = replica
        self._borrowed = borrowed
        self._borrowing = borrowed.stages if borrowed is not None else frozenset()

    async def run(self, known: Mapping[str, Provider]) -> RebuiltCluster:
        """Rebuilds the cluster; the takers are among the `known` machines. DeploymentAbortedError if a provider is
        lost meanwhile."""
        run, deployment, cluster = self._run, self._deployment, self._cluster
        context = run.context
        began = time.monotonic()
        self._replace(known)
        await self._deliver()
        fetch_seconds = time.monotonic() - began
        await deployment.start(cluster.nodes)
        flight = Flight(deployment=deployment.id, in_flight=cluster.in_flight)
        for node_id in cluster.plan.beginners:
            await context.tell(node_id, CoordinatorMessage(flight=flight))
        deployment.in_flight.formed(cluster)
        left = self._left()
        context.ledger.replayed += len(left)
        if run.checkpointer.is_of(cluster):
            # The pending checkpoint came from stages that were given up.
            run.checkpointer.move_to(cluster)
        await deployment.replay(cluster, left)
        return RebuiltCluster(len(left), fetch_seconds)

    def _replace(self, known: Mapping[str, Provider]) -> None:
        """Puts the takers into the plan. From now on, the coordinator ignores messages of the providers that they
        replace, and of earlier generations."""
        deployment, cluster, swarm = self._deployment, self._cluster, self._run.context.swarm
        before, rounds = cluster.nodes, deployment.rounds
        if self._takers:
            cluster.taking |= self._takers.keys()
            deployment.note()
        deployment.plan = self._run.context.progress.plan = deployment.plan.with_takers(cluster.id, self._takers, known)
        cluster.plan = deployment.plan.clusters[cluster.id]
        deployment.clusters.replaced()
        cluster.losses.returned = set()
        if rounds is not None:
            # Dropped messages include those about the current round, so the round does not wait for this cluster.
            cluster.mark = None
            for node_id in before:
                rounds.gone(node_id, "its cluster is being rebuilt")
        swarm.generation += 1
        cluster.generation, cluster.sent, cluster.resumed_at = swarm.generation, set(), None
        deployment.replicas.cancel_pending(cluster)
        for number, taker in self._takers.items():
            if rounds is not None and before[number] != taker:
                rounds.replace_owner(before[number], taker)

    async def _deliver(self) -> None:
        """Sends the orders to all providers of the cluster and waits until every stage is ready."""
        deployment, cluster, context = self._deployment, self._cluster, self._run.context
        senders = self._part_senders()
        transfers = self._transfers()
        deployment.part_senders |= {taker: senders.get(stage, taker) for stage, taker in self._takers.items()}
        others = {*senders.values(), *(part.sender for parts in transfers.values() for part in parts if part.sender)}
        members = self._members(others)
        reaches = await context.while_well(context.swarm.reaches(list(members.values())))
        prefix, stages = f"{deployment.id}-{cluster.generation}", cluster.plan.stages
        links = stage_links(cluster.plan, members, reaches, prefix)
        ring_links = order_ring_links(deployment.plan, members, reaches, deployment.ring_prefix)
        orders = {stage.node: self._stage_order(stage, links, ring_links, senders) for stage in stages}
        part_links, gives = [], []
        for number, sender in senders.items():
            taker = self._takers[number]
            link = order_link(f"{prefix}-part-{number}", members[sender], members[taker], reaches)
            part_links.append(link)
            order = orders[taker]
            order.giver.CopyFrom(link.to_before)
            gives.append((sender, Give(key=order.part_key, replica=order.part_replica, to=link.to_after)))
        sent, transfer_links = deployment.transfers.order(
            orders, transfers, stages, members, reaches, cluster.generation
        )
        deployment.links.allow(f"cluster {cluster.id}", [*links.values(), *part_links, *transfer_links])
        deployment.links.allow("rings", ring_links)
        for node_id, order in orders.items():
            deployment.delivery.check_complete([cluster])
            deployment.delivery.ready.pop(node_id, None)
            await deployment.delivery.give(members[node_id], order)
        for node_id, give in [*gives, *sent]:
            await context.tell(node_id, CoordinatorMessage(give=give))
        await self._update_ring_peers(ring_links)
        await deployment.delivery.until_ready([cluster])

    def _part_senders(self) -> dict[int, str]:
        """By stage that starts from the replica, the provider that sends the part to the taker."""
        takers = {stage: taker for stage, taker in self._takers.items() if stage not in self._borrowing}
        return self._deployment.transfers.senders(self._replica, takers, self._cluster)

    def _transfers(self) -> dict[str, list[PartTransfer]]:
        """By taker, the transfers of its state from other stages: the borrowed state, and the state that the
        deployment started from."""
        transfers, stages = self._deployment.transfers, self._cluster.plan.stages
        found: dict[str, list[PartTransfer]] = {}
        if self._replica is None:
            from_start = [stages[stage] for stage in self._takers if stage not in self._borrowing]
            found |= transfers.plan(transfers.sources, from_start)
        if self._borrowed is not None:
            borrowing = [stages[stage] for stage in self._takers if stage in self._borrowing]
            found |= transfers.plan(self._borrowed.sources, borrowing)
        return found

    def _members(self, others: Collection[str]) -> dict[str, Member]:
        """The members that hold a stage or send a part. DeploymentAbortedError if one that is needed is lost."""
        members = self._run.context.members
        found = {node: members[node] for node in {*self._deployment.stage_of, *others} if node in members}
        if missing := [node for node in (*self._cluster.nodes, *others) if node not in found]:
            raise DeploymentAbortedError(f"{missing[0]} is gone")
        return found

    def _stage_order(
        self,
        stage: StagePlan,
        links: Mapping[tuple[str, str], LinkOrder],
        ring_links: Sequence[LinkOrder],
        senders: Mapping[int, str],
    ) -> Deploy:
        """The order for one provider of the cluster: to keep its stage, or to take one and where from."""
        deployment, cluster, borrowed = self._deployment, self._cluster, self._borrowed
        order = stage_order(
            deployment.prepared,
            deployment.plan,
            cluster.plan,
            stage,
            links,
            ring_links,
            deployment.id,
            cluster.generation,
            deployment.ring_generation,
        )
        artifacts = deployment.artifacts
        if stage.stage not in self._takers:
            order.keep = True
        elif borrowed is not None and stage.stage in self._borrowing:
            if borrowed.sources is not None:
                artifacts.name_constants(order, stage)
            else:
                artifacts.name_weights(order, stage, borrowed.prepared)
        elif self._replica is not None:
            artifacts.name_constants(order, stage)
            order.part_key, order.part_replica = stage_key(deployment.id, stage), self._replica.number
            order.part_sha256 = self._replica.sha256(stage.stage, senders.get(stage.stage, stage.node))
        elif deployment.transfers.sources is not None:
            artifacts.name_constants(order, stage)
        else:
            artifacts.name_weights(order, stage)
        return order

    async def _update_ring_peers(self, links: Sequence[LinkOrder]) -> None:
        """Tells the owners in other clusters which owners they average with from now on."""
        for other in self._deployment.clusters.whole:
            if other is not self._cluster and not other.is_forming:
                for node_id in other.nodes:
                    peers = RingPeers(deployment=self._deployment.id, peers=ring_neighbours(node_id, links))
                    await self._run.context.tell(node_id, CoordinatorMessage(ring_peers=peers))

    def _left(self) -> list[FedMicrobatch]:
        """The microbatches to feed again: those fed since the replica that some stage has not applied. Borrowed state
        includes what was averaged."""
        cluster, rounds = self._cluster, self._deployment.rounds
        applied = [set(self._deployment.delivery.ready[node].applied) for node in cluster.nodes]
        if self._borrowing and rounds is not None:
            averaged = cluster.among_first(rounds.counted_samples(cluster.nodes))
            for stage in self._borrowing:
                applied[stage] |= averaged
        left = []
        for microbatch, kept in cluster.retained.items():
            if all(microbatch in stage for stage in applied):
                self._run.dispatcher.was_completed(cluster, microbatch)
                continue
            left.append(kept)
        for microbatch in cluster.open.keys() - cluster.retained.keys():
            # Every part of the replica has it, and the loss came before the report that it is done.
            self._run.dispatcher.was_completed(cluster, microbatch)
        cluster.again = {kept.item.microbatch for kept in left} - cluster.open.keys()
        return left

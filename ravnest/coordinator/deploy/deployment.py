"""Deployment: one plan on its providers, from the orders to its stages until another deployment replaces it.

The dispatcher, the checkpointer and the ledger belong to the run and outlive it. One cluster of a deployment can be
rebuilt while the others go on, see cluster_rebuild.py.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from ravnest.averaging.deadlines import Deadlines
from ravnest.coordinator.averaging.round_interval import RoundInterval
from ravnest.coordinator.averaging.rounds import Rounds
from ravnest.coordinator.averaging.schedule import AveragingSchedule
from ravnest.coordinator.deploy.deployment_record import ClusterRecord, DeploymentRecord, digest_of
from ravnest.coordinator.deploy.stage_delivery import StageDelivery
from ravnest.coordinator.feed.cluster_state import ClusterRun, Clusters, FedMicrobatch
from ravnest.coordinator.plan.lr_schedule import rate_course_of
from ravnest.coordinator.plan.prepared_job import PreparedJob
from ravnest.coordinator.replicas.collector import ReplicaCollector
from ravnest.coordinator.replicas.holders import ReplicaHolders
from ravnest.coordinator.replicas.outlook import StateOutlook
from ravnest.coordinator.replicas.part_uploads import PartUploads
from ravnest.coordinator.replicas.sources import DeploymentAbortedError, ReplicaSources, StateTransfers
from ravnest.coordinator.replicas.tracker import ReplicaTracker
from ravnest.coordinator.run.allowed_links import AllowedLinks
from ravnest.coordinator.run.in_flight import InFlightLimits
from ravnest.coordinator.run.job_run import JobRun
from ravnest.coordinator.run.orders import Orders, ring_settings, stage_key
from ravnest.coordinator.run.stage_artifacts import StageArtifacts
from ravnest.coordinator.swarm.members import Member
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Start
from ravnest.planner.averaging import RoundBasis
from ravnest.planner.plan import Plan
from ravnest.planner.proposal import Proposal
from ravnest.planner.recovery.state_periods import StatePeriods
from ravnest.planner.rings.round_time import joining_seconds
from ravnest.planner.search.fixed_layout import ClusterLayout

REPLACED = "another deployment has taken its place"
"""Why the clusters of a closed deployment do not train any more."""


class Deployment:
    """All methods run on the network's event loop."""

    def __init__(
        self,
        run: JobRun,
        uploads: PartUploads,
        prepared: PreparedJob,
        plan: Plan,
        sources: ReplicaSources | None = None,
        record: DeploymentRecord | None = None,
    ) -> None:
        """No stage is deployed yet. Stages will start from what the `sources` hold, or else from the `prepared` job.
        With a `record`, this is the recorded deployment, whose stages kept running while the coordinator was away."""
        context, checkpoint = run.context, prepared.job.checkpoint
        context.swarm.generation += 1
        generation = context.swarm.generation
        self.id = secrets.token_hex(4) if record is None else record.deployment
        self.prepared = prepared
        self.plan = plan
        self.clusters = Clusters(plan.clusters)
        for cluster in self.clusters.all:
            cluster.generation = generation
        self.is_over = False
        """Whether another deployment has replaced this one."""
        self.ring_generation = generation if record is None else record.ring_generation
        # Links through the relay of an earlier coordinator cannot be used again, so links get new names.
        self.ring_prefix = self.id if record is None else f"{self.id}-{generation}"
        """First part of the names of the links between owners of rings."""
        self.links = AllowedLinks(context)
        self.artifacts = StageArtifacts(context.swarm, prepared, with_rings=bool(plan.rings))
        self.transfers = StateTransfers(context.swarm, self.id, sources)
        self.holders = ReplicaHolders(
            context,
            self.id,
            self.clusters,
            self.transfers,
            self.links,
            self.artifacts,
            is_exact=checkpoint.exact,
        )
        self.collector = ReplicaCollector(context, self.id, self.holders, uploads, checkpoint)
        line = plan.basis.network.requester.down_bytes_per_second
        self.outlook = StateOutlook(self.replicas, self._tell_periods, checkpoint.every_seconds, line)
        self.holders.on_replicas = self._look_at_state
        self.holders.has_poor_line = self._has_poor_line
        self.delivery = StageDelivery(context, self.replicas, run.machine.threads)
        self.part_senders: dict[str, str] = {}
        """By taker of a stage, the provider that was to send it the stage's part; the taker itself if no other was."""
        is_fixed, rates = prepared.job.pipeline.in_flight is not None, rate_course_of(prepared.job)
        allowed = None if rates is None else lambda stages: rates.allowed(stages, context.ledger.updates)
        self.in_flight = InFlightLimits(context, self.id, self.clusters.all, is_fixed, allowed)
        self.averaging: AveragingSchedule | None = None
        """None with one cluster."""
        if plan.rings and plan.round_basis is not None:
            interval, blocking = RoundInterval(plan.round_basis, context.emit), prepared.job.averaging.blocking
            self.averaging = AveragingSchedule(
                context, run.dispatcher, run.checkpointer, self._rounds(run, plan.round_basis), interval, blocking
            )
        self._run = run

    @property
    def replicas(self) -> ReplicaTracker:
        return self.holders.replicas

    @property
    def rounds(self) -> Rounds | None:
        """The rounds of averaging; None with one cluster."""
        return None if self.averaging is None else self.averaging.rounds

    @property
    def stage_of(self) -> dict[str, int]:
        """By provider with a stage of a cluster that is not lost, the number of the stage."""
        return {stage.node: stage.stage for cluster in self.clusters.whole for stage in cluster.plan.stages}

    @property
    def planned(self) -> Proposal:
        """The plan of the clusters that are not lost."""
        return self.plan.proposal_of([cluster.id for cluster in self.clusters.whole])

    @property
    def is_drained(self) -> bool:
        """Whether all stages have applied all that was fed."""
        return self.clusters.is_drained(self._run.context.ledger)

    def _look_at_state(self) -> None:
        """Holders were assigned, or a replica is complete: tells what that means, and spaces checkpoints by it."""
        if not self._run.context.swarm.open_to_more:
            # No line carries the state of an embedded swarm.
            return
        periods = self.outlook.look(cluster for cluster in self.clusters.whole if not cluster.is_forming)
        if periods is not None and periods.checkpoint_seconds is not None:
            self._run.checkpointer.allow_every(0.0 if periods.meets_wish else periods.checkpoint_seconds)

    def _tell_periods(self, periods: StatePeriods) -> None:
        context, told = self._run.context, "; ".join(periods.sentences())
        context.progress.state = replace(
            context.progress.state,
            told=told,
            at_most_lost_seconds=periods.at_most_lost_seconds,
            replica_seconds=periods.replica_seconds,
            checkpoint_seconds=periods.checkpoint_seconds,
        )
        context.emit(
            "state",
            told,
            at_most_lost_seconds=periods.at_most_lost_seconds,
            replica_seconds=periods.replica_seconds,
            checkpoint_seconds=periods.checkpoint_seconds,
        )

    def _has_poor_line(self, owner: str, holder: str) -> bool:
        """Whether state from one provider to another passes the relay, or fills the line on which it arrives."""
        providers, network = self.plan.basis.providers, self.plan.basis.network
        if owner not in providers or holder not in providers:
            return False
        sender, receiver = providers[owner], providers[holder]
        return network.relayed(sender, receiver) or receiver.down_bytes_per_second < sender.up_bytes_per_second

    def begin(self) -> None:
        """Becomes the deployment that the run feeds and saves."""
        run = self._run
        if self.transfers.sources is None:
            # The providers delete the replicas of the deployment before.
            progress = run.context.progress
            progress.state = replace(progress.state, replica=None)
        run.dispatcher.clusters = self.clusters
        run.dispatcher.announce_replica = self.replicas.announce_with
        run.checkpointer.deployed(self.id, self.clusters.all[0], self.collector)

    async def deploy(self, members: Sequence[Member]) -> None:
        """Returns when every stage is built and linked. DeploymentAbortedError if one of the members is lost."""
        context, swarm = self._run.context, self._run.context.swarm
        by_id = {member.node_id: member for member in members}
        transfers = self.transfers.plan(self.transfers.sources, self.plan.stages)
        senders = {part.sender for parts in transfers.values() for part in parts if part.sender}
        involved = {**{node: swarm.members[node] for node in senders}, **by_id}
        reaches = await context.while_well(swarm.reaches(list(involved.values())))
        generation = self.clusters.all[0].generation
        orders = await Orders.make(
            self.prepared, self.plan, by_id, reaches, self.id, generation, donated=bool(transfers)
        )
        swarm.artifacts = orders.artifacts
        for cluster in self.clusters.all:
            self.links.allow(f"cluster {cluster.id}", [link for link in orders.links if link.before in cluster.nodes])
        self.links.allow("rings", orders.ring_links)
        gives, links = self.transfers.order(orders.by_node, transfers, self.plan.stages, involved, reaches, generation)
        self.links.allow("donors", links)
        for node_id, order in orders.by_node.items():
            await self.delivery.give(by_id[node_id], order)
        for node_id, give in gives:
            await context.tell(node_id, CoordinatorMessage(give=give))
        await self.delivery.until_ready(self.clusters.all)
        swarm.artifacts = {}
        # Only now, because a stage dials its neighbours, which must have their stages by then.
        await self.start(list(orders.by_node))
        self.in_flight.began()
        several = f" in {len(self.plan.clusters)} clusters" if len(self.plan.clusters) > 1 else ""
        context.emit("deployed", f"{len(self.plan.stages)} stages{several} are ready")

    async def start(self, nodes: Sequence[str]) -> None:
        """Tells these providers to link their stages and to begin."""
        for node_id in nodes:
            await self._run.context.tell(node_id, CoordinatorMessage(start=Start(deployment=self.id)))

    async def replay(self, cluster: ClusterRun, left: Sequence[FedMicrobatch]) -> None:
        """Feeds these microbatches again to a cluster that has just been linked, and then its evaluations.
        DeploymentAbortedError if a provider of the cluster is lost before all is fed."""
        context = self._run.context
        if not await self._run.dispatcher.replay(
            cluster, left, lambda: cluster.is_lost or bool(context.missing_from(cluster))
        ):
            self.delivery.check_complete([cluster])
            raise DeploymentAbortedError("a provider was disconnected for a moment")

    def resume(self, cluster: ClusterRun) -> None:
        """Feeds a cluster that is complete again like the others."""
        cluster.resume()
        self._run.context.notify()

    def lose(self, cluster: ClusterRun, reason: str) -> int:
        """Ends the training of a cluster and its part in the rings; its providers may take other stages. Returns the
        number of microbatches that the other clusters are fed again."""
        replayed = self._run.dispatcher.lose(cluster, reason)
        self.note()
        self.plan = self._run.context.progress.plan = self.plan.without_owners_of(cluster.id)
        if self.rounds is not None:
            self.rounds.drop_owners(cluster.nodes, reason)
        if self._run.checkpointer.is_of(cluster):
            self._run.checkpointer.move_to(self.clusters.whole[0])
        return replayed

    def on_part_missing(self, node_id: str) -> str:
        """A provider that took a stage has not received its part: the sender does not count as a source any more.
        Returns the sender; empty if the provider was not to receive a part."""
        by_key = {
            stage_key(self.id, s): (cluster, s.stage) for cluster in self.clusters.whole for s in cluster.plan.stages
        }
        for key, sender in self.transfers.drop_failed(node_id):
            if key in by_key:
                self.replicas.remove_part(*by_key[key], sender)
        cluster, sender = self.clusters.of(node_id), self.part_senders.get(node_id, "")
        if cluster is None or not sender:
            return ""
        self.replicas.remove_part(cluster, cluster.nodes.index(node_id), sender)
        # The provider may take the stage again, with the part of another sender.
        cluster.losses.returned.add(node_id)
        return sender

    def note(self) -> None:
        """Records the deployment, so that a restarted coordinator can resume its stages."""
        state = self._run.context.swarm.state
        if state is None or self.is_over:
            return
        for cluster in self.clusters.whole:
            if not cluster.is_forming and not cluster.again:
                cluster.taking.clear()
        record = self.record()
        with self._run.context.failing():
            if record is None:
                state.changes()
            else:
                state.stands(record.to_json())

    def record(self) -> DeploymentRecord | None:
        """The record of the deployment; None while no cluster is complete."""
        clusters, rounds, ledger = self.clusters.whole, self.rounds, self._run.context.ledger
        if all(cluster.is_forming or cluster.again for cluster in clusters):
            return None
        return DeploymentRecord(
            deployment=self.id,
            generation=self._run.context.swarm.generation,
            ring_generation=self.ring_generation,
            clusters=tuple(
                ClusterRecord(
                    ClusterLayout(tuple(c.nodes), c.plan.places, c.in_flight),
                    0 if rounds is None else max(0, c.fed_samples - rounds.counted_samples(c.nodes)),
                    tuple(sorted(c.taking)),
                )
                for c in clusters
            ),
            rounds=0 if rounds is None else rounds.begun,
            place=ledger.last_applied,
            digest=self.digest,
        )

    @cached_property
    def digest(self) -> str:
        """Digest of the model, and of everything that stages and owners are told about how to train it."""
        rings = self.plan.rings
        settings = ring_settings(self.prepared.job, len(self.plan.clusters)) if rings else None
        return digest_of(self.prepared, rings, settings)

    def close(self) -> None:
        """Ends the deployment: messages about it do not count any more."""
        self.is_over = True
        self._run.checkpointer.abort()
        if self.averaging is not None:
            self.averaging.close()
        for cluster in self.clusters.all:
            cluster.end(REPLACED)

    def _rounds(self, run: JobRun, basis: RoundBasis) -> Rounds:
        plan, context = self.plan, run.context
        # A cluster joins a round when everything that was fed before has passed its stages.
        costs = [replace(cluster.plan.cost, in_flight=cluster.in_flight) for cluster in self.clusters.all]
        waits = [joining_seconds(cost, cluster.ahead) for cluster, cost in zip(self.clusters.all, costs, strict=True)]
        return Rounds(
            plan.rings,
            self.id,
            self.prepared.job.averaging.outlier,
            Deadlines(max(waits), basis.time.catch_up_seconds, basis.time.reducing_seconds, context.timeouts.rounds),
            lambda node_id, message: context.spawn(context.tell(node_id, message)),
            context.emit,
            context.notify,
        )

"""Replica holders: assigns a provider to hold the replicas of each stage, and tells it which parts it may delete."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ravnest.coordinator.feed.cluster_state import ClusterRun, Clusters
from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.replicas.replica import Replica
from ravnest.coordinator.replicas.sources import StateTransfers
from ravnest.coordinator.replicas.surviving import AnnouncedReplica, RecordedPart
from ravnest.coordinator.replicas.tracker import ReplicaTracker
from ravnest.coordinator.run.allowed_links import AllowedLinks
from ravnest.coordinator.run.context import RunContext
from ravnest.coordinator.run.orders import order_link, stage_key
from ravnest.coordinator.run.stage_artifacts import StageArtifacts
from ravnest.coordinator.swarm.members import Member
from ravnest.coordinator.swarm.own_line import receiver_limit
from ravnest.monitor.summary import SavedState
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Forget, Hold, Replicate
from ravnest.planner.plan import StagePlan
from ravnest.planner.recovery.assign_standbys import Warm
from ravnest.planner.recovery.choose_coding import CodingChoice, choose_coding
from ravnest.planner.recovery.choose_holders import choose_holders


class ReplicaHolders:
    """The holders of one deployment's replicas. All methods run on the network's event loop."""

    def __init__(
        self,
        context: RunContext,
        deployment: str,
        clusters: Clusters,
        transfers: StateTransfers,
        links: AllowedLinks,
        artifacts: StageArtifacts,
        *,
        is_exact: bool = False,
    ) -> None:
        """`is_exact`: no replica is rounded on a line."""
        self._is_exact = is_exact
        self._context = context
        self._deployment = deployment
        self._clusters = clusters
        self._transfers = transfers
        self._links = links
        self._artifacts = artifacts
        self._deleted_before: dict[int, int] = {}
        """By cluster, the number of the replica before which holders have been told to delete."""
        self._pinned: dict[int, int] = {}
        """By cluster, the number of the replica that the coordinator is collecting."""
        self._recording = asyncio.Lock()
        self._pairs: dict[str, tuple[str, str]] = {}
        """By stage key, the owner of the stage and the holder of its replicas."""
        self._orders: dict[str, tuple[str, Replicate]] = {}
        """By stage key, the owner of the stage and the newest order to it."""
        self.has_poor_line: Callable[[str, str], bool] = lambda owner, holder: False
        """Whether the line from an owner to a holder is a poor one for parts."""
        self.on_replicas: Callable[[], None] = lambda: None
        """Called when holders were assigned, and when a replica is complete."""
        self.replicas = ReplicaTracker(
            context.emit,
            self._on_complete,
            context.members.line_rate,
            self._on_announced,
            shared=not context.swarm.open_to_more,
            event_seconds=context.timeouts.replica_event_seconds,
            is_exact=is_exact,
        )

    async def assign(self, warm: Mapping[str, Warm], others: Sequence[str]) -> None:
        """Gives every stage a holder: preferably the warm standby for it, then a neighbour, then one of the others."""
        for cluster in self._clusters.whole:
            if cluster.is_forming:
                continue
            standbys: dict[int, list[str]] = {}
            for standby in warm.values():
                if standby.cluster == cluster.id and standby.stage is not None:
                    standbys.setdefault(standby.stage, []).append(standby.standby)
            holders = choose_holders(cluster.nodes, standbys, others, self.has_poor_line)
            if not holders:
                # The cluster's provider is the only one: no other provider could continue from a replica.
                continue
            keys = tuple(stage_key(self._deployment, stage) for stage in cluster.plan.stages)
            wanted = {
                key: (stage.node, holders.get(stage.stage, ""))
                for key, stage in zip(keys, cluster.plan.stages, strict=True)
            }
            changed = [
                stage
                for key, stage in zip(keys, cluster.plan.stages, strict=True)
                if self._pairs.get(key) != wanted[key]
            ]
            if changed or self._pairs.keys().isdisjoint(keys):
                self.replicas.set_holders(cluster, keys, holders)
            self._pairs |= wanted
            for stage in changed:
                await self._order_replicas(stage, holders.get(stage.stage))
        self.on_replicas()

    async def wait_for_fresh(self, cluster: ClusterRun) -> bool:
        """Requests a replica of a cluster that is being fed and waits for it; whether it was complete in time."""
        before = self.replicas.newest(cluster)
        self.replicas.request(cluster)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._context.timeouts.fresh_replica_seconds):
                await self._context.until(
                    lambda: self.replicas.newest(cluster) is not before or cluster.is_forming or cluster.is_lost
                )
        return self.replicas.newest(cluster) is not before

    def pin(self, cluster: ClusterRun, number: int) -> None:
        """Keeps the parts of this complete replica on the providers' disks until `unpin`. It must be the newest one:
        its parts are still there."""
        self._pinned[cluster.id] = number

    def unpin(self, cluster: ClusterRun) -> None:
        """The parts that were pinned may be deleted."""
        number, newest = self._pinned.pop(cluster.id, None), self.replicas.newest(cluster)
        if newest is not None and number not in (None, newest.number):
            self._context.spawn(self._delete_before(cluster, newest))

    def remove(self, node_id: str) -> None:
        """This provider is gone: it owns no stage and holds no replica."""
        self.replicas.remove_provider(node_id)
        for key, pair in list(self._pairs.items()):
            if node_id in pair:
                del self._pairs[key]
                self._orders.pop(key, None)

    async def delete_outdated(self, nodes: Sequence[str]) -> None:
        """Tells these providers to delete the parts that belong to earlier deployments."""
        keys = [stage_key(self._deployment, s) for cluster in self._clusters.all for s in cluster.plan.stages]
        keys += self._transfers.sources.keys if self._transfers.sources is not None else ()
        for node_id in nodes:
            await self._context.tell(node_id, CoordinatorMessage(forget=Forget(keep=keys)))

    async def _order_replicas(self, stage: StagePlan, holder: str | None) -> None:
        context, key = self._context, stage_key(self._deployment, stage)
        order = Replicate(deployment=self._deployment, key=key)
        swarm, members = context.swarm, context.members
        if holder is not None and holder in members and stage.node in members:
            ends = [members[stage.node], members[holder]]
            reaches = await swarm.reaches(ends)
            generation = self._clusters.all[stage.cluster].generation
            name = f"{self._deployment}-{generation}-replica-{stage.cluster}-{stage.stage}-{swarm.next_number()}"
            link = order_link(name, ends[0], ends[1], reaches)
            self._links.allow(f"replica {key}", [link])
            hold = Hold(key=key, owner=link.to_before)
            # The constants never change, so no replica contains them.
            self._artifacts.name_constants(hold, stage)
            await context.tell(holder, CoordinatorMessage(hold=hold))
            order.holder.CopyFrom(link.to_after)
            owners = sum(held_by == holder for _, held_by in self._pairs.values())
            order.max_bytes_per_second = receiver_limit(members.down_rate(holder), owners)
            order.coding = self._choose_coding(stage, *ends).coding
        self._orders[key] = stage.node, order
        await context.tell(stage.node, CoordinatorMessage(replicate=order))

    def _choose_coding(self, stage: StagePlan, owner: Member, holder: Member) -> CodingChoice:
        up, down = owner.link.speed, holder.link.speed
        rate = min(up.up_bytes_per_second, down.down_bytes_per_second) if up and down else None
        is_local = not self._context.swarm.open_to_more
        return choose_coding(self.replicas.part_bytes(stage), rate, is_exact=self._is_exact, is_local=is_local)

    async def _renew_codings(self, cluster: ClusterRun) -> None:
        """Tells owners to code their parts in another way, where the size of the last part or the line asks for it."""
        members = self._context.members
        for stage in cluster.plan.stages:
            key = stage_key(self._deployment, stage)
            owner, order = self._orders.get(key, ("", Replicate()))
            # A new owner gets an order of its own, with another link.
            if owner != stage.node or owner not in members or order.holder.node not in members:
                continue
            choice = self._choose_coding(stage, members[stage.node], members[order.holder.node])
            if choice.coding != order.coding:
                changed = Replicate()
                changed.CopyFrom(order)
                changed.coding = choice.coding
                self._orders[key] = owner, changed
                await self._context.tell(owner, CoordinatorMessage(replicate=changed))

    def _on_complete(self) -> None:
        """Lets holders delete the replicas before a complete one, so that a failure of the next cannot displace it."""
        self._context.notify()
        self.on_replicas()
        for cluster in self._clusters.whole:
            replica = self.replicas.newest(cluster)
            if replica is None or self._deleted_before.get(cluster.id) == replica.number:
                continue
            self._deleted_before[cluster.id] = replica.number
            self._context.spawn(self._record(cluster, replica))
            self._context.spawn(self._renew_codings(cluster))
        has_sources = self._transfers.sources is not None
        if has_sources and all(self.replicas.newest(cluster) is not None for cluster in self._clusters.whole):
            self._transfers.sources = None
            self._context.spawn(self.delete_outdated(sorted(self._context.present)))

    async def _record(self, cluster: ClusterRun, replica: Replica) -> None:
        """Stores the manifest of a complete replica. Only then may its predecessor be deleted."""
        state, at = self._context.swarm.state, time.time() - (time.monotonic() - replica.announced_at)
        progress = self._context.progress
        progress.state = replace(progress.state, replica=SavedState(updates=replica.place.updates, at=at))
        if state is not None:
            parts = tuple(
                RecordedPart(
                    replica.sha256(stage), replica.sizes_bytes[stage], tuple(sorted(nodes)), replica.rounded[stage][1]
                )
                for stage, nodes in enumerate(replica.nodes)
            )
            key = f"{self._deployment}-{cluster.id}"
            starts = tuple(stage.start for stage in cluster.plan.stages)
            record = AnnouncedReplica(key, replica.number, replica.place, starts, parts, at)
            async with self._recording:
                newest = self.replicas.newest(cluster)
                if newest is not None and newest.number != replica.number:
                    # The newer one records itself, and threads do not take turns in order.
                    return
                with self._context.failing():
                    await asyncio.to_thread(state.completed, key, record.to_json())
        await self._delete_before(cluster, replica)

    async def _delete_before(self, cluster: ClusterRun, replica: Replica) -> None:
        """Tells the owners and holders of a cluster to delete the parts before this replica, except the pinned ones."""
        keys = [stage_key(self._deployment, stage) for stage in cluster.plan.stages]
        pinned = self._pinned.get(cluster.id, replica.number)
        # One message per cluster: the replica numbers of a slower or later cluster are different ones.
        order = Forget(of=keys, before=replica.number, pinned=[pinned] if pinned != replica.number else [])
        for node_id in {node for key in keys for node in self._pairs.get(key, ()) if node}:
            await self._context.tell(node_id, CoordinatorMessage(forget=order))

    def _on_announced(self, cluster: int, number: int, place: DataPosition) -> None:
        """Stores the announcement before the stages are told, so that a restarted coordinator can find the replica."""
        state = self._context.swarm.state
        if state is not None:
            starts = tuple(stage.start for stage in self._clusters.all[cluster].plan.stages)
            announced = AnnouncedReplica(f"{self._deployment}-{cluster}", number, place, starts)
            with self._context.failing():
                state.announced(announced.to_json())

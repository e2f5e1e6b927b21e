"""Who keeps replicas of a formation's stages: each is told so, and told what of them is not needed any more."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ravnest.coordinator.feed.cluster_state import ClusterRun, Clusters
from ravnest.coordinator.feed.ledger import Place
from ravnest.coordinator.replicas.tracker import Replicas
from ravnest.coordinator.replicas.transfers import Giving
from ravnest.coordinator.run.orders import LinkOrder, order_link, stage_key
from ravnest.coordinator.run.surroundings import Surroundings
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Forget, Hold, Replicate
from ravnest.planner.recovery.holders import choose_holders
from ravnest.planner.recovery.standbys import Warm
from ravnest.planner.stage_plan import StagePlan

_REPLICA_SECONDS: Final = 15.0
"""How long a fresh replica is waited for, so that little is to be done again."""


class Keeping:
    """The holders of one formation, and the replicas that they have. All methods belong to the network's loop."""

    def __init__(
        self,
        around: Surroundings,
        deployment: str,
        clusters: Clusters,
        giving: Giving,
        allow: Callable[[str, Sequence[LinkOrder]], None],
        name_constants: Callable[[Hold, StagePlan], None],
    ) -> None:
        """`allow` lets links for a purpose be relayed; `name_constants` tells a holder what of a stage never changes,
        and so is in no replica."""
        self._around = around
        self._deployment = deployment
        self._clusters = clusters
        self._giving = giving
        self._allow = allow
        self._name_constants = name_constants
        self._forgotten: dict[int, int] = {}
        """By cluster, up to which replica those before it have been forgotten."""
        self._pairs: dict[str, tuple[str, str]] = {}
        """By a stage's key, who owns it and who holds its replicas."""
        self.replicas = Replicas(
            around.course.emit,
            self._complete,
            around.swarm.members.line_rate,
            self._note_place,
            shared=not around.swarm.open_to_more,
        )

    async def keep(self, warm: Mapping[str, Warm], others: Sequence[str]) -> None:
        """Sees to it that every stage has a holder: those who are kept warm for it first, then its neighbours, then
        others."""
        for cluster in self._clusters.whole:
            if cluster.forming:
                continue
            standbys: dict[int, list[str]] = {}
            for standby in warm.values():
                if standby.cluster == cluster.id and standby.stage is not None:
                    standbys.setdefault(standby.stage, []).append(standby.standby)
            chosen = choose_holders(cluster.nodes, standbys, others)
            holders = {stage: holder.node for stage, holder in chosen.items() if holder.node is not None}
            if not holders:
                # A stage alone: nobody else could go on with it.
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
                self.replicas.formed(cluster, keys, holders)
            self._pairs |= wanted
            for stage in changed:
                await self._order_replicas(stage, holders.get(stage.stage))

    async def keep_first(self, cluster: ClusterRun) -> bool:
        """Waits a little for a fresh replica of a cluster that is fed; whether there is one."""
        kept = self.replicas.of(cluster)
        self.replicas.want(cluster)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPLICA_SECONDS):
                await self._around.course.until(
                    lambda: self.replicas.of(cluster) is not kept or cluster.forming != "" or bool(cluster.lost)
                )
        return self.replicas.of(cluster) is not kept

    def forget_holder(self, node_id: str) -> None:
        """Who is gone keeps nothing."""
        self.replicas.gone(node_id)
        for key, pair in list(self._pairs.items()):
            if node_id in pair:
                del self._pairs[key]

    async def forget_others(self, nodes: Sequence[str]) -> None:
        """Parts of formations before this one are of no use any more."""
        keys = [stage_key(self._deployment, s) for cluster in self._clusters.all for s in cluster.plan.stages]
        keys += self._giving.donors.keys if self._giving.donors is not None else ()
        for node_id in nodes:
            await self._around.course.tell(node_id, CoordinatorMessage(forget=Forget(keep=keys)))

    async def _order_replicas(self, stage: StagePlan, holder: str | None) -> None:
        around, key = self._around, stage_key(self._deployment, stage)
        order = Replicate(deployment=self._deployment, key=key)
        members = around.swarm.members
        if holder is not None and holder in members and stage.node in members:
            ends = [members[stage.node], members[holder]]
            reaches = await around.swarm.reaches(ends)
            generation = self._clusters.all[stage.cluster].generation
            name = f"{self._deployment}-{generation}-replica-{stage.cluster}-{stage.stage}-{around.swarm.next_number()}"
            link = order_link(name, ends[0], ends[1], reaches)
            self._allow(f"replica {key}", [link])
            hold = Hold(key=key, owner=link.to_before)
            self._name_constants(hold, stage)
            await around.course.tell(holder, CoordinatorMessage(hold=hold))
            order.holder.CopyFrom(link.to_after)
        await around.course.tell(stage.node, CoordinatorMessage(replicate=order))

    def _complete(self) -> None:
        """Older ones need not be kept any more, and this one is not to make room for one that fails."""
        course = self._around.course
        course.notify()
        for cluster in self._clusters.whole:
            replica = self.replicas.of(cluster)
            if replica is None or self._forgotten.get(cluster.id) == replica.number:
                continue
            self._forgotten[cluster.id] = replica.number
            keys = [stage_key(self._deployment, stage) for stage in cluster.plan.stages]
            # Each cluster by itself: the numbers of one that is slower, or did not begin with them, are others.
            forget = CoordinatorMessage(forget=Forget(of=keys, before=replica.number))
            for node_id in {node for key in keys for node in self._pairs.get(key, ()) if node}:
                course.spawn(course.tell(node_id, forget))
        began = self._giving.donors is not None
        if began and all(self.replicas.of(cluster) is not None for cluster in self._clusters.whole):
            self._giving.donors = None
            there = [member.node_id for member in self._around.swarm.members.connected()]
            course.spawn(self.forget_others(there))

    def _note_place(self, cluster: int, number: int, place: Place) -> None:
        stages = self._clusters.all[cluster].plan.stages
        self._around.placed(f"{self._deployment}-{cluster}", number, place, [stage.start for stage in stages])

"""Membership changes: providers that join a run which is under way, and providers that want to leave it.

A provider that leaves keeps its stage until another one has it, or until the run is redeployed without it. A new
provider is a standby. If a plan with it gains more than the standstill costs, the run is redeployed with it. If the
requester set the number of providers and some were lost, the run is redeployed once there are enough again.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final

from ravnest.coordinator.deploy.current_deployment import CurrentDeployment
from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.deploy.present_planner import PresentPlanner
from ravnest.coordinator.deploy.redeployment import Redeployment
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.recovery.recovery import Recovery
from ravnest.coordinator.run.job_run import JobRun
from ravnest.errors import PlanError
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Stop
from ravnest.planner.plan import Plan
from ravnest.planner.problem import Provider
from ravnest.planner.recovery.worth_it import worth_it
from ravnest.units import counted

_LEAVE_SECONDS: Final = 60.0
"""Timeout for a provider that wants to leave, in addition to the time that its stage takes on its line."""
_AVERAGE_SECONDS: Final = 30.0
"""Timeout for a last round with the cluster of a provider that leaves: a part of the time above."""
_LINE_TIMES: Final = 2.0
"""Factor on that time, because other traffic shares the line."""


def leave_seconds(part_bytes: int, line_bytes_per_second: float) -> float:
    """Timeout for handing a stage of this size over, on the line of the provider that leaves (0: not known)."""
    sending = part_bytes / line_bytes_per_second if line_bytes_per_second > 0 else 0.0
    return _LEAVE_SECONDS + _LINE_TIMES * sending


def short_of(largest: tuple[int, int], now: tuple[int, int], present: int) -> str:
    """Why a run of fixed size is redeployed: it had more clusters and stages, and there are enough providers for them
    again. Empty if it is not. `largest` and `now` are clusters and stages, `present` is the number of providers."""
    if now[0] >= largest[0] and now[1] >= largest[1]:
        return ""
    if present < largest[1]:
        return ""
    return (
        f"{counted(present, 'provider is', 'providers are')} connected, enough for {counted(largest[1], 'stage')} in "
        f"{counted(largest[0], 'cluster')} as before, instead of {now[1]} in {now[0]}"
    )


class MembershipChanges:
    """The changes of one run. All methods run on the network's event loop."""

    def __init__(
        self,
        run: JobRun,
        current: CurrentDeployment,
        planner: PresentPlanner,
        recovery: Recovery,
        redeployment: Redeployment,
    ) -> None:
        self._context = run.context
        self._exclusions = run.exclusions
        self._current = current
        self._planner = planner
        self._recovery = recovery
        self._redeployment = redeployment
        self._asked: set[str] = set()
        """Providers that have asked to leave."""
        self._dismissed: set[str] = set()
        """Providers that were told to stop without a successor, and are still connected."""
        self._newcomers: dict[str, Provider] = {}
        """New standbys that have not been considered yet."""
        self._is_considering = False

    def joined(self, newcomers: Sequence[Provider]) -> None:
        """These providers have just become standbys."""
        self._newcomers |= {each.name: each for each in newcomers}
        if not self._is_considering:
            self._is_considering = True
            self._context.spawn(self._consider_newcomers())

    def wants_to_leave(self, node_id: str, reason: str) -> None:
        """A provider asks to be let go."""
        if node_id in self._asked:
            return
        self._asked.add(node_id)
        self._exclusions.leave(node_id)
        self._context.emit("leaving", reason, provider=node_id)
        self._context.spawn(self._hand_over(node_id))

    def gone(self, node_id: str) -> bool:
        """A provider's session has ended; whether it was dismissed, so that nothing was lost. If it joins again, it may
        stay."""
        self._asked.discard(node_id)
        self._exclusions.forget(node_id)
        was_dismissed = node_id in self._dismissed
        self._dismissed.discard(node_id)
        return was_dismissed

    async def _consider_newcomers(self) -> None:
        try:
            while self._newcomers:
                newcomers, self._newcomers = self._newcomers, {}
                deployment = self._current.now
                new = [p for name, p in newcomers.items() if name not in deployment.stage_of]
                if new and self._planner.asked.providers is None:
                    await self._grow(deployment, new)
                elif new:
                    await self._fill_up(deployment)
        finally:
            self._is_considering = False

    async def _grow(self, deployment: Deployment, newcomers: Sequence[Provider]) -> None:
        """Redeploys the run with the new providers, if that is worth it."""
        names, ids = [each.name for each in newcomers], [cluster.id for cluster in deployment.clusters.whole]
        joined = f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} joined"
        plan: Plan | None = None

        def pays(plan: Plan) -> bool:
            return worth_it(deployment.plan, ids, plan).is_worth_it

        try:
            running = [deployment.plan.clusters[number].cost for number in ids]
            plan = await self._redeployment.plan(deployment, pays, running)
            judgement = worth_it(deployment.plan, ids, plan)
            is_worth_it, why = judgement.is_worth_it, f"{joined}: {judgement.reason}"
        except PlanError as error:
            is_worth_it, why = False, f"{joined}: {error}"
        self._context.emit("joined_plan", why, providers=names, used=is_worth_it)
        if is_worth_it and self._current.is_current(deployment):
            await self._redeployment.when_drained(deployment, why, plan)

    async def _fill_up(self, deployment: Deployment) -> None:
        """Redeploys a run of fixed size that has lost providers, once there are enough again."""
        now = len(deployment.clusters.whole), len(deployment.stage_of)
        available = self._context.present - self._exclusions.nodes
        if why := short_of(self._current.max_size, now, len(available)):
            await self._redeployment.when_drained(deployment, why)

    async def _hand_over(self, node_id: str) -> None:
        """Gives the stage of a provider to another one, and tells the provider to stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._leave_seconds(node_id)):
                while (held := self._held_by(node_id)) is not None and not self._planner.is_waiting:
                    await self._give_away(node_id, *held)
        if node_id not in self._context.present:
            # It did not wait.
            return
        if self._planner.is_waiting:
            reason = f"{node_id} leaves: its state is saved, and the run waits for another provider"
            self._context.emit("handed_over", reason, provider=node_id)
            self._dismissed.add(node_id)
            answer = "it asked to leave, and nothing is lost"
        elif self._held_by(node_id) is not None:
            reason = f"{node_id} leaves, and no provider has taken its stage"
            self._context.emit("not_handed_over", reason, provider=node_id)
            answer = "it asked to leave; no other provider took its stage in time, and the others recover it"
        else:
            self._context.emit("handed_over", f"{node_id} holds no stage any more and leaves", provider=node_id)
            answer = "it asked to leave, and nothing is lost"
        await self._context.tell(node_id, CoordinatorMessage(stop=Stop(reason=answer)))

    def _leave_seconds(self, node_id: str) -> float:
        deployment, rate = self._current.deployment, self._context.members.line_rate(node_id)
        return leave_seconds(0 if deployment is None else deployment.replicas.largest_part_bytes, rate or 0.0)

    async def _give_away(self, node_id: str, deployment: Deployment, cluster: ClusterRun) -> None:
        """Returns when another provider has the stage, when the run is redeployed, or when it waits for providers."""

        def is_rebuilt() -> bool:
            return not cluster.is_forming or cluster.is_lost or self._planner.is_waiting

        stage = cluster.nodes.index(node_id)
        if len(deployment.clusters.whole) == 1 and not deployment.replicas.holder(cluster, stage):
            # There is no replica of the stage, so a checkpoint is saved.
            self._context.spawn(self._redeployment.when_drained(deployment, f"{node_id} leaves"))
            await self._context.until(lambda: cluster.is_lost or self._planner.is_waiting)
            return
        await self._average_before(node_id, deployment)
        await deployment.holders.wait_for_fresh(cluster)
        # A rebuild of the cluster may be under way.
        await self._context.until(is_rebuilt)
        self._recovery.stage_left(node_id, f"{node_id} leaves")
        # Until the rebuild is complete, because the taker may fetch the stage from this provider.
        await self._context.until(is_rebuilt)

    async def _average_before(self, node_id: str, deployment: Deployment) -> None:
        """A round before a provider leaves whose stage no provider is free to take: its cluster is then likely to be
        dissolved, and what the cluster has learned would be lost."""
        free = self._context.present - self._exclusions.nodes - deployment.stage_of.keys()
        if deployment.averaging is None or free:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_AVERAGE_SECONDS):
                await deployment.averaging.soon(f"{node_id} leaves, and no provider is free to take its stage")

    def _held_by(self, node_id: str) -> tuple[Deployment, ClusterRun] | None:
        """The deployment and the cluster in which a provider has a stage."""
        deployment, cluster = self._current.deployment, self._current.cluster_of(node_id)
        return None if deployment is None or cluster is None else (deployment, cluster)

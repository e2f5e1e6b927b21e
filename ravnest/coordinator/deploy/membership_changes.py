"""Changes of a run that nothing forces: a machine that came and is worth using, and one that wants to leave.

Whoever leaves goes on until somebody else has its stage, or the run has been formed anew without it. A newcomer stands
by; where a plan with it gains more than the standstill costs, the run is formed anew with it. Where the requester has
said how many machines there are to be, and some were lost, it is formed anew as soon as there are as many again.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, Final

from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.deploy.recovery import Recovery
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.run.context import Course
from ravnest.errors import PlanError
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Stop
from ravnest.planner.cluster import Cluster
from ravnest.planner.plan import Plan
from ravnest.planner.problem import Provider
from ravnest.planner.recovery.worth_it import worth_it
from ravnest.units import counted

_LEAVE_SECONDS: Final = 60.0
"""How long one that wants to leave is kept, beyond what its stage takes on its line."""
_LINE_TIMES: Final = 2.0
"""Other traffic shares the line."""


def leave_seconds(part_bytes: int, line_bytes_per_second: float) -> float:
    """Timeout for handing a stage of this size over, on the line of the provider that leaves (0: not known)."""
    sending = part_bytes / line_bytes_per_second if line_bytes_per_second > 0 else 0.0
    return _LEAVE_SECONDS + _LINE_TIMES * sending


def short_of(most: tuple[int, int], now: tuple[int, int], present: int) -> str:
    """Why a run of fixed size is to be formed anew: it had more clusters and stages, and enough are there for them
    again. Empty where it is not. `most` and `now` are clusters and stages, `present` are providers."""
    if now[0] >= most[0] and now[1] >= most[1]:
        return ""
    if present < most[1]:
        return ""
    return (
        f"{counted(present, 'provider is', 'providers are')} there, enough for {counted(most[1], 'stage')} in "
        f"{counted(most[0], 'cluster')} as before, instead of {now[1]} in {now[0]}"
    )


class MembershipChanges:
    """Of one run. All methods belong to the network's loop."""

    def __init__(
        self,
        course: Course,
        formation: Callable[[], Deployment | None],
        recovery: Recovery,
        reform: Callable[[Deployment, str, Plan | None], Coroutine[Any, Any, None]],
        replacement: Callable[[Deployment, Callable[[Plan], bool], Sequence[Cluster]], Awaitable[Plan]],
        leaving: set[str],
        may_grow: bool,
        present: Callable[[], Collection[str]],
        waits: Callable[[], bool],
        line_rate: Callable[[str], float | None] = lambda node_id: None,
    ) -> None:
        """`reform` brings training to rest and forms the run anew from there, in the place of this formation, by a plan
        if there is one. `replacement` makes that plan: see `Forming.replacement`. With
        `may_grow`, those who come may be used; without, only in the place of those who are lost. `present` are all who
        are there; `waits` says whether they are too few, and all that was learned is saved until others come.
        `line_rate` is what a provider can send in a second, as it was measured."""
        self._course = course
        self._formation = formation
        self._recovery = recovery
        self._reform = reform
        self._replacement = replacement
        self._leaving = leaving
        self._may_grow = may_grow
        self._present = present
        self._asked: set[str] = set()
        """Who wants to leave, of those who are not counted upon."""
        self._waits = waits
        self._line_rate = line_rate
        self._let_go: set[str] = set()
        """Who was told to go and is still there."""
        self._growing = False
        self._most = 0, 0
        """Clusters and stages that the run had at best."""
        self._newcomers: dict[str, Provider] = {}
        """Who has come and has not been thought of yet."""

    def formed(self, formation: Deployment) -> None:
        """The run is made up of these from now on."""
        self._most = max(self._most[0], len(formation.clusters.all)), max(self._most[1], len(formation.plan.stages))

    def came(self, newcomers: Sequence[Provider]) -> None:
        """These stand by since a moment ago."""
        self._newcomers |= {each.name: each for each in newcomers}
        if not self._growing:
            self._growing = True
            self._course.spawn(self._grow_while_they_come())

    def wants_to_leave(self, node_id: str, reason: str) -> None:
        """A provider asks to be let go."""
        if node_id in self._asked:
            return
        self._asked.add(node_id)
        self._leaving.add(node_id)
        self._course.emit("leaving", reason, provider=node_id)
        self._course.spawn(self._hand_over(node_id))

    def gone(self, node_id: str) -> bool:
        """Whether this one was let go, and nothing was lost by it. Whoever comes back may stay."""
        self._asked.discard(node_id)
        self._leaving.discard(node_id)
        was_let_go = node_id in self._let_go
        self._let_go.discard(node_id)
        return was_let_go

    async def _grow_while_they_come(self) -> None:
        try:
            while self._newcomers:
                newcomers, self._newcomers = self._newcomers, {}
                formation = self._formation()
                assert formation is not None, "who stands by does so beside a formation"
                new = [p for name, p in newcomers.items() if name not in formation.stage_of]
                if new and self._may_grow:
                    await self._grow(formation, new)
                elif new:
                    await self._fill_up(formation)
        finally:
            self._growing = False

    async def _grow(self, formation: Deployment, newcomers: Sequence[Provider]) -> None:
        names, ids = [each.name for each in newcomers], [cluster.id for cluster in formation.clusters.whole]
        joined = f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} joined"
        plan: Plan | None = None

        def pays(plan: Plan) -> bool:
            return worth_it(formation.plan, ids, plan).is_worth_it

        try:
            running = [formation.plan.clusters[number].cost for number in ids]
            plan = await self._replacement(formation, pays, running)
            judgement = worth_it(formation.plan, ids, plan)
            is_worth_it, why = judgement.is_worth_it, f"{joined}: {judgement.reason}"
        except PlanError as error:
            is_worth_it, why = False, f"{joined}: {error}"
        self._course.emit("joined_plan", why, providers=names, used=is_worth_it)
        if is_worth_it and formation is self._formation():
            await self._reform(formation, why, plan)

    async def _fill_up(self, formation: Deployment) -> None:
        """Back to what it was before somebody was lost, once enough are there."""
        now = len(formation.clusters.whole), len(formation.stage_of)
        if why := short_of(self._most, now, len(set(self._present()) - self._leaving)):
            await self._reform(formation, why, None)

    async def _hand_over(self, node_id: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._leave_seconds(node_id)):
                while (held := self._held_by(node_id)) is not None and not self._waits():
                    await self._give_away(node_id, *held)
        if node_id not in self._present():
            # It did not wait.
            return
        if self._waits():
            reason = f"{node_id} goes: what was learned is saved, and nobody is there to go on with it"
            self._course.emit("handed_over", reason, provider=node_id)
            self._let_go.add(node_id)
        elif self._held_by(node_id) is not None:
            self._course.emit(
                "not_handed_over", f"nobody has taken the stage of {node_id}, which goes", provider=node_id
            )
        else:
            self._course.emit("handed_over", f"{node_id} holds nothing any more and goes", provider=node_id)
        stop = Stop(reason="it was asked to leave, and nothing is lost by it")
        await self._course.tell(node_id, CoordinatorMessage(stop=stop))

    def _leave_seconds(self, node_id: str) -> float:
        formation, rate = self._formation(), self._line_rate(node_id)
        return leave_seconds(0 if formation is None else formation.replicas.largest_part_bytes, rate or 0.0)

    async def _give_away(self, node_id: str, formation: Deployment, cluster: ClusterRun) -> None:
        """Returns when another has its stage, when the run is formed anew, or when it waits for others."""

        def is_formed() -> bool:
            return not cluster.is_forming or cluster.is_lost or self._waits()

        if len(formation.clusters.whole) == 1 and not formation.replicas.holder(cluster, cluster.nodes.index(node_id)):
            # Nobody has a copy of its stage: it is saved here.
            self._course.spawn(self._reform(formation, f"{node_id} leaves", None))
            await self._course.until(lambda: cluster.is_lost or self._waits())
            return
        await formation.holders.wait_for_fresh(cluster)
        # Where it is just being formed, once that is done.
        await self._course.until(is_formed)
        self._recovery.stage_left(node_id, f"{node_id} leaves")
        # Not only until another is to take it: that one may be fetching it from here.
        await self._course.until(is_formed)

    def _held_by(self, node_id: str) -> tuple[Deployment, ClusterRun] | None:
        """Where it has a stage."""
        formation = self._formation()
        cluster = None if formation is None else formation.clusters.of(node_id)
        return None if formation is None or cluster is None else (formation, cluster)

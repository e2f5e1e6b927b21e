"""What is done when a stage is lost: somebody takes it, the run is formed anew, or it waits for machines.

The planner decides (planner/recovery/choose_taker.py); this carries the decision out. When another provider is lost
while a cluster is being formed again, the planner decides again with the providers that are left.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from ravnest.coordinator.deploy.deployment import BorrowedState, Deployment
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.replicas.sources import DeploymentAbortedError
from ravnest.coordinator.replicas.tracker import Replica
from ravnest.coordinator.report.progress import Progress
from ravnest.coordinator.run.context import Course
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.errors import PlanError, TrainingError
from ravnest.planner.plan import Plan
from ravnest.planner.problem import Provider
from ravnest.planner.recovery.choose_taker import Candidacy, Candidate, Recut, Taking, candidates_for, choose_taker
from ravnest.units import counted

_TRIES: Final = 8
"""How often forming a cluster may be broken off before the run is formed anew."""
_NOTED_SECONDS: Final = 1.0
"""Within which whoever is gone is also taken for lost: the reason is waited for a little."""


@dataclass
class _Loss:
    """A stage that nobody holds."""

    node: str
    reason: str
    since: float
    """When it was last well, on the clock `time.monotonic`."""
    noticed: float
    before: "_Loss | None" = None
    """Somebody else was to take the stage of that one, and was lost before it could."""

    @property
    def all(self) -> "list[_Loss]":
        return [self, *(self.before.all if self.before is not None else ())]


class Recovery:
    """Of one run. All methods belong to the network's loop."""

    def __init__(
        self,
        course: Course,
        swarm: Swarm,
        progress: Progress,
        formation: Callable[[], Deployment],
        standbys: Callable[[], dict[str, Provider]],
        warm_for: Callable[[str], tuple[int, int] | None],
        reform: Callable[[Deployment, str, Plan | None], Awaitable[None]],
        replacement: Callable[[Deployment, Callable[[Plan], bool]], Awaitable[Plan]],
        give_up: Callable[[ClusterRun, str], None],
        formed: Callable[[], None],
        borrow: Callable[[Deployment, ClusterRun, Collection[int]], Awaitable[BorrowedState | None]],
    ) -> None:
        """`standbys` are those without a stage, `warm_for` says which stage of which cluster one has at hand. `reform`
        forms the run anew, in the place of this formation, by a plan if there is one; `replacement` makes that plan
        (PlanError where nobody can hold the model, see `Forming.replacement`). `give_up` ends a
        cluster where others go on, `formed` is called when one is whole again. `borrow` finds state for stages that
        nobody has, where there are other clusters."""
        self._course = course
        self._swarm = swarm
        self._progress = progress
        self._formation = formation
        self._standbys = standbys
        self._warm_for = warm_for
        self._reform = reform
        self._replacement = replacement
        self._give_up = give_up
        self._formed = formed
        self._borrow = borrow
        self._lost: dict[int, dict[int, _Loss]] = {}
        """By cluster and stage, those that nobody holds."""
        self._since: dict[int, dict[str, float]] = {}
        """By cluster, who was lost since it was last whole, and when it was last well."""
        self._broken: dict[int, set[str]] = {}
        """Of each cluster that is being formed, who was lost meanwhile."""
        self._unfit: set[tuple[str, int, int]] = set()
        """Who has failed with which stage of which cluster, and is not given it again."""

    def lacking(self, cluster: ClusterRun) -> list[str]:
        """Who of a cluster that is being formed has been lost since that began."""
        gone = self._broken.get(cluster.id, set())
        return [node for node in cluster.nodes if node in gone or not self._swarm.members.is_present(node)]

    def stage_lost(self, node_id: str, reason: str, last_well: float, *, failed: bool = False) -> None:
        """A stage is held by nobody any more: its provider is gone, or has `failed` with it."""
        formation = self._formation()
        cluster = formation.clusters.of(node_id)
        if cluster is None:
            return
        stage = cluster.nodes.index(node_id)
        if failed:
            self._unfit.add((node_id, cluster.id, stage))
        lost = self._lost.setdefault(cluster.id, {})
        lost[stage] = _Loss(node_id, reason, last_well, time.monotonic(), lost.get(stage))
        self._since.setdefault(cluster.id, {})[node_id] = last_well
        self._broken.setdefault(cluster.id, set()).add(node_id)
        if not self._swarm.members.is_present(node_id):
            # One that is still there has on its disk what it kept.
            formation.holders.remove(node_id)
        if cluster.is_forming:
            self._course.notify()
            return
        cluster.begin_forming(reason)
        self._course.spawn(self._recover(formation, cluster))

    def lost_before(self, cluster: ClusterRun, stages: Mapping[int, str]) -> None:
        """Nobody holds these stages of a cluster that was taken over, by number with those who did; once the formation
        is released, others take them."""
        now = time.monotonic()
        for stage, node in stages.items():
            reason = f"{node} did not hold stage {stage} any more when the coordinator was started again"
            self._lost.setdefault(cluster.id, {})[stage] = _Loss(node, reason, now, now)
            if cluster.nodes[stage] == node:
                cluster.returned.add(node)

    def stage_left(self, node_id: str, reason: str) -> None:
        """A provider that is well gives its stage up; it keeps it until it is told to stop."""
        formation = self._formation()
        cluster = formation.clusters.of(node_id)
        if cluster is None or cluster.is_forming:
            return
        now = time.monotonic()
        stage = cluster.nodes.index(node_id)
        self._lost.setdefault(cluster.id, {})[stage] = _Loss(node_id, reason, now, now)
        cluster.begin_forming(reason)
        self._course.spawn(self._recover(formation, cluster))

    def link_lost(self, node_id: str, reason: str, generation: int) -> None:
        """A stage has lost its link to a neighbour for good, and nobody is gone: the cluster gets new links, unless it
        has some of a later generation by now."""
        formation = self._formation()
        cluster = formation.clusters.of(node_id)
        if cluster is not None and not cluster.is_forming and cluster.generation == generation:
            cluster.begin_forming(reason)
            self._course.spawn(self._recover(formation, cluster))

    def release(self, formation: Deployment) -> None:
        """All clusters have been formed and are fed from now on, but for one that has lost somebody since."""
        for cluster in formation.clusters.whole:
            if self._lost.get(cluster.id) or self.lacking(cluster):
                self._course.spawn(self._recover(formation, cluster))
            else:
                formation.release(cluster)

    def forget(self) -> None:
        """Another formation has taken the place of the one before."""
        self._lost, self._broken, self._unfit = {}, {}, set()

    async def _recover(self, formation: Deployment, cluster: ClusterRun) -> None:
        healed: list[_Loss] = []
        plan: Plan | None = None
        taken: dict[int, str] = {}
        """By stage, who took it, in all attempts."""
        for attempt in range(_TRIES):
            await self._until_noted(formation, cluster)
            if formation is not self._formation() or cluster.is_lost:
                # Whatever it lacks, it is not needed any more.
                return
            lost = self._lost.setdefault(cluster.id, {})
            self._broken[cluster.id] = set()
            now = time.monotonic()
            losses = [*healed, *(each for loss in lost.values() for each in loss.all)]
            first = min((loss.since for loss in losses), default=now)
            noticed = min((loss.noticed for loss in losses), default=now)
            takings = None
            if attempt < _TRIES - 1:
                takings, plan = await self._choose(formation, cluster, lost)
            if takings is None:
                break
            takers = {stage: taking.taker or "" for stage, taking in takings.items()}
            replica = formation.replicas.newest(cluster)
            borrowed, begun = None, time.monotonic()
            if missing := self._missing(cluster, replica, takers):
                # Nor can it begin anew: what was fed before that replica is not kept any more.
                if len(formation.clusters.whole) > 1:
                    borrowed = await self._borrow(formation, cluster, missing)
                if borrowed is None:
                    why = "; ".join(dict.fromkeys(missing.values()))
                    self._course.emit("nobody_takes", why, cluster=cluster.id, stage=min(missing))
                    break
            reason = "; ".join(taking.reason for taking in takings.values()) or cluster.reason
            self._tell_begun(cluster, takers, lost, replica, borrowed, reason)
            try:
                formed = await formation.form_again(cluster, takers, replica, self._standbys(), borrowed)
            except DeploymentAbortedError as error:
                self._course.emit("failover_broken_off", str(error), cluster=cluster.id)
                # Those who have taken their stage by now keep it.
                for stage in [stage for stage in takers if self._has_taken(formation, cluster, stage)]:
                    healed += lost.pop(stage).all
                    taken[stage] = takers[stage]
                continue
            taken |= takers
            self._lost.pop(cluster.id, None)
            formation.release(cluster)
            now = cluster.resumed_at or time.monotonic()
            self._recovered(self._since.pop(cluster.id, {}), now)
            self._course.emit(
                "failover",
                f"cluster {cluster.id} is whole again: {reason}",
                cluster=cluster.id,
                stages=sorted(taken),
                takers=[taken[stage] for stage in sorted(taken)],
                seconds=now - first,
                replayed=formed.replayed,
                detect_seconds=noticed - first,
                decide_seconds=begun - noticed,
                fetch_seconds=formed.fetch_seconds,
                resume_seconds=now - begun - formed.fetch_seconds,
            )
            self._formed()
            return
        await self._without_takers(formation, cluster, plan)

    async def _until_noted(self, formation: Deployment, cluster: ClusterRun) -> None:
        """Returns when everybody of a cluster who is not there any more is also known as lost."""

        def unnoted() -> list[tuple[int, str]]:
            lost = self._lost.get(cluster.id, {})
            return [
                (stage, node)
                for stage, node in enumerate(cluster.nodes)
                if not self._swarm.members.is_present(node) and (stage not in lost or lost[stage].node != node)
            ]

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_NOTED_SECONDS):
                await self._course.until(lambda: formation.over or not unnoted())
        for stage, node in [] if formation.over else unnoted():
            lost, now = self._lost.setdefault(cluster.id, {}), time.monotonic()
            lost[stage] = _Loss(node, f"{node} is gone", now, now, lost.get(stage))

    def _has_taken(self, formation: Deployment, cluster: ClusterRun, stage: int) -> bool:
        node = cluster.nodes[stage]
        ready = formation.ready.get(node)
        return ready is not None and ready.generation == cluster.generation and node not in self.lacking(cluster)

    async def _without_takers(self, formation: Deployment, cluster: ClusterRun, plan: Plan | None) -> None:
        lost = self._lost.pop(cluster.id, {})
        why = "; ".join(loss.reason for loss in lost.values()) or cluster.reason
        self._broken.pop(cluster.id, None)
        if len(formation.clusters.whole) > 1:
            self._give_up(cluster, why)
            # The other clusters train on what it was fed.
            self._recovered(self._since.pop(cluster.id, {}), time.monotonic())
            self._formed()
            return
        self._unfit = {each for each in self._unfit if self._swarm.members.is_present(each[0])}
        await self._reform(formation, why, plan)
        # Also those that were lost meanwhile: it is another formation now, without them.
        since, self._since = self._since, {}
        for nodes in since.values():
            self._recovered(nodes, time.monotonic())

    async def _choose(
        self, formation: Deployment, cluster: ClusterRun, lost: dict[int, _Loss]
    ) -> tuple[dict[int, Taking] | None, Plan | None]:
        """Who takes which of the stages that nobody holds, or None where not all of them can be taken as they are; and
        the plan that would take the place of the running one, if that was asked for."""
        basis, standbys = formation.plan.basis, self._standbys()
        planned = formation.plan.clusters[cluster.id].cost
        plan: Plan | None = None
        taken: set[str] = set()
        found: dict[int, Taking] = {}
        for stage, loss in sorted(lost.items()):
            holder = cluster.nodes[stage]
            if holder != loss.node and self._swarm.members.is_present(holder):
                # Forming was broken off by somebody else.
                reason = f"{holder} takes the stage of {loss.node}, as it was to do before another was lost"
                taken.add(holder)
                found[stage] = Taking("takes", holder, reason)
                continue
            # One that is back may have its own stage again, and no other.
            may = {
                name: Candidacy(provider, self._warm_for(name) == (cluster.id, stage))
                for name, provider in standbys.items()
                if name not in taken and (name, cluster.id, stage) not in self._unfit
                if name == loss.node or name not in formation.stage_of
            }
            if loss.node in may:
                # It is back, and has on its disk what it kept of its own stage.
                may[loss.node] = replace(may[loss.node], is_warm=True)
            candidates, rate = candidates_for(basis, planned, holder, may), planned.samples_per_second
            taking = choose_taker(holder, candidates, rate, None)
            if taking.kind != "takes":
                against = partial(_against_new_plan, formation, cluster, holder, candidates)
                try:
                    plan = plan or await self._replacement(formation, partial(_is_better, against))
                    taking = against(plan)
                except PlanError as error:
                    taking = choose_taker(holder, candidates, rate, Recut(None, str(error)))
            if taking.kind != "takes" or taking.taker is None:
                self._course.emit("nobody_takes", taking.reason, cluster=cluster.id, stage=stage)
                return None, plan
            taken.add(taking.taker)
            found[stage] = taking
        return found, None

    def _missing(self, cluster: ClusterRun, replica: Replica | None, stages: Collection[int]) -> dict[int, str]:
        """Which of these stages nobody can begin where what is kept for feeding again begins, and why."""
        if replica is None and cluster.dropped:
            return dict.fromkeys(sorted(stages), f"{cluster.dropped} microbatches are not kept for feeding again")
        present = self._swarm.members.is_present
        if replica is None:
            donors = self._formation().donors
            there = {member.node_id for member in self._swarm.members.connected()}
            return {
                stage: f"those who had what stage {stage} began with are gone"
                for stage in sorted(stages)
                if donors is not None and not donors.covers(cluster.plan.stages[stage].graph, there)
            }
        return {
            stage: f"all who had stage {stage} as it was after {replica.place.updates} updates are gone"
            for stage in sorted(stages)
            if not any(map(present, replica.nodes[stage]))
        }

    def _tell_begun(
        self,
        cluster: ClusterRun,
        takers: dict[int, str],
        lost: dict[int, _Loss],
        replica: Replica | None,
        borrowed: BorrowedState | None,
        reason: str,
    ) -> None:
        for stage, taker in takers.items():
            source, samples = "start" if replica is None else "replica", 0
            if borrowed is not None and stage in borrowed.stages:
                source, samples, reason = borrowed.source, borrowed.samples_lost, f"{reason}, {borrowed.words}"
            self._course.emit(
                "failover_begun",
                reason,
                cluster=cluster.id,
                stage=stage,
                lost=lost[stage].node,
                taker=taker,
                source=source,
                updates_lost=self._updates_in(samples) if samples else cluster.dropped,
            )

    def _updates_in(self, samples: int) -> int:
        """How many updates so many samples are, about: as many to each as there were so far."""
        ledger = self._progress.ledger
        return math.ceil(samples * ledger.updates / ledger.samples) if ledger.samples else 0

    def _recovered(self, since: Mapping[str, float], now: float) -> None:
        """The run goes on without these, which were last well at those times."""
        faults = self._progress.faults
        for index, fault in enumerate(faults):
            if fault.provider in since and fault.recovered_seconds is None:
                faults[index] = replace(fault, recovered_seconds=now - since[fault.provider])


def _is_better(against: Callable[[Plan], Taking], plan: Plan) -> bool:
    return against(plan).kind != "takes"


def _against_new_plan(
    formation: Deployment, cluster: ClusterRun, lost: str, candidates: Sequence[Candidate], plan: Plan
) -> Taking:
    """Who takes a stage, where this plan could be deployed instead. The plan is credited with what it gives beyond the
    rates of the other clusters."""
    others = sum(each.plan.predicted_samples_per_second for each in formation.clusters.whole if each is not cluster)
    recut = Recut(max(0.0, plan.steady_samples_per_second - others), plan.reason)
    before = formation.plan.clusters[cluster.id].cost.samples_per_second
    return choose_taker(lost, candidates, before, recut)


def nobody_left(reason: str, left: int) -> TrainingError:
    """Why a swarm that nobody can join cannot go on."""
    return TrainingError(f"{reason}; {counted(left, 'provider is', 'providers are')} left, which cannot hold the model")

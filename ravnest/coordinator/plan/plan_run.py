"""Plan of a run for the members of a swarm.

Only lines that a plan would use are measured: the first plan uses each provider's figures of its own connection; then
the lines between neighbours of that plan are measured, and the next plan uses the results.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ravnest.coordinator.plan.averaging import (
    AveragingOf,
    averaged_bytes,
    averaging_memory,
    averaging_of,
    within_averaging,
)
from ravnest.coordinator.plan.cluster_count import check_clusters
from ravnest.coordinator.plan.feed_ahead import feed_ahead, feed_seconds
from ravnest.coordinator.plan.lr_schedule import allowed_in_run
from ravnest.coordinator.plan.observed_limits import ObservedLimits
from ravnest.coordinator.plan.prepared_job import PreparedJob, choose_correction
from ravnest.coordinator.plan.provider_profiles import Machine, measured_lines, provider_of, requester_of
from ravnest.coordinator.swarm.link_measurements import measure_pairs
from ravnest.coordinator.swarm.members import Member
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.engine.corrections.correction import PREDICTING
from ravnest.errors import PlanError
from ravnest.job import Job
from ravnest.net.frames.packed_integers import fed_bytes
from ravnest.planner.cluster import Cluster
from ravnest.planner.count_costs import count_costs
from ravnest.planner.in_flight.decision import max_in_flight
from ravnest.planner.in_flight.lr_bound import slowed_by_caution
from ravnest.planner.link_codecs import CHOICES, EXACT
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.plan import Basis, ClusterPlan, Plan, RingStages, stages_of
from ravnest.planner.problem import Goal, Line, Network, Pair, Provider
from ravnest.planner.proposal import Proposal
from ravnest.planner.reliability import expected_absent
from ravnest.planner.search.fixed_layout import ClusterLayout, laid_out
from ravnest.planner.search.preference.few_in_flight import cores_in_use
from ravnest.planner.search.preference.settle import settled
from ravnest.planner.search.search import form
from ravnest.planner.search.split_choice import choose_split, split_reason
from ravnest.planner.search.version_choice import choose_versions
from ravnest.planner.shared_limits import period_on_hosts
from ravnest.settings import Pipeline
from ravnest.units import counted

_MEASURED_PLANS = 8
"""Maximum number of plans, each with the measured lines of the one before. If lines between machines are slower than
those to the coordinator, unmeasured lines look better, and each plan uses other ones."""


MEASURING = "measuring the lines between providers"
"""The step of a run that `RunPlanner` reports."""


def goal_of(job: Job, providers: int | None, clusters: int | None) -> Goal:
    """The goal that the settings of the job and its requester give.

    A given number of clusters is exact; with a number of providers too, each of these has a stage. Otherwise the
    planner chooses the number of clusters. PlanError if there are fewer providers than clusters.
    """
    check_clusters(providers, clusters)
    pipeline, averaging = job.pipeline, job.averaging
    min_providers = providers if providers is not None and clusters is not None else 0
    return Goal(
        in_flight=pipeline.in_flight,
        max_staleness=pipeline.max_staleness,
        accumulate=pipeline.accumulate,
        predicts=choose_correction(job)[0] in PREDICTING,
        average_share=averaged_bytes(averaging) / 4,
        average_memory=averaging_memory(job),
        blocking=averaging.blocking,
        codecs=codecs_of(pipeline),
        min_clusters=clusters or 1,
        max_clusters=clusters,
        min_stages=max(1, min_providers // (clusters or 1)),
        min_providers=min_providers,
    )


def codecs_of(pipeline: Pipeline) -> tuple[str, ...]:
    """The codecs that activations and gradients may use."""
    # A job with one microbatch in flight wants the results of a plain loop: exact values.
    codec = pipeline.codec or ("float32" if pipeline.in_flight == 1 else None)
    if codec is None:
        return CHOICES
    return EXACT if codec == "float32" else (codec,)


def model_costs(prepared: PreparedJob) -> ModelCosts:
    """The prepared model's tables."""
    captured = prepared.captured
    sizes = {name: fed_bytes(tensor) for name, tensor in captured.sample.items()}
    return count_costs(captured.graph, prepared.costs, sizes, prepared.job.pipeline.cuts)


def check_stages(model: ModelCosts, stages: int) -> None:
    """PlanError, with the possible number, if the model cannot be cut into this many stages."""
    possible = model.max_stages
    if stages > possible:
        raise PlanError(
            f"the model can be cut into at most {possible} stage{'s' if possible > 1 else ''}, not {stages} "
            f"(each stage needs a trainable parameter of its own); use --providers {possible} or fewer"
        )


def plan_members(
    prepared: PreparedJob,
    providers: Sequence[Provider],
    network: Network,
    goal: Goal,
    layouts: Sequence[ClusterLayout] = (),
    *,
    seed: int = 0,
    seconds: float | None = None,
    known: Sequence[Cluster] = (),
) -> Plan:
    """The plan of a run with these providers; PlanError if the model does not fit or cannot be averaged.

    With `layouts`, the clusters are fixed. `seed`, `seconds` and `known` are arguments of the search.
    """
    asked = goal
    model, graph = model_costs(prepared), prepared.captured.graph
    if goal.min_clusters == 1:
        check_stages(model, goal.min_stages)
    by_name = {p.name: p for p in providers}

    def search(goal: Goal) -> Proposal:
        if layouts:
            return laid_out(model, goal, network, by_name, layouts)
        found = form(model, goal, network, providers, seed=seed, seconds=seconds, known=known)
        return settled(model, goal, network, by_name, found)

    versions = prepared.job.pipeline.versions
    chosen = choose_versions(model, within_averaging(graph, goal), providers, versions, search)
    found, goal = chosen.plan, chosen.goal
    averaged = None
    if len(found.clusters) > 1:
        averaged = averaging_of(prepared.job.averaging, graph, model, goal, network, by_name, found)
        found, goal = averaged.plan, averaged.goal
    slowed = slowed_over_run(prepared.job, found)
    basis = Basis(model, goal, network, by_name, asked)
    plan = Plan(
        clusters=_cluster_plans(prepared, basis, found),
        reason="; ".join((_reason(found, slowed, averaged), *_kept_back(found, providers), *chosen.plan.preferences)),
        basis=basis,
        steady_samples_per_second=found.predicted_samples_per_second,
        score=found.score,
        limit=found.limit,
        averaging_seconds=found.averaging_seconds,
        versions_reason=chosen.reason,
        slowed=slowed,
    )
    return plan if averaged is None else _with_averaging(plan, averaged)


def _with_averaging(plan: Plan, averaged: AveragingOf) -> Plan:
    position = {stage.node: (stage.cluster, stage.stage) for stage in plan.stages}
    return replace(
        plan,
        ring_stages=tuple(
            RingStages(
                each.part.fragment,
                tuple(position[owner] for owner in each.part.ring.owners),
                each.part.tensors,
                each.codec.codec,
                each.piece_values,
            )
            for each in averaged.parts
        ),
        round_seconds=averaged.basis.time.seconds,
        average_every=averaged.interval.samples,
        average_reason=averaged.reason,
        round_basis=averaged.basis,
    )


def slowed_over_run(job: Job, plan: Proposal) -> float:
    """Share of a plan's rate over a whole run that has fewer in flight while its learning rate is high."""
    allowed = {stages: allowed_in_run(job, stages) for stages in {len(cluster.stages) for cluster in plan.clusters}}
    left = [
        rate * slowed_by_caution(cluster, allowed[len(cluster.stages)])
        for cluster, rate in zip(plan.clusters, plan.rates, strict=True)
    ]
    together = sum(plan.rates)
    return sum(left) / together if together else 1.0


def _reason(found: Proposal, slowed: float, averaged: AveragingOf | None) -> str:
    rate = f"{slowed * found.predicted_samples_per_second:.1f} samples/s"
    fewer = ", with fewer in flight while the learning rate is high" if slowed < 1 else ""
    if averaged is None:
        cluster = found.clusters[0]
        return (
            f"{counted(len(cluster.stages), 'stage')}, {counted(cluster.in_flight, 'microbatch', 'microbatches')} in "
            f"flight; {rate}, limited by {found.limit or cluster.limit}{fewer}"
        )
    return (
        f"{len(found.clusters)} clusters of {_and([str(len(c.stages)) for c in found.clusters])} stages; {rate} "
        f"together{', limited by ' if found.limit else ''}{found.limit}{fewer}; {averaged.reason}"
    )


def _kept_back(found: Proposal, providers: Sequence[Provider]) -> list[str]:
    """The standbys kept back for providers that are expected to be missing, in words; empty if there are none."""
    absent = expected_absent(p.reliability for p in providers)
    if not absent or not found.standbys:
        return []
    missing = sum(1 - p.reliability for p in providers)
    kept = counted(min(absent, len(found.standbys)), "standby", "standbys")
    return [f"{kept} kept back, as {missing:.2g} of {counted(len(providers), 'provider')} are likely to be missing"]


def _cluster_plans(prepared: PreparedJob, basis: Basis, found: Proposal) -> tuple[ClusterPlan, ...]:
    providers, goal = basis.providers, basis.goal
    if len(found.clusters) == 1:
        # A cluster alone keeps nothing for averaging.
        goal = replace(goal, min_clusters=1, max_clusters=1)
    plans = []
    in_use = cores_in_use(basis.network, providers, found.clusters)
    on_hosts = period_on_hosts(basis.network, providers, found.clusters)
    for number, (cluster, rate) in enumerate(zip(found.clusters, found.rates, strict=True)):
        choices = [
            choose_split(
                cluster,
                position,
                providers[stage.provider].memory_bytes,
                prepared.job.pipeline.split_backward,
                on_hosts[number],
            )
            for position, stage in enumerate(cluster.stages)
        ]
        plans.append(
            ClusterPlan(
                id=number,
                stages=stages_of(prepared.captured.graph, cluster, number, [choice.split for choice in choices]),
                in_flight=cluster.in_flight,
                ahead=feed_ahead(cluster, providers),
                predicted_samples_per_second=rate,
                flight_reason=cluster.flight_reason,
                samples=cluster.samples,
                split_reason=split_reason(choices),
                max_in_flight=max_in_flight(basis.model, goal, providers, cluster),
                cores_in_use=in_use[number],
                feed_seconds=feed_seconds(cluster, providers),
            )
        )
    return tuple(plans)


class RunPlanner:
    """Planner of a run over the members of its swarm; it keeps the measured lines between them."""

    def __init__(
        self, swarm: Swarm, machine: Machine, believed: ObservedLimits, on_measuring: Callable[[str], None]
    ) -> None:
        """`on_measuring` is called when lines are being measured."""
        self.lines: dict[Pair, Line] = {}
        """Measured lines between providers."""
        self._swarm = swarm
        self._machine = machine
        self._believed = believed
        self._on_measuring = on_measuring

    async def plan(
        self,
        prepared: PreparedJob,
        members: Sequence[Member],
        goal: Goal,
        layouts: Sequence[ClusterLayout] = (),
        *,
        begin: Plan | None = None,
        pays: Callable[[Plan], bool] = lambda plan: True,
        known: Sequence[Cluster] = (),
    ) -> Plan:
        """The plan of a run with these members, after the lines that it uses are measured. PlanError, as
        `plan_members`.

        `begin` is an earlier plan: it is returned if it still holds, and replaced if providers, lines or the goal have
        changed since. Lines are measured as long as the plan `pays`; one that does not is returned at once. With
        `layouts`, nothing is measured: the clusters are fixed anyway.
        """
        reaches = await self._swarm.reaches(members)
        providers = [
            provider_of(
                member,
                prepared.costs,
                reaches[member.node_id],
                self._machine,
                self._believed,
                self._swarm.members.reliability(member.node_id).value,
            )
            for member in members
        ]
        by_name = {p.name: p for p in providers}
        for _ in range(_MEASURED_PLANS):
            network = Network(dict(self.lines), requester_of(members, self._machine))
            if begin is not None and begin.basis.holds_for(goal, network, by_name):
                planned = begin
            else:
                planned = await asyncio.to_thread(
                    plan_members, prepared, providers, network, goal, layouts, known=known
                )
            if layouts or not pays(planned):
                break
            missing = [
                pair
                for pair in lines_to_measure(planned, by_name, network)
                if all(self._swarm.members[node].link.is_expected for node in pair)
            ]
            if not missing:
                break
            self._on_measuring(MEASURING)
            for pair, found in (await measure_pairs(self._swarm, missing)).items():
                self.lines.update(measured_lines(pair, found, by_name, network))
        return planned


def lines_to_measure(planned: Plan, providers: Mapping[str, Provider], network: Network) -> list[Pair]:
    """The pairs that measure their line: neighbours in a cluster or a ring, whose line is unknown and can be dialled.
    One measurement covers both directions."""
    neighbours = [pair for cluster in planned.clusters for pair in itertools.pairwise(cluster.providers)]
    neighbours += [(cluster.providers[-1], cluster.providers[0]) for cluster in planned.clusters if cluster.looks_up]
    neighbours += [pair for ring in planned.rings for pair in itertools.pairwise((*ring.owners, ring.owners[0]))]
    missing: dict[frozenset[str], Pair] = {}
    for before, after in neighbours:
        one, other = providers[before], providers[after]
        if (before, after) in network.measured or one.machine == other.machine or network.relayed(one, other):
            continue
        missing.setdefault(frozenset((before, after)), (before, after) if other.reachable else (after, before))
    return list(missing.values())


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))

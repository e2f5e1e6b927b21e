"""From the members of a swarm to a plan for a run: what each said it measured, as the planner takes it.

The lines between providers are measured where a plan would use them: it is planned with what each said of its own
line, the lines between neighbours of that plan are measured, and it is planned again with what was found.
"""

import asyncio
import ipaddress
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ravnest.coordinator.plan.averaging import averaged_bytes, averaging_memory, averaging_of, within_averaging
from ravnest.coordinator.plan.cluster_count import check_clusters
from ravnest.coordinator.plan.lr_schedule import allowed_in_run
from ravnest.coordinator.plan.observed_limits import Believed
from ravnest.coordinator.plan.prepared_job import Prepared, choose_correction
from ravnest.coordinator.swarm.link_measurements import measure_pairs
from ravnest.coordinator.swarm.members import Member
from ravnest.coordinator.swarm.reachability import Reach
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.engine.corrections.correction import PREDICTING
from ravnest.errors import PeerError, PlanError
from ravnest.graph.portable import PortableGraph
from ravnest.graph.profile import CostProfile
from ravnest.job import Job
from ravnest.net.probe.measuring import LinkSpeed
from ravnest.planner.cluster import Cluster, StageCost
from ravnest.planner.in_flight.decision import max_in_flight
from ravnest.planner.in_flight.lr_bound import slowed_by_caution
from ravnest.planner.link_codecs import CHOICES, EXACT
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.plan import Plan
from ravnest.planner.problem import Goal, Line, Network, Pair, Provider, Requester
from ravnest.planner.run_plan import Basis, ClusterPlan, RingPlan, RunPlan, flight_reason, split_reason
from ravnest.planner.search.fixed_layout import Layout, laid_out
from ravnest.planner.search.search import form
from ravnest.planner.search.split_choice import choose_split
from ravnest.planner.search.version_choice import choose_versions
from ravnest.planner.stage_plan import stages_of
from ravnest.settings import Pipeline
from ravnest.units import counted

SPEEDS = (1e-5, 1e5)
"""How fast a machine may be against the one that measured the model, for what it says to be believed."""
RATES = (1e3, 1e12)
"""Bytes a second of a line."""
MAX_LATENCY_SECONDS = 10.0
MAX_STAGE_SECONDS = 3600.0

OPERATOR_SECONDS = 100e-6
"""What a GPU takes to start an operator and its backward. Measured with small models on an NVIDIA H200."""

_AHEAD = 2
_MAX_AHEAD = 32
"""More would wait at a stage than it may be told to keep."""
_AWAY_SECONDS = 2.0
_AWAY_BYTES = 8 << 20
"""For so long a cluster can go on without its coordinator, if that is no more than so many bytes."""

_MEASURED_PLANS = 8
"""How often it is planned anew with the lines that the plan before would have used. Where lines between machines are
slower than those to the coordinator, what is not measured yet looks better than what is, and each plan uses others."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The coordinator's own machine, whose cores the providers on it share."""

    cores: int
    threads: int
    """What each of them computes with, unless it says so itself."""

    @property
    def host(self) -> str:
        return "this machine"


def goal_of(job: Job, providers: int | None, clusters: int | None) -> Goal:
    """What the job and its requester fix about a plan.

    With a number of clusters there are exactly so many, and with one of providers too, each of these has a stage.
    Without one of clusters, there are as many as is best. PlanError where there are fewer providers than clusters.
    """
    check_clusters(providers, clusters)
    pipeline, averaging = job.pipeline, job.averaging
    everybody = providers if providers is not None and clusters is not None else 0
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
        min_stages=max(1, everybody // (clusters or 1)),
        min_providers=everybody,
    )


def codecs_of(pipeline: Pipeline) -> tuple[str, ...]:
    """What activations and gradients may travel in."""
    # One in flight is asked for by those who want what a plain loop gives: nothing is lost on the way then.
    codec = pipeline.codec or ("float32" if pipeline.in_flight == 1 else None)
    if codec is None:
        return CHOICES
    return EXACT if codec == "float32" else (codec,)


def model_costs(prepared: Prepared) -> ModelCosts:
    """The prepared model's tables."""
    captured = prepared.captured
    sizes = {name: tensor.nbytes for name, tensor in captured.sample.items()}
    return ModelCosts.of(captured.graph, prepared.costs, sizes, prepared.job.pipeline.cuts)


def check_stages(model: ModelCosts, stages: int) -> None:
    """PlanError where the model cannot be cut into so many; it says into how many it can."""
    possible = model.max_stages
    if stages > possible:
        raise PlanError(
            f"the model can be cut into at most {possible} stage{'s' if possible > 1 else ''}, not {stages} "
            f"(each stage needs a trainable parameter of its own); use --providers {possible} or fewer"
        )


def plan_members(
    prepared: Prepared,
    providers: Sequence[Provider],
    network: Network,
    goal: Goal,
    layouts: Sequence[Layout] = (),
) -> RunPlan:
    """The plan of a run with these providers; PlanError where the model does not fit, or cannot be averaged. Where
    there are `layouts`, the clusters lie so, and nothing better is looked for."""
    model, graph = model_costs(prepared), prepared.captured.graph
    if goal.min_clusters == 1:
        check_stages(model, goal.min_stages)
    by_name = {p.name: p for p in providers}
    chosen = choose_versions(
        model,
        within_averaging(graph, goal),
        providers,
        prepared.job.pipeline.versions,
        lambda goal: (
            laid_out(model, goal, network, by_name, layouts) if layouts else form(model, goal, network, providers)
        ),
    )
    plan, goal = chosen.plan, chosen.goal
    basis = Basis(model, goal, network, by_name)
    asked = prepared.job.pipeline.split_backward
    slowed = slowed_over_run(prepared.job, plan)
    fewer = ", with fewer in flight while the learning rate is high" if slowed < 1 else ""
    if len(plan.clusters) == 1:
        cluster = plan.clusters[0]
        reason = (
            f"{counted(len(cluster.stages), 'stage')}, {counted(cluster.in_flight, 'microbatch', 'microbatches')} in "
            f"flight; {slowed * plan.predicted_samples_per_second:.1f} samples/s, limited by "
            f"{plan.limit or cluster.limit}{fewer}"
        )
        # A cluster alone keeps nothing for averaging.
        alone = replace(goal, min_clusters=1, max_clusters=1)
        return RunPlan(
            plan,
            _cluster_plans(graph, model, alone, plan, by_name, asked),
            reason,
            versions=goal.versions,
            versions_reason=chosen.reason,
            bound_in_flight=goal.bound_in_flight,
            basis=basis,
            slowed=slowed,
        )
    found = averaging_of(prepared.job.averaging, graph, model, goal, network, by_name, plan)
    plan = found.plan
    reason = (
        f"{len(plan.clusters)} clusters of {_and([str(len(c.stages)) for c in plan.clusters])} stages; "
        f"{slowed * plan.predicted_samples_per_second:.1f} samples/s together"
        f"{', limited by ' if plan.limit else ''}{plan.limit}{fewer}; {found.reason}"
    )
    return RunPlan(
        plan,
        _cluster_plans(graph, model, goal, plan, by_name, asked),
        reason,
        versions=goal.versions,
        versions_reason=chosen.reason,
        bound_in_flight=goal.bound_in_flight,
        rings=tuple(RingPlan(i, part.fragment, part.ring.owners, part.tensors) for i, part in enumerate(found.parts)),
        round_seconds=found.round_seconds,
        average_every=found.every,
        average_reason=found.reason,
        basis=basis,
        slowed=slowed,
    )


def slowed_over_run(job: Job, plan: Plan) -> float:
    """Which part of a plan's rate is left over a whole run that has fewer in flight while its learning rate is high."""
    allowed = {stages: allowed_in_run(job, stages) for stages in {len(cluster.stages) for cluster in plan.clusters}}
    left = [
        rate * slowed_by_caution(cluster, allowed[len(cluster.stages)])
        for cluster, rate in zip(plan.clusters, plan.rates, strict=True)
    ]
    together = sum(plan.rates)
    return sum(left) / together if together else 1.0


def _cluster_plans(
    graph: PortableGraph,
    model: ModelCosts,
    goal: Goal,
    plan: Plan,
    providers: Mapping[str, Provider],
    split: bool | None,
) -> tuple[ClusterPlan, ...]:
    """`split` is what the job says of splitting backwards, if it does."""
    plans = []
    for number, (cluster, rate) in enumerate(zip(plan.clusters, plan.rates, strict=True)):
        choices = [
            choose_split(cluster, position, providers[stage.provider].memory_bytes, split)
            for position, stage in enumerate(cluster.stages)
        ]
        stages = stages_of(graph, cluster, number)
        plans.append(
            ClusterPlan(
                id=number,
                stages=tuple(replace(s, split_backward=c.split) for s, c in zip(stages, choices, strict=True)),
                in_flight=cluster.in_flight,
                ahead=feed_ahead(cluster, providers),
                predicted_samples_per_second=rate,
                flight_reason=flight_reason(cluster),
                split_reason=split_reason(choices),
                max_in_flight=max_in_flight(model, goal, providers, cluster),
                feed_seconds=feed_seconds(cluster, providers),
                line_seconds=cluster.line_seconds,
            )
        )
    return tuple(plans)


def feed_ahead(cluster: Cluster, providers: Mapping[str, Provider]) -> int:
    """How many microbatches are fed beyond those in flight, at the planned rate. Where the coordinator is on another
    machine, enough to go on with for a while when it is gone, if they are small."""
    needed = ahead_of(feed_seconds(cluster, providers), cluster.period_seconds)
    fed = _fed(cluster)
    if not any(providers[stage.provider].latency_seconds for stage in fed):
        return needed
    while_away = min(_AWAY_SECONDS / cluster.period_seconds, _AWAY_BYTES / max(1.0, *(s.fed_bytes for s in fed)))
    return max(needed, _AHEAD + math.ceil(min(_MAX_AHEAD, while_away)))


def ahead_of(feed_seconds: float, period_seconds: float) -> int:
    """How many are fed ahead so that no stage ever waits for the coordinator: as many as are trained on while word of a
    completed one comes and the next goes out, and a few."""
    return _AHEAD + math.ceil(min(_MAX_AHEAD, feed_seconds / period_seconds))


def feed_seconds(cluster: Cluster, providers: Mapping[str, Provider]) -> float:
    """Until word of a completed microbatch has come and the next is with the stage that waits longest for it."""
    return max(
        2 * providers[stage.provider].latency_seconds
        + stage.fed_bytes / providers[stage.provider].down_bytes_per_second
        for stage in _fed(cluster)
    )


def _fed(cluster: Cluster) -> list[StageCost]:
    """Stages that the coordinator sends something of each microbatch: the root in any case, if only word of it."""
    return [stage for number, stage in enumerate(cluster.stages) if number == 0 or stage.fed_bytes]


def check_fit(
    prepared: Prepared,
    members: Sequence[Member],
    machine: Machine,
    clusters: int | None = None,
    believed: Believed | None = None,
) -> None:
    """PlanError where the model does not fit into the memory of these, so many times as clusters are asked for; nothing
    of lines is asked here."""
    anywhere = Reach("", "not asked")
    providers = [provider_of(member, prepared.costs, anywhere, machine, believed) for member in members]
    model = model_costs(prepared)
    choose_versions(
        model,
        goal_of(prepared.job, None, clusters or 1),
        providers,
        prepared.job.pipeline.versions,
        lambda goal: form(model, goal, Network(), providers),
    )


async def plan_measured(
    swarm: Swarm,
    prepared: Prepared,
    members: Sequence[Member],
    goal: Goal,
    machine: Machine,
    tell: Callable[[str], None],
    believed: Believed | None = None,
    lines: dict[Pair, Line] | None = None,
    layouts: Sequence[Layout] = (),
) -> RunPlan:
    """The plan of a run with these members, with the lines that it uses measured. PlanError, as `plan_members`.

    `lines` are those that were measured before; what is measured now is added to them. Of a plan that lies as it did
    nothing is measured: it would be the same.
    """
    reaches = await swarm.reaches(members)
    providers = [provider_of(member, prepared.costs, reaches[member.node_id], machine, believed) for member in members]
    lines = {} if lines is None else lines
    for _ in range(_MEASURED_PLANS):
        network = Network(dict(lines), requester_of(members, machine.host))
        planned = await asyncio.to_thread(plan_members, prepared, providers, network, goal, layouts)
        if layouts:
            break
        missing = lines_to_measure(planned, {p.name: p for p in providers}, network)
        missing = [pair for pair in missing if all(swarm.members[node].link.is_expected for node in pair)]
        if not missing:
            break
        tell("measuring the lines between providers")
        for pair, found in (await measure_pairs(swarm, missing)).items():
            lines.update(measured_lines(pair, found, {p.name: p for p in providers}, network))
    return planned


def lines_to_measure(planned: RunPlan, providers: Mapping[str, Provider], network: Network) -> list[Pair]:
    """Who is to measure the line to whom: neighbours in a cluster or in a ring whose line is not known, and can be
    dialled. One measurement tells of both ways."""
    neighbours = [pair for cluster in planned.plan.clusters for pair in itertools.pairwise(cluster.providers)]
    neighbours += [pair for ring in planned.rings for pair in itertools.pairwise((*ring.owners, ring.owners[0]))]
    missing: dict[frozenset[str], Pair] = {}
    for before, after in neighbours:
        one, other = providers[before], providers[after]
        if (before, after) in network.measured or one.machine == other.machine or network.relayed(one, other):
            continue
        missing.setdefault(frozenset((before, after)), (before, after) if other.reachable else (after, before))
    return list(missing.values())


def measured_lines(
    pair: Pair, found: LinkSpeed | PeerError, providers: Mapping[str, Provider], network: Network
) -> dict[Pair, Line]:
    """What a measurement says of the line both ways; one that failed leaves what both ends say of themselves."""
    here, there = pair
    if isinstance(found, PeerError):
        one, other = providers[here], providers[there]
        return {pair: network.line(one, other), (there, here): network.line(other, one)}
    latency = _latency(found)
    return {
        pair: Line(_believed(found.up_bytes_per_second, RATES), latency),
        (there, here): Line(_believed(found.down_bytes_per_second, RATES), latency),
    }


def provider_of(
    member: Member, costs: CostProfile, reach: Reach, machine: Machine, believed: Believed | None = None
) -> Provider:
    """A member as the planner sees it; where it says what is not so, as far as it is believed."""
    here, lent = _is_here(member.host), member.machine
    on_processor = lent.device.startswith("cpu")
    # One that was not measured is as fast as the machine that measured the model, or pretends not to be.
    unmeasured = 1.0 / max(1.0, lent.slower)
    flops = lent.speed.flops_in(costs.precision)
    slowness = 1.0 if believed is None else believed.slowness(member.node_id)
    provider = Provider(
        name=member.node_id,
        memory_bytes=lent.memory_bytes if believed is None else believed.memory_bytes(member),
        compute_speed=_relative(flops, costs.flops_per_second, unmeasured * costs.precision_speed) / slowness,
        memory_speed=_relative(lent.speed.memory_bytes_per_second, costs.memory_bytes_per_second, unmeasured)
        / slowness,
        operator_seconds=0.0 if on_processor else slowness * OPERATOR_SECONDS,
        min_stage_seconds=slowness * min(lent.stage_seconds, MAX_STAGE_SECONDS),
        reachable=bool(reach.address),
        host=machine.host if here else "",
        cores=machine.cores if here else lent.cores,
        # What it pretends to compute longer, it waits.
        threads=(lent.threads or machine.threads) / max(1.0, lent.slower) if on_processor else 1,
    )
    line = member.link.speed
    if line is None or here:
        return provider
    return replace(
        provider,
        up_bytes_per_second=_believed(line.up_bytes_per_second, RATES),
        down_bytes_per_second=_believed(line.down_bytes_per_second, RATES),
        latency_seconds=_latency(line),
    )


def requester_of(members: Sequence[Member], host: str) -> Requester:
    """The coordinator's own line, which is at least as fast as the fastest that was measured to it."""
    lines = [member.link.speed for member in members if not _is_here(member.host)]
    links = [line for line in lines if line is not None]
    if not links:
        return Requester(host)
    return Requester(
        host,
        up_bytes_per_second=_believed(max(link.down_bytes_per_second for link in links), RATES),
        down_bytes_per_second=_believed(max(link.up_bytes_per_second for link in links), RATES),
    )


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _relative(speed: float, reference: float, unmeasured: float) -> float:
    """How fast a machine is against the one that measured the model; `unmeasured`, where one of them was not."""
    return _believed(speed / reference if speed > 0 and reference > 0 else unmeasured, SPEEDS)


def _latency(link: LinkSpeed) -> float:
    return min(link.round_trip_seconds / 2, MAX_LATENCY_SECONDS)


def _believed(figure: float, limits: tuple[float, float]) -> float:
    """A figure as a machine gave it, within what is believed: no plan is to hang on one that says it cannot compute."""
    return min(max(figure, limits[0]), limits[1])


def _is_here(host: str) -> bool:
    """Whether a provider is on the coordinator's own machine: other machines do not connect from its loopback."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"

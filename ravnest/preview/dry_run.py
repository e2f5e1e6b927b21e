"""Dry run of `ravnest plan`: captures and profiles a job, and plans it for the machines of a nodes.toml."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ravnest.coordinator.launch.interrupts import Interrupts
from ravnest.coordinator.plan.plan_run import goal_of, plan_members
from ravnest.coordinator.plan.prepared_job import prepare
from ravnest.jobfile import load_job
from ravnest.overrides import apply_overrides
from ravnest.planner.cluster import Cluster
from ravnest.planner.explain.explain import Explanation, explain
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.plan import Plan
from ravnest.planner.problem import Goal, Line, Network, Provider
from ravnest.planner.proposal import Proposal
from ravnest.planner.recovery.state_periods import StatePeriods, planned_periods
from ravnest.planner.rings.rings import Ring, rings_of
from ravnest.planner.search.search import form
from ravnest.preview.module_names import Parts
from ravnest.preview.nodes_file import NodesFile

MAX_SEARCHED: Final = 12
"""With up to this many machines, each what-if is planned from scratch; with more, the search starts from the plan."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """A plan with everything that is needed to show it."""

    title: str
    plan: Plan
    parts: Parts
    rings: tuple[Ring, ...] = ()
    """Empty if there is one cluster only."""
    explanation: Explanation | None = None
    """The reasons for the plan, and changes that would improve it."""
    state: StatePeriods | None = None
    """How often state would travel, and what a loss would cost."""
    devices: Mapping[str, str] = field(default_factory=dict)
    """Descriptions of the machines by name."""

    @property
    def clusters(self) -> tuple[Cluster, ...]:
        """The predicted costs of each cluster."""
        return tuple(cluster.cost for cluster in self.plan.clusters)

    @property
    def providers(self) -> Mapping[str, Provider]:
        return self.plan.basis.providers

    @property
    def network(self) -> Network:
        return self.plan.basis.network

    @property
    def goal(self) -> Goal:
        return self.plan.basis.goal

    @property
    def model(self) -> ModelCosts:
        return self.plan.basis.model

    def line_before(self, cluster: Cluster, stage: int) -> tuple[Line, Line] | None:
        """The line from the previous stage, and the line back to it; for a first stage that gets looked-up rows from
        the last, the lines between these two; None without a link."""
        previous = cluster.before(stage)
        if previous is None:
            return None
        before, here = (self.providers[cluster.stages[k].provider] for k in (previous, stage))
        return self.network.line(before, here), self.network.line(here, before)

    def relayed(self, cluster: Cluster, stage: int) -> bool:
        """Whether traffic between this stage and the previous one, as of `line_before`, goes through the requester."""
        previous = cluster.before(stage)
        if previous is None:
            return False
        before, here = (self.providers[cluster.stages[k].provider] for k in (previous, stage))
        return self.network.relayed(before, here)

    def staleness(self, cluster: Cluster) -> int:
        """The maximum number of updates between a microbatch's forward and its backward, at the first stage."""
        return -(-(cluster.in_flight - 1) // self.goal.accumulate)


def dry_run(
    reference: str,
    nodes: NodesFile,
    *,
    title: str,
    overrides: Sequence[str] = (),
    max_clusters: int | None = None,
    min_stages: int = 1,
    seed: int = 0,
    seconds: float | None = None,
    interrupts: Interrupts,
    tell: Callable[[str], None] = lambda phase: None,
) -> DryRun:
    """Capture and profile the job on this machine, and plan it for the machines of the file.

    JobError or CaptureError for a mistake in the job; PlanError if the model does not fit the machines.
    """
    job = apply_overrides(load_job(reference), overrides)
    interrupts.check()
    prepared = prepare(job, None, None, tell, interrupts.users_code)
    costs, captured = prepared.costs, prepared.captured
    providers = nodes.providers(costs.flops_per_second, costs.memory_bytes_per_second, costs.precision_speed)
    tell(f"planning for {len(providers):,} machine{'s' if len(providers) > 1 else ''}")
    goal = replace(goal_of(job, None, None), min_stages=min_stages, max_clusters=max_clusters)
    plan = plan_members(prepared, providers, nodes.network, goal, seed=seed, seconds=seconds)
    basis, found = plan.basis, plan.proposal
    rings: tuple[Ring, ...] = ()
    if len(plan.clusters) > 1:
        rings = rings_of(found, basis.model, basis.network, basis.providers)
    tell("searching for improvements")

    def search(goal: Goal, network: Network, others: Sequence[Provider]) -> Proposal:
        return form(basis.model, goal, network, others, seed=seed)

    few = len(providers) <= MAX_SEARCHED
    return DryRun(
        title=title,
        plan=plan,
        parts=Parts.of(captured.graph),
        rings=rings,
        explanation=explain(basis.model, basis.goal, basis.network, basis.providers, found, search if few else None),
        state=planned_periods(
            [cluster.cost for cluster in plan.clusters],
            basis.model,
            basis.providers,
            basis.network.requester,
            job.checkpoint.every_seconds,
            is_exact=job.checkpoint.exact,
        ),
        devices=nodes.devices,
    )

"""`ravnest plan`: a job planned for machines of a file, and nothing run but the capture and the profile."""

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
from ravnest.planner.rings.rings import Ring, rings_of
from ravnest.planner.search.search import form
from ravnest.preview.module_names import Parts
from ravnest.preview.nodes_file import NodesFile

MAX_SEARCHED: Final = 12
"""Up to so many machines, what would be with others is planned anew; for more, it is looked for close to the plan."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """A plan with all that is needed to tell it."""

    title: str
    plan: Plan
    parts: Parts
    rings: tuple[Ring, ...] = ()
    """Who averages with whom; none where there is one cluster."""
    explanation: Explanation | None = None
    """Why it is as it is, and what would make it better."""
    devices: Mapping[str, str] = field(default_factory=dict)
    """What the machines are, for the reader."""

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
        """The line from the stage before, and the one back; None for the first stage."""
        if stage == 0:
            return None
        before, here = (self.providers[cluster.stages[k].provider] for k in (stage - 1, stage))
        return self.network.line(before, here), self.network.line(here, before)

    def relayed(self, cluster: Cluster, stage: int) -> bool:
        """Whether the requester passes on what this stage and the one before send one another."""
        if stage == 0:
            return False
        before, here = (self.providers[cluster.stages[k].provider] for k in (stage - 1, stage))
        return self.network.relayed(before, here)

    def staleness(self, cluster: Cluster) -> int:
        """Updates between a microbatch's forward and its backward, at most, at the first stage."""
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
    """Captures and profiles the job here, and plans it for the machines of the file.

    JobError or CaptureError where the job is at fault; PlanError where the model does not fit.
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
    tell("looking at what would make it better")

    def search(goal: Goal, network: Network, others: Sequence[Provider]) -> Proposal:
        return form(basis.model, goal, network, others, seed=seed)

    few = len(providers) <= MAX_SEARCHED
    return DryRun(
        title=title,
        plan=plan,
        parts=Parts.of(captured.graph),
        rings=rings,
        explanation=explain(basis.model, basis.goal, basis.network, basis.providers, found, search if few else None),
        devices=nodes.devices,
    )

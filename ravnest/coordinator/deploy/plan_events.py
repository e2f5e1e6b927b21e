"""Plan events: an event with the reason for each choice of a plan, and messages to the user, before it is deployed."""

from ravnest.coordinator.plan.lr_scaling import rate_factor
from ravnest.coordinator.plan.prepared_job import choose_correction
from ravnest.coordinator.run.context import RunContext
from ravnest.job import Job
from ravnest.planner.plan import Plan
from ravnest.version_policy import DEFAULT_POLICY


def tell_plan(context: RunContext, plan: Plan, job: Job) -> None:
    """Tells which provider gets which stage, which policies the planner chose, and why."""
    context.emit(
        "planned",
        plan.reason,
        predicted_samples_per_second=plan.predicted_samples_per_second,
        stages=[
            {"cluster": s.cluster, "provider": s.node, "role": s.role, "parameters": s.parameters} for s in plan.stages
        ],
        places=[cluster.places for cluster in plan.clusters],
        in_flight=[cluster.in_flight for cluster in plan.clusters],
        versions=plan.versions,
        standbys=plan.standbys,
    )
    context.emit("versions", plan.versions_reason, versions=plan.versions)
    for cluster in plan.clusters:
        context.emit("in_flight", cluster.flight_reason, cluster=cluster.id, old=None, new=cluster.in_flight)
        if cluster.split_reason:
            split = [stage.stage for stage in cluster.stages if stage.split_backward]
            context.emit("split_backward", cluster.split_reason, cluster=cluster.id, stages=split)
        for stage in cluster.stages:
            before = cluster.cost.before(stage.stage)
            if before is None:
                continue
            rows = ", looked-up rows" if before > stage.stage else ""
            context.emit(
                "codec",
                f"stage {before} to {stage.stage}{rows}: {stage.cost.codec_reason}",
                cluster=cluster.id,
                stage=stage.stage,
                codec=stage.codec,
            )
    correction, why = choose_correction(job)
    if any(cluster.in_flight > 1 for cluster in plan.clusters):
        context.emit("correction", why, correction=correction)
        if correction == "none" and job.pipeline.correction not in (None, "none"):
            context.say(f"warning: {why}")
    if plan.rings:
        context.emit(
            "rings",
            plan.average_reason,
            rings=len(plan.rings),
            samples=plan.average_every,
            round_seconds=plan.round_seconds,
        )
        rate = rate_factor(job, len(plan.clusters))
        context.emit("rate", rate.reason, factor=rate.factor)
        context.say(rate.reason)
    context.say(f"plan: {plan.reason}")
    if plan.versions != DEFAULT_POLICY:
        context.say(f"plan: {plan.versions_reason}")

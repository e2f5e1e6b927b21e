"""What a run tells of its plan before it is deployed: an event with its reason for each choice, and lines on screen."""

from ravnest.coordinator.plan.lr_scaling import rate_factor
from ravnest.coordinator.plan.prepared_job import choose_correction
from ravnest.coordinator.run.context import Course
from ravnest.job import Job
from ravnest.monitor.display import Display
from ravnest.planner.plan import Plan
from ravnest.version_policy import DEFAULT_POLICY


def tell_plan(course: Course, display: Display, plan: Plan, job: Job) -> None:
    """Tells who holds what, which policies were chosen, and why."""
    course.emit(
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
    course.emit("versions", plan.versions_reason, versions=plan.versions)
    for cluster in plan.clusters:
        course.emit("in_flight", cluster.flight_reason, cluster=cluster.id, old=None, new=cluster.in_flight)
        if cluster.split_reason:
            split = [stage.stage for stage in cluster.stages if stage.split_backward]
            course.emit("split_backward", cluster.split_reason, cluster=cluster.id, stages=split)
        for stage in cluster.stages[1:]:
            course.emit(
                "codec",
                f"stage {stage.stage - 1} to {stage.stage}: {stage.cost.codec_reason}",
                cluster=cluster.id,
                stage=stage.stage,
                codec=stage.codec,
            )
    correction, why = choose_correction(job)
    if any(cluster.in_flight > 1 for cluster in plan.clusters):
        course.emit("correction", why, correction=correction)
        if correction == "none" and job.pipeline.correction not in (None, "none"):
            display.message(f"warning: {why}")
    if plan.rings:
        course.emit("rings", plan.average_reason, rings=len(plan.rings), samples=plan.average_every)
        rate = rate_factor(job, len(plan.clusters))
        course.emit("rate", rate.reason, factor=rate.factor)
        display.message(rate.reason)
    display.message(f"plan: {plan.reason}")
    if plan.versions != DEFAULT_POLICY:
        display.message(f"plan: {plan.versions_reason}")

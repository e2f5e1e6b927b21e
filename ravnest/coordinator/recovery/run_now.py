"""State of a run at one moment, for the explanation of a standstill."""

import time

from ravnest.coordinator.deploy.current_deployment import CurrentDeployment
from ravnest.coordinator.deploy.present_planner import PresentPlanner
from ravnest.coordinator.health.standstill import RunNow
from ravnest.coordinator.health.standstill_watch import cluster_now
from ravnest.coordinator.run.job_run import JobRun


def run_now(run: JobRun, current: CurrentDeployment, planner: PresentPlanner) -> RunNow | None:
    """The state of the run; None once its last checkpoint has been taken, when nothing more is to be completed."""
    context, deployment, now = run.context, current.deployment, time.monotonic()
    if run.walk.is_over:
        return None
    waits = []
    if planner.is_waiting:
        waits.append("the connected providers cannot hold the model, and the run waits for others")
    if deployment is None:
        return RunNow(context.progress.activity, waits=tuple(waits))
    if run.dispatcher.paused:
        waits.append(f"nothing new is fed: {run.dispatcher.paused}")
    if deployment.rounds is not None and deployment.rounds.under_way:
        waits.append("a round of averaging is under way")
    if run.checkpointer.under_way:
        waits.append("a checkpoint is being written")
    records = context.members.records
    silent = {node: now - (records[node].reported_at or current.began_at) for node in deployment.stage_of}
    clusters = tuple(cluster_now(each, context.progress.reports, silent) for each in deployment.clusters.whole)
    return RunNow(context.progress.activity, clusters, run.walk.data_seconds, tuple(waits))

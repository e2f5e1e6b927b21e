"""Rollout: puts a plan into effect as the current deployment."""

import asyncio

from ravnest.coordinator.deploy.current_deployment import CurrentDeployment
from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.deploy.deployment_record import DeploymentRecord
from ravnest.coordinator.plan.prepared_job import PreparedJob
from ravnest.coordinator.replicas.part_uploads import PartUploads
from ravnest.coordinator.replicas.sources import DeploymentAbortedError, ReplicaSources
from ravnest.coordinator.report.phase import Phase
from ravnest.coordinator.run.job_run import JobRun
from ravnest.planner.plan import Plan


class Rollout:
    """The rollouts of one run. All methods run on the network's event loop."""

    def __init__(self, run: JobRun, current: CurrentDeployment, uploads: PartUploads) -> None:
        """`uploads` receives the parts of replicas that are collected as checkpoints."""
        self._run = run
        self._uploads = uploads
        self._current = current

    def create(
        self,
        prepared: PreparedJob,
        plan: Plan,
        sources: ReplicaSources | None = None,
        record: DeploymentRecord | None = None,
    ) -> Deployment:
        """Makes a deployment current in place of the one before; see `Deployment`. Its clusters are not fed yet."""
        before = self._current.deployment
        if before is not None:
            before.close()
        deployment = Deployment(self._run, self._uploads, prepared, plan, sources, record)
        for cluster in deployment.clusters.all:
            cluster.begin_forming("it is being deployed")
        deployment.begin()
        self._current.replace(deployment)
        self._run.context.recorder.deployed(plan.stages)
        return deployment

    def undo(self, deployment: Deployment) -> None:
        """Closes a deployment with which nothing was trained, as if there had been none."""
        deployment.close()
        self._run.checkpointer.reset()
        self._current.reset()

    async def deploy(self, deployment: Deployment) -> None:
        """Returns when all stages are built and linked. DeploymentAbortedError if a provider of the plan is lost."""
        context, plan = self._run.context, deployment.plan
        members = [context.members[stage.node] for stage in plan.stages if stage.node in context.members]
        if len(members) < len(plan.stages):
            raise DeploymentAbortedError("a provider of the plan is gone")
        if (state := context.swarm.state) is not None:
            await asyncio.to_thread(state.changes)
            await asyncio.to_thread(state.planned, [stage.node for stage in plan.stages])
            await asyncio.to_thread(state.reached, context.position())
        context.enter(Phase.DEPLOYING)
        await deployment.deploy(members)
        await self.announce(deployment)

    async def announce(self, deployment: Deployment) -> None:
        """All stages are ready: the progress shows them, and providers delete what belongs to earlier deployments."""
        context, progress = self._run.context, self._run.context.progress
        members = [context.members[node] for node in deployment.stage_of if node in context.members]
        progress.devices = {**progress.devices, **{m.node_id: m.machine.device for m in members}}
        progress.plan, progress.clusters, progress.rounds = deployment.plan, deployment.clusters, deployment.rounds
        await deployment.holders.delete_outdated([member.node_id for member in context.members.connected()])

"""Current deployment of a run, for everything that outlives one deployment."""

import time

from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.feed.cluster_state import ClusterRun


class CurrentDeployment:
    """Names the deployment whose messages count. Before the first, there are no clusters and no stages."""

    def __init__(self) -> None:
        self.began_at = 0.0
        """When the current deployment began, on the clock `time.monotonic`."""
        self.max_size = 0, 0
        """The largest numbers of clusters and of stages that a deployment of the run has had."""
        self._deployment: Deployment | None = None

    def replace(self, deployment: Deployment) -> None:
        """This deployment is current from now on. Its stages are about to be deployed."""
        self._deployment, self.began_at = deployment, time.monotonic()
        clusters, stages = self.max_size
        self.max_size = max(clusters, len(deployment.clusters.all)), max(stages, len(deployment.plan.stages))

    def reset(self) -> None:
        """The deployment that was current has been undone: there is none."""
        self._deployment = None

    @property
    def deployment(self) -> Deployment | None:
        """None before the first deployment."""
        return self._deployment

    @property
    def now(self) -> Deployment:
        """The current deployment, for code that runs only after the first one."""
        assert self._deployment is not None, "the run has been deployed"
        return self._deployment

    def is_current(self, deployment: Deployment) -> bool:
        return self._deployment is deployment

    @property
    def clusters(self) -> list[ClusterRun]:
        """The clusters that are not lost."""
        return [] if self._deployment is None else self._deployment.clusters.whole

    def cluster_of(self, node_id: str) -> ClusterRun | None:
        """The cluster in which this provider has a stage, unless it is lost."""
        return None if self._deployment is None else self._deployment.clusters.of(node_id)

    @property
    def stage_of(self) -> dict[str, int]:
        """By provider that holds a stage of such a cluster, the number of the stage."""
        return {} if self._deployment is None else self._deployment.stage_of

"""Artifacts of a deployment: the graph and weights that each provider fetches for its stage."""

from ravnest.coordinator.plan.prepared_job import (
    PreparedJob,
    constants_artifact,
    graph_artifact,
    sources_artifact,
    weights_artifact,
)
from ravnest.coordinator.run.orders import StageFiles
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.net.v1.control_pb2 import Deploy, Hold
from ravnest.planner.plan import StagePlan


class StageArtifacts:
    """The artifacts of one deployment; the swarm serves those that an order names."""

    def __init__(self, swarm: Swarm, prepared: PreparedJob, *, with_rings: bool) -> None:
        self._swarm = swarm
        self._prepared = prepared
        self._with_rings = with_rings

    def name_constants(self, order: Deploy | Hold, stage: StagePlan) -> None:
        """Names the graph and the constants in an order. The constants never change, so no replica has them."""
        self._name(order, StageFiles(graph_artifact(stage), constants_artifact(stage, self._prepared)))

    def name_weights(self, order: Deploy | Hold, stage: StagePlan, prepared: PreparedJob | None = None) -> None:
        """Names the graph and all weights in an order: those of the deployment, or of another state of the job."""
        prepared = prepared or self._prepared
        weights = weights_artifact(stage, prepared, self._with_rings)
        self._name(order, StageFiles(graph_artifact(stage), weights, sources_artifact(stage, prepared)))

    def _name(self, order: Deploy | Hold, files: StageFiles) -> None:
        files.name_in(order)
        self._swarm.artifacts |= {artifact.id: artifact for artifact in files.all}

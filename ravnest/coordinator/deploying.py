"""The orders by which providers take their stages."""

import asyncio
from dataclasses import dataclass
from typing import Self

from ravnest.coordinator.members import Member
from ravnest.coordinator.prepare import Artifact, Prepared, graph_artifact, stage_settings, weights_artifact
from ravnest.net.v1.control_pb2 import ArtifactRef, Deploy
from ravnest.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class Orders:
    """An order for each stage, by the provider that is to take it, and what the orders tell providers to fetch."""

    by_node: dict[str, Deploy]
    artifacts: dict[str, Artifact]

    @classmethod
    async def make(
        cls, prepared: Prepared, plan: Plan, members: list[Member], deployment: str, generation: int
    ) -> Self:
        """Hashes every stage's weights on the way, which takes a moment; RunError where a checkpoint does not fit."""
        made = await asyncio.to_thread(
            lambda: [(graph_artifact(s), weights_artifact(s, prepared)) for s in plan.stages]
        )
        addresses = {member.node_id: member.address for member in members}
        nodes = [stage.node for stage in plan.stages]
        orders = {}
        for number, (node, (graph, weights)) in enumerate(zip(nodes, made, strict=True)):
            following = nodes[number + 1] if number + 1 < len(nodes) else ""
            orders[node] = Deploy(
                deployment=deployment,
                stage=number,
                stages=len(nodes),
                graph=_reference(graph),
                weights=_reference(weights),
                settings_json=stage_settings(prepared.job, number, len(nodes)).to_json(),
                next_address=addresses.get(following, ""),
                next_node=following,
                generation=generation,
                previous_node=nodes[number - 1] if number else "",
            )
        return cls(orders, {artifact.id: artifact for pair in made for artifact in pair})


def _reference(artifact: Artifact) -> ArtifactRef:
    return ArtifactRef(id=artifact.id, sha256=artifact.sha256, size_bytes=artifact.size_bytes)

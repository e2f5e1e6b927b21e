"""The orders by which providers take their stages and link to one another."""

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from ravnest.coordinator.members import Member
from ravnest.coordinator.planning import RunPlan
from ravnest.coordinator.prepare import Artifact, Prepared, graph_artifact, stage_settings, weights_artifact
from ravnest.coordinator.reachability import Reach, choose_dialling
from ravnest.net.v1.control_pb2 import ArtifactRef, Deploy, Neighbour


@dataclass(frozen=True, slots=True)
class LinkOrder:
    """A link between two stages: what each end is told of the other, and why it is dialled as it is."""

    before: str
    after: str
    to_before: Neighbour
    to_after: Neighbour
    reason: str

    @property
    def name(self) -> str:
        return self.to_after.link


@dataclass(frozen=True, slots=True)
class Orders:
    """An order for each stage, by the provider that is to take it, and what the orders tell providers to fetch."""

    by_node: dict[str, Deploy]
    artifacts: dict[str, Artifact]
    links: tuple[LinkOrder, ...]

    @classmethod
    async def make(
        cls,
        prepared: Prepared,
        plan: RunPlan,
        members: Mapping[str, Member],
        reaches: Mapping[str, Reach],
        deployment: str,
        generation: int,
    ) -> Self:
        """Hashes every stage's weights on the way, which takes a moment; RunError where a checkpoint does not fit."""
        made = await asyncio.to_thread(
            lambda: [(graph_artifact(s), weights_artifact(s, prepared)) for s in plan.stages]
        )
        nodes = [stage.node for stage in plan.stages]
        links = tuple(
            order_link(f"{deployment}-{number}", members[before], members[after], reaches)
            for number, (before, after) in enumerate(itertools.pairwise(nodes))
        )
        orders = {}
        for number, (node, (graph, weights)) in enumerate(zip(nodes, made, strict=True)):
            orders[node] = Deploy(
                deployment=deployment,
                stage=number,
                stages=len(nodes),
                graph=_reference(graph),
                weights=_reference(weights),
                settings_json=stage_settings(prepared.job, number, len(nodes), plan.in_flight).to_json(),
                generation=generation,
                previous=links[number - 1].to_before if number else None,
                next=links[number].to_after if number < len(links) else None,
            )
        return cls(orders, {artifact.id: artifact for pair in made for artifact in pair}, links)


def order_link(name: str, before: Member, after: Member, reaches: Mapping[str, Reach]) -> LinkOrder:
    """The link between the stages of these two, dialled by whichever end can."""
    reach_before, reach_after = reaches[before.node_id], reaches[after.node_id]
    earlier, later, reason = choose_dialling(reach_before, reach_after)

    def neighbour(member: Member, reach: Reach, dialling: int) -> Neighbour:
        address = reach.address or member.address
        return Neighbour(node=member.node_id, address=address, link=name, dialling=dialling)  # type: ignore[arg-type]

    return LinkOrder(
        before.node_id,
        after.node_id,
        to_before=neighbour(before, reach_before, later),
        to_after=neighbour(after, reach_after, earlier),
        reason=reason,
    )


def _reference(artifact: Artifact) -> ArtifactRef:
    return ArtifactRef(id=artifact.id, sha256=artifact.sha256, size_bytes=artifact.size_bytes)

"""State sources: the providers that have the parts of a replica, and the transfers of these parts to new stages.

A deployment may cut the model elsewhere than the one before. A stage therefore starts from all parts of the replica
that hold some of its tensors. The parts come from several providers at once, each over its own line, and the receiver
checks them against the hashes that their owners reported. No part passes through the coordinator. When a part has no
source left, `DeploymentAbortedError` ends the attempt to deploy the cluster.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.replicas.replica import Replica
from ravnest.coordinator.run.orders import LinkOrder, order_link, stage_key
from ravnest.coordinator.swarm.members import Member
from ravnest.coordinator.swarm.reachability import Reach
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.graph.portable import PortableGraph
from ravnest.net.v1.control_pb2 import Deploy, Give
from ravnest.planner.plan import StagePlan


class DeploymentAbortedError(Exception):
    """The deployment of a cluster was aborted: one of its providers is gone, or cannot take its stage."""


@dataclass(frozen=True, slots=True)
class PartTransfer:
    """A part that a stage starts from, and the provider that sends it."""

    key: str
    replica: int
    sha256: str
    sender: str
    """Empty when the part is on the receiver's own disk."""


@dataclass(frozen=True, slots=True)
class ReplicaSources:
    """A complete replica as a state source: its stages, and the providers that have their parts."""

    keys: tuple[str, ...]
    """The key of each stage's part."""
    tensors: tuple[frozenset[str], ...]
    """For each stage, the keys of its parameters and states."""
    replica: Replica

    @classmethod
    def of(cls, keys: Sequence[str], graphs: Sequence[PortableGraph], replica: Replica) -> Self:
        return cls(tuple(keys), tuple(_tensor_keys(graph) for graph in graphs), replica)

    def stages_for(self, graph: PortableGraph) -> list[int]:
        """The stages of the replica that hold some of this stage's tensors."""
        needed = _tensor_keys(graph)
        return [stage for stage, tensors in enumerate(self.tensors) if not needed.isdisjoint(tensors)]

    def covers(self, graph: PortableGraph, present: Collection[str]) -> bool:
        """Whether, for every tensor of this stage, a provider that is present has the part."""
        return all(not self.replica.nodes[stage].isdisjoint(present) for stage in self.stages_for(graph))

    def without(self, key: str, node: str) -> Self:
        """The same sources, except that this node does not have the part with this key."""
        nodes = list(self.replica.nodes)
        nodes[self.keys.index(key)] -= {node}
        return replace(self, replica=replace(self.replica, nodes=tuple(nodes)))


def choose_transfers(
    sources: ReplicaSources, stages: Mapping[str, PortableGraph], present: Collection[str]
) -> dict[str, list[PartTransfer]]:
    """For each receiver, the transfers of the parts that its stage starts from.

    A receiver that has a part reads it from its own disk. Otherwise the source with the fewest transfers so far sends
    it, so that as many lines as possible are used at once. KeyError when no provider has a part.
    """
    transfer_counts: Counter[str] = Counter()
    found: dict[str, list[PartTransfer]] = {}
    for receiver, graph in stages.items():
        found[receiver] = []
        for stage in sources.stages_for(graph):
            have = sorted(sources.replica.nodes[stage].intersection(present))
            if not have:
                raise KeyError(sources.keys[stage])
            sender = "" if receiver in have else min(have, key=lambda node: (transfer_counts[node], node))
            transfer_counts[sender] += 1
            sha256 = sources.replica.sha256(stage, sender or receiver)
            part = PartTransfer(sources.keys[stage], sources.replica.number, sha256, sender)
            found[receiver].append(part)
    return found


class StateTransfers:
    """The transfers of state to the stages of one deployment. All methods run on the network's event loop."""

    def __init__(self, swarm: Swarm, deployment: str, sources: ReplicaSources | None) -> None:
        self.sources = sources
        """The sources of what the stages started from, until every cluster has a replica of its own."""
        self._swarm = swarm
        self._deployment = deployment
        self._expected: dict[str, list[PartTransfer]] = {}
        """By receiver, the parts that it was to start from."""

    def plan(self, sources: ReplicaSources | None, stages: Sequence[StagePlan]) -> dict[str, list[PartTransfer]]:
        """The transfers from these sources to the owners of these stages; empty without sources.
        DeploymentAbortedError when no source of a part is present."""
        if sources is None:
            return {}
        present = {member.node_id for member in self._swarm.members.connected()}
        try:
            return choose_transfers(sources, {stage.node: stage.graph for stage in stages}, present)
        except KeyError as error:
            raise DeploymentAbortedError(f"no provider has part {error} of replica {sources.replica.number}") from None

    def senders(self, replica: Replica | None, receivers: Mapping[int, str], cluster: ClusterRun) -> dict[int, str]:
        """By stage, the provider that sends a part of the cluster's own replica that the receiver lacks.

        A holder without a stage of the cluster is preferred, because the others are busy. DeploymentAbortedError when
        no provider with the part is present.
        """
        found: dict[int, str] = {}
        for stage, receiver in receivers.items():
            if replica is None or receiver in replica.nodes[stage]:
                continue
            present = [node for node in sorted(replica.nodes[stage]) if self._swarm.members.is_present(node)]
            if not present:
                raise DeploymentAbortedError(f"no provider has the part of stage {stage} of replica {replica.number}")
            idle = [node for node in present if node not in cluster.nodes]
            found[stage] = (idle or present)[0]
        return found

    def order(
        self,
        orders: Mapping[str, Deploy],
        transfers: Mapping[str, Sequence[PartTransfer]],
        stages: Sequence[StagePlan],
        members: Mapping[str, Member],
        reaches: Mapping[str, Reach],
        generation: int,
    ) -> tuple[list[tuple[str, Give]], list[LinkOrder]]:
        """Adds the transfers to the receivers' orders; returns the order for each sender, and the links they need."""
        gives, links = [], []
        by_receiver = {stage.node: stage for stage in stages}
        self._expected |= {receiver: list(parts) for receiver, parts in transfers.items()}
        for receiver, parts in transfers.items():
            for number, part in enumerate(parts):
                named = orders[receiver].donors.add(key=part.key, replica=part.replica, sha256=part.sha256)
                if part.sender:
                    key = stage_key(self._deployment, by_receiver[receiver])
                    name = f"{self._deployment}-{generation}-donor-{key}-{number}"
                    link = order_link(name, members[part.sender], members[receiver], reaches)
                    links.append(link)
                    named.giver.CopyFrom(link.to_before)
                    gives.append((part.sender, Give(key=part.key, replica=part.replica, to=link.to_after)))
        return gives, links

    def drop_failed(self, receiver: str) -> list[tuple[str, str]]:
        """A receiver did not get its state: the (key, sender) pairs that it was waiting for.

        The receiver does not say which transfer failed, so none of these providers counts as a source of its part any
        more. The next attempt uses other sources where there are any.
        """
        failed = [(part.key, part.sender or receiver) for part in self._expected.pop(receiver, ())]
        for key, node in failed:
            if self.sources is not None and key in self.sources.keys:
                self.sources = self.sources.without(key, node)
        return failed


def _tensor_keys(graph: PortableGraph) -> frozenset[str]:
    return frozenset(spec.key for spec in (*graph.parameters, *graph.states))

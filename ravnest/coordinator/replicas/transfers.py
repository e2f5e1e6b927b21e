"""What stages of a formation begin with that other providers have: who gives it to whom, and over which link."""

from collections.abc import Mapping, Sequence

from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.replicas.sources import Donors, Source, choose_sources
from ravnest.coordinator.replicas.tracker import Replica
from ravnest.coordinator.run.orders import LinkOrder, order_link, stage_key
from ravnest.coordinator.swarm.members import Member
from ravnest.coordinator.swarm.reachability import Reach
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.net.v1.control_pb2 import Deploy, Give
from ravnest.planner.stage_plan import StagePlan


class BrokenOffError(Exception):
    """Forming a cluster was broken off: somebody of it is gone, or cannot take its stage."""


class Giving:
    """Of one formation. All methods belong to the network's loop."""

    def __init__(self, swarm: Swarm, deployment: str, donors: Donors | None) -> None:
        self.donors = donors
        """Who has what its stages began with, until there is a replica of each cluster."""
        self._swarm = swarm
        self._deployment = deployment
        self._gifts: dict[str, list[Source]] = {}
        """By taker, what it was to begin with."""

    def sources(self, donors: Donors | None, stages: Sequence[StagePlan]) -> dict[str, list[Source]]:
        """Who of the donors gives what to those who are to have these stages; nobody, where there are none.
        BrokenOffError where somebody of them is gone."""
        if donors is None:
            return {}
        present = {member.node_id for member in self._swarm.members.connected()}
        try:
            return choose_sources(donors, {stage.node: stage.graph for stage in stages}, present)
        except KeyError as error:
            raise BrokenOffError(f"nobody has {error} of replica {donors.replica.number} any more") from None

    def givers(self, replica: Replica | None, takers: Mapping[int, str], cluster: ClusterRun) -> dict[int, str]:
        """Who sends the parts of a cluster's own replica that takers lack, by stage: somebody who is there, a holder
        rather than one who has much else to do. BrokenOffError where nobody is."""
        found: dict[int, str] = {}
        for stage, taker in takers.items():
            if replica is None or taker in replica.nodes[stage]:
                continue
            there = [node for node in sorted(replica.nodes[stage]) if self._swarm.members.is_present(node)]
            if not there:
                raise BrokenOffError(f"nobody has stage {stage} of replica {replica.number} any more")
            idle = [node for node in there if node not in cluster.nodes]
            found[stage] = (idle or there)[0]
        return found

    def order(
        self,
        orders: Mapping[str, Deploy],
        sources: Mapping[str, Sequence[Source]],
        stages: Sequence[StagePlan],
        members: Mapping[str, Member],
        reaches: Mapping[str, Reach],
        generation: int,
    ) -> tuple[list[tuple[str, Give]], list[LinkOrder]]:
        """Names in the orders what the takers of these stages begin with; whom to tell to give what, and the links for
        it."""
        gives, links = [], []
        by_taker = {stage.node: stage for stage in stages}
        self._gifts |= {taker: list(of_taker) for taker, of_taker in sources.items()}
        for taker, of_taker in sources.items():
            for number, source in enumerate(of_taker):
                named = orders[taker].donors.add(key=source.key, replica=source.replica, sha256=source.sha256)
                if source.giver:
                    key = stage_key(self._deployment, by_taker[taker])
                    name = f"{self._deployment}-{generation}-donor-{key}-{number}"
                    link = order_link(name, members[source.giver], members[taker], reaches)
                    links.append(link)
                    named.giver.CopyFrom(link.to_before)
                    gives.append((source.giver, Give(key=source.key, replica=source.replica, to=link.to_after)))
        return gives, links

    def not_given(self, taker: str) -> list[tuple[str, str]]:
        """What a taker was to begin with has not come: by the key of a part, who has it not, as far as is known. Which
        of them it was is not said: others are asked instead of all of them, where there are others."""
        found = [(source.key, source.giver or taker) for source in self._gifts.pop(taker, ())]
        for key, node in found:
            if self.donors is not None and key in self.donors.keys:
                self.donors = self.donors.without(key, node)
        return found

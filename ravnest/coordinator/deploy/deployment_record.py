"""What stands when a coordinator is killed: its stages, with all that they have learned.

A provider whose coordinator is gone works on what it was fed, and waits. What the coordinator noted while it ran says
who holds which stage, and up to which place of the data all of it had been applied. One that is started again and finds
everybody there takes the stages over as they are: nothing is deployed, nothing that was learned is lost. The data is
walked again from that place; what a cluster says it has applied is counted, what only some of its stages have goes to
it once more, and everything else is fed to anybody. A cluster that lacks a stage by then is not waited for: it gets it
as if it were lost now, while the others train.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from ravnest.averaging.settings import RingSettings
from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.plan.prepared_job import PreparedJob, stage_settings
from ravnest.coordinator.run.orders import ring_order
from ravnest.coordinator.swarm.members import Held
from ravnest.engine.inbox.applied import REMEMBERED
from ravnest.errors import RunError
from ravnest.planner.plan import RingPlan
from ravnest.planner.search.fixed_layout import ClusterLayout
from ravnest.safe_json import read_json

_MAX_GENERATIONS_SINCE: Final = 10_000


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """How a cluster stood."""

    layout: ClusterLayout
    unaveraged: int
    """Its samples that no round had counted."""
    taking: tuple[int, ...] = ()
    """Stages that were being taken: whoever has one may lack what the others have applied."""

    def lost(self, deployment: str, held: Mapping[str, Held | None]) -> dict[int, str]:
        """By stage, who held those that nobody holds any more as they should be, by what those who are there hold."""
        names = self.layout.providers
        found = [held.get(name) for name in names]
        return {
            stage: name
            for stage, (name, has) in enumerate(zip(names, found, strict=True))
            if stage in self.taking
            or has is None
            or (has.deployment, has.stage, has.stages) != (deployment, stage, len(names))
        }


@dataclass(frozen=True, slots=True)
class DeploymentRecord:
    """A deployment of which stages are held."""

    deployment: str
    generation: int
    """The newest that there was."""
    ring_generation: int
    clusters: tuple[ClusterRecord, ...]
    rounds: int
    """How many had begun."""
    place: DataPosition
    """All before it had been applied by every stage of some cluster."""
    digest: str
    """Of the model and of how it is trained."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "DeploymentRecord":
        """RunError where the text is something else."""
        try:
            record = read_json(text)
            clusters = []
            for each in record["clusters"]:
                lay = each["layout"]
                layout = ClusterLayout(
                    tuple(map(str, lay["providers"])), tuple(map(int, lay["places"])), int(lay["in_flight"])
                )
                clusters.append(ClusterRecord(layout, int(each["unaveraged"]), tuple(map(int, each["taking"]))))
            return cls(
                str(record["deployment"]),
                int(record["generation"]),
                int(record["ring_generation"]),
                tuple(clusters),
                int(record["rounds"]),
                DataPosition(**record["place"]),
                str(record["digest"]),
            )
        except (LookupError, TypeError, ValueError) as error:
            raise RunError(f"the store of the run is damaged: what stood cannot be read ({error})") from None

    @property
    def later_generation(self) -> int:
        """One that is later than any of that coordinator's: few can have come since this was noted."""
        return self.generation + _MAX_GENERATIONS_SINCE

    @property
    def nodes(self) -> list[str]:
        return [name for layout in self.layouts for name in layout.providers]

    @property
    def layouts(self) -> tuple[ClusterLayout, ...]:
        return tuple(stood.layout for stood in self.clusters)


@dataclass(frozen=True, slots=True)
class Claim:
    """A microbatch that a cluster has applied, or a part of its stages."""

    cluster: int
    whole: bool


def digest_of(prepared: PreparedJob, rings: Sequence[RingPlan], averaging: RingSettings | None) -> str:
    """Of what stages and owners were told: a coordinator that would tell them anything else cannot take them over."""
    found = hashlib.sha256(prepared.captured.graph.to_json().encode())
    found.update(stage_settings(prepared.job, 0, 1, 1).to_json().encode())
    found.update(b"" if averaging is None else averaging.to_json().encode())
    for ring in rings:
        found.update(ring_order(ring).SerializeToString(deterministic=True))
    return found.hexdigest()


def claims_of(applied: Sequence[Sequence[Sequence[int]]], first: int) -> dict[int, Claim]:
    """What is known of the microbatches from the `first` on, by what the stages of each cluster say they have applied.
    ValueError where they do not remember far enough, or say what cannot be."""
    claims: dict[int, Claim] = {}
    for cluster, stages in enumerate(applied):
        for numbers in stages:
            if len(numbers) >= REMEMBERED and min(numbers) > first:
                raise ValueError(f"a stage of cluster {cluster} does not remember what it has applied since then")
            if max(numbers, default=0) >= first + REMEMBERED:
                raise ValueError(f"a stage of cluster {cluster} says that it has applied what it was never fed")
        sets = [{number for number in numbers if number >= first} for numbers in stages]
        whole = set.intersection(*sets)
        for number in set.union(*sets):
            # Of two clusters that say so, one has been lost with it, or lies: rather one that has all of it.
            if number not in claims or (number in whole and not claims[number].whole):
                claims[number] = Claim(cluster, number in whole)
    return claims

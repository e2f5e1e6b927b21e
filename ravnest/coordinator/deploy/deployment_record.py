"""Record of the current deployment, stored so that a restarted coordinator can resume the running stages.

When the coordinator is killed, the providers finish the microbatches that they were fed and wait. The record says which
provider holds which stage, and up to which position in the data every microbatch had been applied. A restarted
coordinator resumes the stages in place: it deploys nothing, and no training is lost. It feeds the data again from the
recorded position:

- A microbatch that all stages of a cluster have applied is counted, and not fed.
- A microbatch that some stages of a cluster have applied is fed to that cluster again.
- Any other microbatch is fed to any cluster.

If a cluster lacks a stage after the restart, the other clusters train, and the stage is replaced as if its provider had
just been lost.
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
"""More generations than can have begun between the last record and the end of the coordinator that wrote it."""


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """Record of one cluster."""

    layout: ClusterLayout
    unaveraged: int
    """Samples that the cluster was fed and that no round of averaging contains."""
    taking: tuple[int, ...] = ()
    """Stages with a new provider, which may lack microbatches that the others have applied."""

    def lost(self, deployment: str, held: Mapping[str, Held | None]) -> dict[int, str]:
        """For each stage that cannot be resumed, the provider that had it.

        `held` has the stage that each connected provider holds. A stage can be resumed if its recorded provider still
        holds it, and had all that the other stages have applied.
        """
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
    """Record of a deployment."""

    deployment: str
    generation: int
    """The newest generation of links that the coordinator had begun."""
    ring_generation: int
    clusters: tuple[ClusterRecord, ...]
    rounds: int
    """Number of rounds of averaging that had begun."""
    place: DataPosition
    """Position in the data before which every microbatch had been applied by all stages of a cluster."""
    digest: str
    """Hash of the model and of its training settings: see `digest_of`."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "DeploymentRecord":
        """RunError when the text is no such record."""
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
            raise RunError(f"the store of the run is damaged: its deployment cannot be read ({error})") from None

    @property
    def later_generation(self) -> int:
        """A generation later than all of the coordinator that wrote the record."""
        return self.generation + _MAX_GENERATIONS_SINCE

    @property
    def nodes(self) -> list[str]:
        """The providers of all stages."""
        return [name for layout in self.layouts for name in layout.providers]

    @property
    def layouts(self) -> tuple[ClusterLayout, ...]:
        return tuple(cluster.layout for cluster in self.clusters)


@dataclass(frozen=True, slots=True)
class Claim:
    """A microbatch that stages of a cluster report as applied."""

    cluster: int
    whole: bool
    """Whether all stages of the cluster have applied it."""


def digest_of(prepared: PreparedJob, rings: Sequence[RingPlan], averaging: RingSettings | None) -> str:
    """Hash of the model and of all settings that stages and ring owners get. A restarted coordinator resumes the stages
    only if it would send them the same."""
    found = hashlib.sha256(prepared.captured.graph.to_json().encode())
    found.update(stage_settings(prepared.job, 0, 1, 1).to_json().encode())
    found.update(b"" if averaging is None else averaging.to_json().encode())
    for ring in rings:
        found.update(ring_order(ring).SerializeToString(deterministic=True))
    return found.hexdigest()


def claims_of(applied: Sequence[Sequence[Sequence[int]]], first: int) -> dict[int, Claim]:
    """Claims on the microbatches from `first` on, by microbatch. `applied` has the numbers that each stage of each
    cluster reports. ValueError if a stage does not remember all since `first`, or reports an impossible number."""
    claims: dict[int, Claim] = {}
    for cluster, stages in enumerate(applied):
        for numbers in stages:
            if len(numbers) >= REMEMBERED and min(numbers) > first:
                raise ValueError(f"a stage of cluster {cluster} does not remember all that it has applied")
            if max(numbers, default=0) >= first + REMEMBERED:
                raise ValueError(f"a stage of cluster {cluster} reports microbatches that it was never fed")
        sets = [{number for number in numbers if number >= first} for numbers in stages]
        whole = set.intersection(*sets)
        for number in set.union(*sets):
            # If two clusters claim a microbatch, one was given up and the other was fed the microbatch again, or one
            # lies. A cluster that has it in all stages takes precedence.
            if number not in claims or (number in whole and not claims[number].whole):
                claims[number] = Claim(cluster, number in whole)
    return claims

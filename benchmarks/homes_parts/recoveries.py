"""Recovery of a swarm of homes, read from its run directory: after one machine was killed, and after all were. Pure
functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Line = Mapping[str, Any]
Stage = tuple[int, int]
"""Cluster and stage."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One machine that was killed, until training went on."""

    machine: str
    way: str
    """Event that ended the recovery: failover, reformed, or cluster_lost."""
    seconds: float
    """From the kill until the last of the affected stages has made an update."""
    told_seconds: float | None
    """The time that the run had told before; None where none was told."""
    work_lost: int
    """Updates or samples of one stage or cluster that were lost, as the run reported them."""


@dataclass(frozen=True, slots=True)
class PowerCut:
    """All machines were killed at once and started again."""

    seconds: float
    """From the restart until the first new microbatch had passed all stages."""
    samples_before: int
    """Samples that the run had trained on when its machines were killed."""
    samples_after: int
    """Samples that it continued with."""
    source: str
    rate: float
    """Samples per second before the kill."""
    told_seconds: float | None
    """How much work the run had told that this costs; None where nothing was told."""

    @property
    def samples_lost(self) -> int:
        return max(0, self.samples_before - self.samples_after)

    @property
    def lost_seconds(self) -> float:
        """The samples that were lost, in seconds of training."""
        return self.samples_lost / self.rate if self.rate > 0 else 0.0


def clusters_of(summary: Line, events: Sequence[Line]) -> list[Line]:
    """The clusters of a summary that have not been dissolved. `events` are all events of the run."""
    dissolved: set[int] = set()
    for event in events:
        if event["kind"] == "deployed":
            dissolved.clear()
        elif event["kind"] == "cluster_lost":
            dissolved.add(event["cluster"])
    return [each for each in summary.get("clusters", ()) if each["id"] not in dissolved]


def holders(clusters: Sequence[Line]) -> set[str]:
    """The providers that hold a stage of these clusters."""
    return {stage["provider"] for cluster in clusters for stage in cluster["stages"]}


def stages_of(clusters: Sequence[Line]) -> set[Stage]:
    return {(each["id"], stage["stage"]) for each in clusters for stage in each["stages"]}


def told_seconds(summary: Line) -> float | None:
    """The time that a lost machine costs at most, as the run tells it."""
    told: float | None = summary.get("state", {}).get("at_most_lost_seconds")
    return told


def told_loss_seconds(summary: Line) -> float | None:
    """The work that the loss of all machines costs at most, as the run tells it: that since the last checkpoint."""
    told: float | None = summary.get("state", {}).get("checkpoint_seconds")
    return told


def recovery(
    machine: str,
    killed_at: float,
    events: Sequence[Line],
    updates: Sequence[Line],
    summary: Line,
    told: float | None = None,
) -> Kill | None:
    """The recovery from a kill; None until every affected stage has made an update after it.

    `events` are all events of the run, `updates` the reports of updates of stages after the kill, and `summary` is the
    latest one. The stage goes to another provider (failover), the model is divided again (reformed), or the cluster is
    dissolved (cluster_lost), and then the remaining ones go on.
    """
    since = [event for event in events if event["at"] > killed_at]
    end = _end(machine, since)
    clusters = clusters_of(summary, events)
    if end is None or machine in holders(clusters):
        # A summary that still names the machine is from before the kill.
        return None
    affected = stages_of([each for each in clusters if end["kind"] != "failover" or each["id"] == end["cluster"]])
    first: dict[Stage, float] = {}
    for line in updates:
        if line["at"] > end["at"]:
            first.setdefault((line["cluster"], line["stage"]), line["at"])
    if not affected or not affected <= first.keys():
        return None
    seconds = max(first[stage] for stage in affected) - killed_at
    return Kill(machine, end["kind"], seconds, told, _work_lost(since))


def _end(machine: str, events: Sequence[Line]) -> Line | None:
    begun = False
    for event in events:
        kind = event["kind"]
        begun = begun or kind == "reform_begun" or (kind == "failover_begun" and event.get("lost") == machine)
        if begun and kind in ("failover", "reformed"):
            return event
        if kind == "cluster_lost" and machine in event["reason"]:
            return event
    return None


def _work_lost(events: Sequence[Line]) -> int:
    return sum(
        event.get("updates_lost", 0) if event["kind"] == "failover_begun" else event.get("samples", 0)
        for event in events
        if event["kind"] in ("failover_begun", "cluster_lost")
    )


def power_cut(
    killed_at: float,
    restarted_at: float,
    events: Sequence[Line],
    losses: Sequence[Line],
    told: float | None = None,
    measured_seconds: float = 30.0,
) -> PowerCut | None:
    """The recovery from the kill of all machines; None until a microbatch has passed all stages again.

    `losses` are the lines of the training curve: each is a completed microbatch, with the samples up to and including
    it.
    """
    before = [line for line in losses if line["at"] <= killed_at]
    after = [line for line in losses if line["at"] > restarted_at]
    if not after or not before:
        return None
    earlier = [line for line in before if line["at"] > killed_at - measured_seconds]
    first = min(after, key=lambda line: line["samples"])
    of_one = first["samples"] // first["updates"] if first["updates"] else 0
    resumed = [event for event in events if event["kind"] == "resumed_swarm"]
    samples = [line["samples"] for line in earlier]
    return PowerCut(
        seconds=min(line["at"] for line in after) - restarted_at,
        samples_before=max(line["samples"] for line in before),
        samples_after=first["samples"] - of_one,
        source=resumed[-1].get("source", "") if resumed else "checkpoint",
        rate=(max(samples) - min(samples)) / measured_seconds if samples else 0.0,
        told_seconds=told,
    )

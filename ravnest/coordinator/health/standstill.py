"""Explanation of a run that completes nothing: which stage waits for what.

Every stage reports its current task, or the frames that it waits for. These come from the stage before or after it, or
from the coordinator. Following them from stage to stage leads to the cause: a stage that is silent, works or uploads
its state, or the requester's own data loader. If two stages wait for each other, one of them does not do its part, and
both are named. Stages may lie, so the result is a sentence for the user and never costs a provider its stage. Pure
functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ravnest.coordinator.health.uploads import megabytes
from ravnest.engine.telemetry.activity import ANY, Missing
from ravnest.units import counted

MIN_SECONDS: Final = 10.0
TIMES_USUAL: Final = 20.0
"""The explanation is due after this multiple of the mean time between two completed microbatches."""
FIRST_SECONDS: Final = 60.0
"""The same before the first microbatch, while the mean is unknown."""
SILENT_SECONDS: Final = 5.0
"""A stage that has not reported for this long is the cause, whatever its last report says."""
_FADING: Final = 1 / 8
_MAX_TIMES: Final = 4.0
"""Maximum weight of one pause, as a multiple of the mean."""
_MAX_CLUSTERS: Final = 3
"""Maximum number of clusters in an explanation."""


class CompletionPace(NamedTuple):
    """Mean time between two completed microbatches."""

    mean_seconds: float | None = None

    def after(self, gap_seconds: float) -> "CompletionPace":
        """The mean with one more pause, which is capped: a standstill does not show how fast the run is."""
        if self.mean_seconds is None:
            return CompletionPace(min(gap_seconds, FIRST_SECONDS))
        gap = min(gap_seconds, _MAX_TIMES * max(self.mean_seconds, MIN_SECONDS / TIMES_USUAL))
        return CompletionPace(self.mean_seconds + _FADING * (gap - self.mean_seconds))

    @property
    def patience_seconds(self) -> float:
        """Time without a completed microbatch after which the explanation is due."""
        return FIRST_SECONDS if self.mean_seconds is None else max(MIN_SECONDS, TIMES_USUAL * self.mean_seconds)


@dataclass(frozen=True, slots=True)
class StateSent:
    """State that a stage reports to send."""

    done_bytes: int
    total_bytes: int
    still_seconds: float
    """Time since some of it last got through."""


@dataclass(frozen=True, slots=True)
class StageNow:
    """One stage at one moment."""

    node: str
    silent_seconds: float = 0.0
    """Time since it last reported."""
    kind: str = "wait"
    """Its current task, as `engine.telemetry.activity.Activity` has it."""
    microbatch: int = -1
    seconds: float = 0.0
    """Duration of the task so far."""
    missing: tuple[Missing, ...] = ()
    sends: StateSent | None = None
    unconfirmed: tuple[tuple[str, int], ...] = ()
    """Frames that neighbours have not confirmed, by provider. Two stages may have two links with each other."""

    def unconfirmed_by(self, node: str) -> int:
        """Frames that this neighbour has not confirmed."""
        return sum(count for neighbour, count in self.unconfirmed if neighbour == node)


@dataclass(frozen=True, slots=True)
class ClusterNow:
    """One cluster at one moment."""

    id: int
    stages: tuple[StageNow, ...]
    under_way: tuple[int, ...] = ()
    """Microbatches in flight, evaluations included."""
    forming: str = ""
    """Why it is being deployed or rebuilt; empty while it is not."""


@dataclass(frozen=True, slots=True)
class RunNow:
    """A run at one moment."""

    phase: str
    clusters: tuple[ClusterNow, ...] = ()
    data_seconds: float | None = None
    """Time that the coordinator has waited for the requester's data; None while it does not."""
    waits: tuple[str, ...] = field(default=())
    """Reasons why the coordinator feeds nothing more, in words."""


class Standstill(NamedTuple):
    """Explanation of a standstill."""

    reason: str
    culprits: tuple[str, ...]
    """Providers that the run waits for, as far as known; empty if no provider is the cause."""


def explain(run: RunNow) -> Standstill:
    """Explains which stage waits for what, and which providers are the cause."""
    told: list[str] = []
    culprits: list[str] = []
    several = len(run.clusters) > 1
    for cluster in run.clusters:
        if len(told) == _MAX_CLUSTERS:
            break
        if cluster.forming:
            told.append(f"cluster {cluster.id} is not complete: {cluster.forming}")
            continue
        if not cluster.under_way and not any(_holds_up(stage, cluster) for stage in cluster.stages):
            continue
        found = _explain_cluster(cluster, several)
        told += [found.reason] if found.reason else []
        culprits += found.culprits
    told += run.waits
    is_fed = any(cluster.under_way for cluster in run.clusters)
    if run.data_seconds is not None and not is_fed:
        told.append(f"the data loader has not yielded a batch for {run.data_seconds:.0f} s")
    if not told:
        no_stage = ", and no stage says what it waits for" if run.clusters else ""
        told.append(f"the run is at '{run.phase}'{no_stage}")
    return Standstill("; ".join(told), tuple(dict.fromkeys(culprits)))


def _explain_cluster(cluster: ClusterNow, several: bool) -> Standstill:
    words = _ClusterText(cluster, several)
    starts = range(len(cluster.stages)) if cluster.under_way else range(0)
    paths = [_follow(cluster.stages, start) for start in starts if _waits(cluster.stages[start])]
    # The longest path; on a tie, the one that ends with a stage that does something.
    path = max(paths, key=lambda path: (len(path.stages), path.other is None), default=_Path((), None, None))
    told = [words.path(path)] if path.stages else []
    culprits = list(words.culprits(path))
    for number, stage in enumerate(cluster.stages):
        if number not in path.stages and _holds_up(stage, cluster):
            told.append(f"{words.name(number)} {words.doing(number)}")
            culprits.append(stage.node)
    return Standstill("; ".join(told), tuple(culprits))


class _Path(NamedTuple):
    """Path from a waiting stage to the stage that it waits for in the end."""

    stages: tuple[int, ...]
    """Each one but the last waits for the next."""
    missing: Missing | None
    """The frame that the last stage waits for; None if it does not wait."""
    other: int | None
    """The stage that the last one waits for, if that is in the path already; None for the coordinator."""


def _follow(stages: Sequence[StageNow], start: int) -> _Path:
    path = [start]
    while _waits(stages[path[-1]]):
        now = path[-1]
        targets = [(missing, _target(now, missing, len(stages))) for missing in stages[now].missing]
        ways = [(missing, target) for missing, target in targets if target is not None]
        onward = next((target for _, target in ways if target not in path), None)
        if onward is not None:
            path.append(onward)
            continue
        feed = next((missing for missing, target in targets if target is None), None)
        if feed is not None or not ways:
            return _Path(tuple(path), feed or Missing("feed", ANY, 0), None)
        return _Path(tuple(path), ways[0][0], ways[0][1])
    return _Path(tuple(path), None, None)


def _target(stage: int, missing: Missing, stages: int) -> int | None:
    """The stage that sends it; None for the coordinator. A root gets looked-up rows from the leaf, and the leaf their
    gradients from the root."""
    target = {"forward": stage - 1, "gradient": stage + 1}.get(missing.what)
    return None if target is None else target % stages


def _waits(stage: StageNow) -> bool:
    return stage.kind == "wait" and bool(stage.missing) and stage.silent_seconds < SILENT_SECONDS


def _holds_up(stage: StageNow, cluster: ClusterNow) -> bool:
    """Whether the run may wait for this stage, which does not wait itself. With nothing in flight, the run may wait for
    the stage's state."""
    sends = stage.sends is not None and not cluster.under_way
    return sends or stage.kind != "wait" or stage.silent_seconds >= SILENT_SECONDS


class _ClusterText:
    """Text about the stages of one cluster."""

    def __init__(self, cluster: ClusterNow, several: bool) -> None:
        self._cluster = cluster
        self._several = several

    def name(self, stage: int) -> str:
        of = f" of cluster {self._cluster.id}" if self._several else ""
        return f"stage {stage}{of} ({self._cluster.stages[stage].node})"

    def path(self, path: _Path) -> str:
        stages = self._cluster.stages
        text = self.name(path.stages[0])
        for now, onward in zip(path.stages, path.stages[1:], strict=False):
            missing = next(each for each in stages[now].missing if _target(now, each, len(stages)) == onward)
            text += f" waits for {_what(missing)} from {self.name(onward)}, which"
        last = path.stages[-1]
        if path.missing is None:
            return f"{text} {self.doing(last)}"
        if path.other is not None:
            where = self.name(path.other) if len(path.stages) > 2 else "that one"
            return (
                f"{text} waits for {_what(path.missing)} from {where}: one of the two does not do its part, or nothing "
                f"passes between them{self._stuck(last, path.other)}"
            )
        return f"{text} waits for {_what(path.missing)}{self._was_fed(path)}"

    def culprits(self, path: _Path) -> tuple[str, ...]:
        stages = self._cluster.stages
        if not path.stages:
            return ()
        last = stages[path.stages[-1]].node
        if path.missing is None:
            return (last,)
        if path.other is not None:
            return (stages[path.other].node, last)
        fed = self._fed(path)
        if fed is None:
            return ()
        # An evaluation sends nothing back, so the stage may well have passed it on.
        is_sent_on = fed < 0 and path.missing.microbatch == ANY and len(path.stages) > 1
        return (last, stages[path.stages[-2]].node) if is_sent_on else (last,)

    def doing(self, number: int) -> str:
        stage = self._cluster.stages[number]
        if stage.silent_seconds >= SILENT_SECONDS:
            return f"has not been heard for {stage.silent_seconds:.0f} s"
        if stage.kind == "save" and stage.sends is None:
            return f"has been saving its state for {stage.seconds:.0f} s"
        if stage.kind in ("save", "wait") and stage.sends is not None:
            sent = f"{megabytes(stage.sends.done_bytes)} of {megabytes(stage.sends.total_bytes)}"
            still = stage.sends.still_seconds
            halts = f", nothing of it for {still:.0f} s" if still >= MIN_SECONDS else ""
            return f"sends its state, {sent}{halts}"
        if stage.kind == "average":
            return f"has been taking its part in a round for {stage.seconds:.0f} s"
        if stage.kind == "wait":
            return "does not say what it waits for"
        return f"has been at {stage.kind} of microbatch {stage.microbatch} for {stage.seconds:.0f} s"

    def _fed(self, path: _Path) -> int | None:
        """The microbatch that was fed although the last stage reports that it waits for it."""
        under_way, missing = self._cluster.under_way, path.missing
        assert missing is not None, "the last stage waits"
        if missing.microbatch != ANY:
            return missing.microbatch if missing.microbatch in under_way else None
        if len(path.stages) > 1:
            before, last = path.stages[-2:]
            stages = self._cluster.stages
            wanted = [m for m in stages[before].missing if _target(before, m, len(stages)) == last]
            if wanted[0].microbatch in under_way:
                return wanted[0].microbatch
        return min((number for number in under_way if number >= 0), default=None)

    def _was_fed(self, path: _Path) -> str:
        fed = self._fed(path)
        if fed is None or path.missing is None:
            return ""
        return f", though it was fed microbatch {fed}" if path.missing.microbatch == ANY else ", though it was fed"

    def _stuck(self, one: int, other: int) -> str:
        stages = self._cluster.stages
        frames = stages[one].unconfirmed_by(stages[other].node) + stages[other].unconfirmed_by(stages[one].node)
        return f" ({counted(frames, 'frame is', 'frames are')} not confirmed)" if frames else ""


def _what(missing: Missing) -> str:
    """Like "the gradient of microbatch 17"."""
    of = "" if missing.microbatch == ANY else f" of microbatch {missing.microbatch}"
    if missing.what == "feed":
        return f"its feed{of}"
    return f"the {missing.what}{of}" if of else f"any {missing.what}"

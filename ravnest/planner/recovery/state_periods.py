"""State periods: how often a cluster makes replicas, how often the coordinator has a checkpoint, and what a loss costs.

State may take a small share of each line. Two thirds of it are for replicas, because losing one machine is more likely
than losing all of them; the rest is for the checkpoints that the coordinator collects. The slowest line decides, since
a replica counts once every stage has sent its part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ravnest.planner.cluster import Cluster
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import NO_LIMIT, Provider, Requester
from ravnest.planner.recovery.choose_coding import SENT_SHARE, choose_coding
from ravnest.planner.recovery.worth_it import fetched_bytes
from ravnest.state_budget import BUDGET_SHARE
from ravnest.units import byte_size, duration, megabits

REPLICA_PART: Final = 2 / 3
"""Part of this share that is for replicas, where a cluster makes any."""
NEXT_TO_ROUNDS: Final = 1 / 3
"""Part of the budget that is for replicas and checkpoints where clusters average, because rounds have a budget too, and
every round leaves the parameters of each stage on several machines."""
MIN_REPLICA_SECONDS: Final = 2.0
"""Minimum time between two replicas of a cluster."""


@dataclass(frozen=True, slots=True)
class StageState:
    """The state of one stage, and the line that carries it."""

    provider: str
    replica_bytes: float
    """Bytes of a replica's part as it travels."""
    checkpoint_bytes: float
    """Bytes of the part that the coordinator collects."""
    up_bytes_per_second: float = NO_LIMIT


@dataclass(frozen=True, slots=True)
class StatePeriods:
    """Periods of a cluster. Times are 0 where no line limits them."""

    replica_seconds: float
    """Time between two replicas; 0 if the cluster makes none."""
    sending_seconds: float
    """Time until the slowest stage has sent its part of a replica."""
    checkpoint_seconds: float | None
    """Time between two checkpoints at the coordinator; None: none by time."""
    wished_seconds: float | None
    """The time that the job asked for."""
    slowest: StageState | None = None
    """The stage whose line limits the replicas."""
    limit: str = ""
    """The line that limits the checkpoints, in words, if the wish cannot be met."""

    @property
    def at_most_lost_seconds(self) -> float:
        """The work that is repeated at most when one machine is lost: a replica counts once it has been sent."""
        return self.replica_seconds + self.sending_seconds

    @property
    def meets_wish(self) -> bool:
        return not self.limit

    def sentences(self) -> tuple[str, ...]:
        """The periods in words, for the user."""
        found = []
        if self.replica_seconds:
            lost = f"a lost machine costs at most {duration(self.at_most_lost_seconds)} of one stage's work"
            why = ""
            if self.slowest is not None and self.replica_seconds > MIN_REPLICA_SECONDS:
                line = f"{self.slowest.provider}'s {megabits(self.slowest.up_bytes_per_second)} Mbit/s"
                why = f": {byte_size(self.slowest.replica_bytes)} over {line}"
            found.append(f"{lost} (a replica every {duration(self.replica_seconds)}{why})")
        if self.checkpoint_seconds is not None:
            every = f"a checkpoint every {duration(self.checkpoint_seconds)}"
            if not self.meets_wish and self.wished_seconds is not None:
                every += f" instead of {duration(self.wished_seconds)}: {self.limit}"
            found.append(every)
        return tuple(found)


def state_periods(
    stages: Sequence[StageState],
    wished_seconds: float | None,
    requester_down_bytes_per_second: float = NO_LIMIT,
    *,
    has_replicas: bool = True,
    measured_seconds: float = 0.0,
    share: float = BUDGET_SHARE,
) -> StatePeriods:
    """The periods of one cluster. `wished_seconds` is `checkpoint.every_seconds`; it is met where the lines allow it.
    `measured_seconds` is how long the last replica was on its way (0: there was none): longer than planned where a line
    has no 15 % to spare, or parts pass the relay.

    Without replicas (no other provider could continue from one) checkpoints have the whole share.
    """
    sending, slowest = 0.0, None
    if has_replicas and stages:
        slowest = max(stages, key=lambda stage: stage.replica_bytes / stage.up_bytes_per_second)
        sending = max(slowest.replica_bytes / (share * slowest.up_bytes_per_second), measured_seconds)
    replica = max(MIN_REPLICA_SECONDS, sending / REPLICA_PART) if has_replicas else 0.0
    rest = share * (1 - REPLICA_PART if has_replicas else 1.0)
    limits = {
        _line_in_words(stage, rest): stage.checkpoint_bytes / (rest * stage.up_bytes_per_second) for stage in stages
    }
    total = sum(stage.checkpoint_bytes for stage in stages)
    limits[_requester_in_words(total, requester_down_bytes_per_second, share)] = total / (
        share * requester_down_bytes_per_second
    )
    limit = max(limits, key=lambda words: limits[words])
    if wished_seconds is None or limits[limit] <= wished_seconds:
        return StatePeriods(replica, sending, wished_seconds, wished_seconds, slowest)
    return StatePeriods(replica, sending, limits[limit], wished_seconds, slowest, limit)


def planned_periods(
    clusters: Sequence[Cluster],
    model: ModelCosts,
    providers: Mapping[str, Provider],
    requester: Requester,
    wished_seconds: float | None,
    *,
    is_exact: bool = False,
) -> StatePeriods:
    """The periods of the cluster that would lose most, before a replica has shown how large its parts are."""
    found = []
    is_alone = len(providers) == 1
    for cluster in clusters:
        sizes = fetched_bytes(model, {}, cluster)
        stages = [
            StageState(name, travelling_bytes(size, line, is_exact=is_exact, is_local=False), size, line)
            for name, size, line in ((name, size, providers[name].up_bytes_per_second) for name, size in sizes.items())
        ]
        down = requester.down_bytes_per_second
        share = budget_share(len(clusters))
        found.append(state_periods(stages, wished_seconds, down, has_replicas=not is_alone, share=share))
    return max(found, key=lambda periods: (periods.at_most_lost_seconds, periods.checkpoint_seconds or 0.0))


def budget_share(clusters: int) -> float:
    """The share of a line for replicas and checkpoints, in a plan with this number of clusters."""
    return BUDGET_SHARE * (NEXT_TO_ROUNDS if clusters > 1 else 1.0)


def travelling_bytes(part_bytes: float, line_bytes_per_second: float, *, is_exact: bool, is_local: bool) -> float:
    """Bytes that a part of a replica takes on this line, in the coding that is chosen for it."""
    choice = choose_coding(part_bytes, line_bytes_per_second, is_exact=is_exact, is_local=is_local)
    return SENT_SHARE[choice.coding] * part_bytes


def _line_in_words(stage: StageState, share: float) -> str:
    line = f"{megabits(stage.up_bytes_per_second)} Mbit/s"
    sent = f"{stage.provider} sends {byte_size(stage.checkpoint_bytes)} over {line}"
    return f"{sent}, of which {share:.0%} are for checkpoints"


def _requester_in_words(total_bytes: float, down_bytes_per_second: float, share: float) -> str:
    line = f"{megabits(down_bytes_per_second)} Mbit/s"
    return f"the requester receives {byte_size(total_bytes)} over {line}, of which {share:.0%} are for state"

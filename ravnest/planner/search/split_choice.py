"""Whether a stage sends its gradients on before it computes those of its own weights."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from ravnest.planner.cluster import SPARE, Cluster

WAITING: Final = 1.1
"""Times as long as the busiest stage or line takes, a microbatch must be apart from the next for stages to wait."""


class SplitChoice(NamedTuple):
    split: bool
    reason: str


def choose_split(cluster: Cluster, stage: int, memory_bytes: float, asked: bool | None) -> SplitChoice:
    """For one stage of a cluster, on a machine of so much memory; `asked` is what the job says, if it does.

    Both parts together take up to a quarter longer than a backward at once (`python -m benchmarks.backward`): more of
    memory is touched, and each part starts operators anew. So it helps only where stages wait for microbatches to come
    back, because fewer are in flight than the way is long; there, the way gets shorter by what comes afterwards.
    """
    if stage == 0:
        return SplitChoice(False, "no stage before it waits for gradients")
    if asked is not None:
        return SplitChoice(asked, f"pipeline.split_backward is {asked}")
    apart = cluster.round_trip_seconds / cluster.in_flight
    if apart <= WAITING * cluster.busiest_seconds:
        return SplitChoice(False, "enough are in flight to keep the busiest stage or line busy, and it would cost time")
    held = cluster.stages[stage].memory_bytes + SPARE * cluster.stages[stage].saved_bytes
    if held > memory_bytes:
        return SplitChoice(False, "there is no memory for activations to be kept until the end of a backward")
    return SplitChoice(True, "stages wait for microbatches to come back, and this brings them back sooner")


def split_reason(choices: Sequence[SplitChoice]) -> str:
    """Which stages of a cluster send gradients on before they compute those of their weights, and why."""
    after = choices[1:]
    if not after:
        return ""
    splitting = [number for number, choice in enumerate(choices) if choice.split]
    if not splitting:
        return f"backwards are not split: {after[0].reason}"
    stages = ", ".join(map(str, splitting))
    return f"backwards are split at stage{'s' if len(splitting) > 1 else ''} {stages}: {choices[splitting[0]].reason}"

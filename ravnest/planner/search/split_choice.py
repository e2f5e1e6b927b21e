"""Choice of whether a stage sends its gradients on before it computes those of its own weights."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from ravnest.planner.cluster import SPARE, Cluster

WAITING: Final = 1.1
"""Factor on the time of the busiest stage or line; with a longer period than that, stages wait for microbatches."""


class SplitChoice(NamedTuple):
    split: bool
    reason: str


def choose_split(
    cluster: Cluster, stage: int, memory_bytes: float, asked: bool | None, host_seconds: float = 0.0
) -> SplitChoice:
    """The choice for one stage of a cluster on a machine with this memory; `asked` is the job's setting, if any.
    `host_seconds` is the period of a microbatch where the cores of shared hosts are the limit, else 0.

    Both parts together take up to a quarter longer than a whole backward (`python -m benchmarks.backward`): they touch
    more memory, and each part starts its own operators. So splitting helps only where stages wait for microbatches
    because too few are in flight for the round trip, which becomes shorter by the second part.
    """
    if stage == 0:
        return SplitChoice(False, "no stage before it waits for gradients")
    if asked is not None:
        return SplitChoice(asked, f"pipeline.split_backward is {asked}")
    if cluster.in_flight == 1:
        # One stage computes at a time, so the cores of a host cannot be the limit.
        host_seconds = 0.0
    apart = cluster.round_trip_seconds / cluster.in_flight
    if apart <= WAITING * max(cluster.busiest_seconds, host_seconds):
        return SplitChoice(
            False, "enough are in flight to keep the busiest stage or line busy, and splitting would cost time"
        )
    held = cluster.stages[stage].memory_bytes + SPARE * cluster.stages[stage].saved_bytes
    if held > memory_bytes:
        return SplitChoice(False, "there is no memory to keep activations until the end of a backward")
    return SplitChoice(True, "stages wait for microbatches to come back, and splitting brings them back sooner")


def split_reason(choices: Sequence[SplitChoice]) -> str:
    """The stages of a cluster that split their backward, and why."""
    after = choices[1:]
    if not after:
        return ""
    splitting = [number for number, choice in enumerate(choices) if choice.split]
    if not splitting:
        return f"backwards are not split: {after[0].reason}"
    stages = ", ".join(map(str, splitting))
    return f"backwards are split at stage{'s' if len(splitting) > 1 else ''} {stages}: {choices[splitting[0]].reason}"

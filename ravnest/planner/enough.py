"""How many microbatches in flight keep the slowest stage or line of a cluster busy. One formula, for the plan before a
run and for what is measured while it goes on."""

import math
from collections.abc import Sequence
from typing import Final

WAITING: Final = 0.75
"""Of its own time for a microbatch, what a stage that is always busy makes each microbatch wait, forward and backward
together. Half of it, because each of both comes in the middle of the work on another one; the rest evens out stages
and lines that take now more and now less. By simulation: tests/planner/test_flight_cells.py."""

_CLOSE: Final = 1e-9


def enough_in_flight(way_seconds: float, stage_seconds: Sequence[float], period_seconds: float) -> int:
    """As many as begin within the time that one takes: on its way through all stages and back, and waiting at each.

    `way_seconds` is the way of a microbatch that waits nowhere, `stage_seconds` what each stage computes for it, and
    `period_seconds` the time of the slowest stage or line, from one microbatch to the next. A stage that works only
    some of the time is found at work less often, and found idle more often.
    """
    waits = WAITING * sum(seconds * min(1.0, seconds / period_seconds) for seconds in stage_seconds)
    return max(1, math.ceil((way_seconds + waits) / period_seconds - _CLOSE))

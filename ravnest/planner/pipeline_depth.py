"""How many microbatches in flight keep the slowest stage or line of a cluster busy. One formula, for the plan before a
run and for what is measured while it goes on."""

import math
from collections.abc import Sequence
from typing import Final

WAITING: Final = 0.5
"""Of its own time for a microbatch, what a stage that is always busy makes each microbatch wait, forward and backward
together, because each of both comes in the middle of the work on another one. By simulation
(tests/planner/in_flight/test_flight_cells.py), this keeps stages whose times vary busy for 0.97 of the time; what is
missing would take more in flight than it is worth, because every microbatch more makes updates staler."""

WAITING_AT_LINES: Final = 0.5
"""The same of a line, each way: lines stand still for a moment now and then, while congestion control looks how much
they take, and what comes meanwhile waits one behind the other. By simulation too."""

_CLOSE: Final = 1e-9


def enough_in_flight(
    way_seconds: float, stage_seconds: Sequence[float], period_seconds: float, line_seconds: Sequence[float] = ()
) -> int:
    """As many as begin within the time that one takes: on its way through all stages and back, and waiting at each.

    `way_seconds` is the way of a microbatch that waits nowhere, `stage_seconds` what each stage computes for it,
    `period_seconds` the time of the slowest stage or line, from one microbatch to the next, and `line_seconds` how long
    it keeps each line busy, there and back, as far as that is known. What works only some of the time is found at work
    less often, and found idle more often.
    """
    waits = WAITING * _found_busy(stage_seconds, period_seconds)
    waits += WAITING_AT_LINES * _found_busy(line_seconds, period_seconds)
    return max(1, math.ceil((way_seconds + waits) / period_seconds - _CLOSE))


def _found_busy(seconds: Sequence[float], period_seconds: float) -> float:
    return sum(each * min(1.0, each / period_seconds) for each in seconds)

"""Pipeline depth: the number of microbatches in flight that keeps the slowest stage or line of a cluster busy.

The plan before a run and the control during the run use the same formula.
"""

import math
from collections.abc import Sequence
from typing import Final

WAITING: Final = 0.5
"""Time that a microbatch waits at a stage that is always busy, forward and backward together, as a share of the stage's
time for a microbatch: both arrive while the stage works on another one. By simulation
(tests/planner/in_flight/test_flight_cells.py), this keeps stages of varying times busy for 0.97 of the time. The rest
would cost more than it gains, because each further microbatch in flight makes updates staler."""

WAITING_AT_LINES: Final = 0.5
"""The same for a line, in each direction: congestion control pauses lines now and then, and frames queue meanwhile. By
simulation too."""

_CLOSE: Final = 1e-9


def enough_in_flight(
    way_seconds: float, stage_seconds: Sequence[float], period_seconds: float, line_seconds: Sequence[float] = ()
) -> int:
    """The number of microbatches that start within the time that one takes, with its waits at stages and lines.

    `way_seconds` is the round trip of a microbatch that waits nowhere, `stage_seconds` the computation of each stage
    for it, `period_seconds` the time of the slowest stage or line, and `line_seconds` the time that it keeps each known
    line busy, in each direction. A microbatch waits less at stages and lines that are idle part of the time.
    """
    waits = WAITING * _found_busy(stage_seconds, period_seconds)
    waits += WAITING_AT_LINES * _found_busy(line_seconds, period_seconds)
    return max(1, math.ceil((way_seconds + waits) / period_seconds - _CLOSE))


def _found_busy(seconds: Sequence[float], period_seconds: float) -> float:
    return sum(each * min(1.0, each / period_seconds) for each in seconds)

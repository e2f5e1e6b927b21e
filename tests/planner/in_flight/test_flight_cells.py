"""The cells of `python -m benchmarks.pipeline` in virtual time, with stages and lines as uneven as in the WAN lab: from
the number that a plan begins with, the slowest stage or line is busy from the first seconds on."""

import math

import pytest

from ravnest.planner.in_flight.control import FlightControl
from ravnest.planner.pipeline_depth import enough_in_flight
from ravnest.planner.problem import MAX_IN_FLIGHT
from tests.planner.in_flight.flying_pipeline import FlyingPipeline, Uneven

STAGE_SECONDS = 0.15
FRAME_BYTES = 1 << 20
CODED_BYTES = 266_400
"""The same with int8 on the links."""
CELLS = {
    f"{stages} stages, {mbit:g}/{1000 * rtt:g}": (stages, mbit, rtt)
    for stages in (2, 3, 4, 8)
    for mbit, rtt in ((math.inf, 0.0), (500.0, 0.01), (100.0, 0.05), (20.0, 0.1))
}
USUAL = Uneven(stage_share=0.04, late_seconds=0.008)
"""Forwards of 50 ms had a standard deviation of 2 ms there, and frames took 6 ms to be packed, sent and unpacked."""
HICCUPS = Uneven(stage_share=0.04, hiccup_share=0.002, hiccup_seconds=0.2, late_seconds=0.008)
"""A machine that does something else now and then."""
STANDSTILLS = Uneven(stage_share=0.04, late_seconds=0.008, still_every_seconds=10.0, still_seconds=0.25)
"""Lines whose congestion control sends next to nothing for a moment every ten seconds, to see how long the way is."""


class Cell:
    def __init__(self, name: str, uneven: Uneven, times: float = 1.0, frame_bytes: int = FRAME_BYTES) -> None:
        self.stages, mbit, rtt = CELLS[name]
        crossing = frame_bytes / (mbit * 125e3)
        self.is_line = crossing > STAGE_SECONDS
        way = self.stages * STAGE_SECONDS + (self.stages - 1) * (2 * crossing + rtt)
        mean = STAGE_SECONDS + 2 * uneven.hiccup_share * uneven.hiccup_seconds
        self.period_seconds = max(mean, crossing)
        stages, lines = [STAGE_SECONDS] * self.stages, [crossing] * 2 * (self.stages - 1)
        self.enough = enough_in_flight(way, stages, max(STAGE_SECONDS, crossing), lines)
        self.least = enough_in_flight(way, stages, max(STAGE_SECONDS, crossing))
        """Without what they wait at lines, of which the control knows nothing."""
        self.filled = 3.0 + 2 * way
        start = min(MAX_IN_FLIGHT, round(times * self.enough))
        self.control = FlightControl(self.stages, start, MAX_IN_FLIGHT, crossing if self.is_line else 0.0)
        self.pipeline = FlyingPipeline(
            self.stages, mbit=mbit, round_trip_seconds=rtt, frame_bytes=frame_bytes, limit=start, uneven=uneven
        )
        self.pipeline.controlled_by(self.control)

    def of_limit(self, since: float, until: float) -> float:
        """The rate between two moments, from when the pipeline is full."""
        self.pipeline.run_until(self.filled + until)
        return self.pipeline.rate(self.filled + since, self.filled + until) * self.period_seconds


@pytest.mark.parametrize("name", CELLS)
def test_it_is_at_the_limit_from_the_first_seconds_on(name: str) -> None:
    cell = Cell(name, USUAL)
    assert cell.of_limit(0, 15) >= 0.965
    assert cell.of_limit(15, 75) >= 0.97
    assert cell.of_limit(75, 300) >= 0.97
    limits = [limit for _, limit, _ in cell.pipeline.limits]
    assert all(limit >= cell.least for limit in limits), limits
    assert cell.control.limit <= 1.25 * cell.enough, limits
    assert len(limits) <= 8, "it flaps"


@pytest.mark.parametrize("name", [name for name, (stages, _, _) in CELLS.items() if stages < 8])
def test_hiccups_cost_little_more_than_they_take(name: str) -> None:
    cell = Cell(name, HICCUPS)
    assert cell.of_limit(0, 75) >= 0.95
    assert cell.of_limit(75, 300) >= 0.965
    assert len(cell.pipeline.limits) <= 16, "it flaps"


@pytest.mark.parametrize("name", [name for name, (_, mbit, _) in CELLS.items() if mbit > 20])
def test_lines_that_stand_still_for_a_moment_cost_the_stages_little(name: str) -> None:
    cell = Cell(name, STANDSTILLS)
    assert cell.of_limit(0, 75) >= 0.95
    assert cell.of_limit(75, 300) >= 0.95
    assert len(cell.pipeline.limits) <= 16, "it flaps"


@pytest.mark.parametrize("name", [name for name, (_, mbit, _) in CELLS.items() if mbit == 20])
def test_so_do_slow_lines_once_the_control_has_found_how_many_it_takes(name: str) -> None:
    cell = Cell(name, STANDSTILLS, frame_bytes=CODED_BYTES)
    assert cell.of_limit(0, 75) >= 0.95
    assert cell.of_limit(75, 300) >= 0.97
    assert len(cell.pipeline.limits) <= 16, "it flaps"


@pytest.mark.parametrize("name", [name for name, (stages, _, _) in CELLS.items() if stages < 8])
def test_those_that_are_too_many_go_without_being_missed(name: str) -> None:
    cell = Cell(name, USUAL, times=1.8)
    rates = [cell.of_limit(10 * k, 10 * k + 10) for k in range(30)]
    assert min(rates) >= 0.955, cell.pipeline.limits
    assert cell.control.limit <= cell.enough + 1 + cell.enough // 8, cell.pipeline.limits


@pytest.mark.parametrize("name", CELLS)
def test_with_far_too_few_it_is_soon_at_the_limit(name: str) -> None:
    cell = Cell(name, USUAL, times=0.4)
    # Two ways until the first window is over, and as long until what was changed then shows.
    soon = 4 * cell.filled
    assert cell.of_limit(soon, soon + 30) >= 0.95, cell.pipeline.limits

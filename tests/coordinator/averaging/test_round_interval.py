"""The interval between rounds follows from what rounds are measured to take, and the user is told once."""

from typing import Any

import pytest

from ravnest.coordinator.averaging.round_interval import FIRST_ROUNDS, RoundInterval
from ravnest.coordinator.averaging.rounds import MeasuredRound
from ravnest.planner.averaging import ROUND_SHARE, RoundBasis
from ravnest.planner.rings.round_time import RoundTime
from ravnest.settings import Averaging

TOGETHER = 40.0


class Told:
    def __init__(self, settings: Averaging | None = None, predicted: float = 5.0) -> None:
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        time = RoundTime(line_seconds=predicted, catch_up_seconds=7.0)
        basis = RoundBasis(settings or Averaging(), (30.0, 10.0), 1, 1, 1, time)
        self.interval = RoundInterval(basis, lambda kind, reason, **rest: self.events.append((kind, reason, rest)))

    def measure(self, *seconds: float) -> None:
        for each in seconds:
            self.interval.learn(MeasuredRound(each / 4, each / 2, each))


def test_rounds_that_take_longer_than_predicted_come_less_often_and_that_is_told_once() -> None:
    told = Told()
    before = told.interval.now
    assert before.samples == ROUND_SHARE * 5 * TOGETHER
    told.measure(*[17.0] * (FIRST_ROUNDS - 1))
    assert told.interval.now == before and not told.events
    told.measure(17.0)
    assert told.interval.now.samples == 17 * (1 / 4 + ROUND_SHARE * 3 / 4) * TOGETHER
    told.measure(17.5, 16.0, 18.0, 17.0)
    [(kind, reason, fields)] = told.events
    assert kind == "rounds_corrected" and reason.startswith("rounds take 17 s instead of 5.0 s: a round every 1,190")
    assert fields == {"seconds": 17.0, "samples": 1190}


def test_a_single_slow_round_changes_nothing() -> None:
    told = Told()
    told.measure(5.0, 5.0, 5.0)
    before = told.interval.now
    told.measure(90.0, 5.0)
    assert told.interval.now == before and not told.events


def test_an_interval_that_the_job_sets_stays_and_the_times_are_told() -> None:
    told = Told(Averaging(every=400))
    told.measure(20.0, 20.0, 20.0)
    assert told.interval.now.samples == 400
    assert "as averaging.every says; a round takes 20 s, and the next one begins late" in told.events[0][1]


def test_leaving_an_owner_out_costs_the_interval_that_holds_now_and_a_catch_up() -> None:
    told = Told()
    assert told.interval.patience.catch_up_seconds == 7.0
    assert told.interval.patience.interval_seconds == pytest.approx(10.0)
    told.measure(20.0, 20.0, 20.0)
    assert told.interval.patience.interval_seconds == pytest.approx(20 * 7 / 4)

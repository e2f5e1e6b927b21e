"""A link that has become slow is told once, and once when it is well again; what is usual is its own."""

import math
from typing import Any

import pytest

from ravnest.coordinator.health.slow_links import LASTING_SECONDS, LinkPace, SlowLinks
from ravnest.coordinator.health.usual_time import LEARNING
from ravnest.net.v1.control_pb2 import LinkState, Report, Transfer

USUAL, SLOW = 0.02, 0.2
STEP = LASTING_SECONDS / 4


def learned(usual: float = USUAL) -> LinkPace:
    pace = LinkPace()
    assert [pace.take(usual, 0.0) for _ in range(LEARNING)] == [None] * LEARNING
    return pace


def told(pace: LinkPace, delay: float, since: float, steps: int = 8) -> list[bool]:
    changes = [pace.take(delay, since + step * STEP) for step in range(steps)]
    return [change.slow for change in changes if change is not None]


def test_a_link_that_stays_slow_is_told_once_and_its_recovery_once() -> None:
    pace = learned()
    assert told(pace, SLOW, 0.0) == [True]
    assert told(pace, SLOW, 10.0) == []
    assert told(pace, USUAL, 20.0) == [False]


def test_a_moment_of_slowness_is_not_told() -> None:
    pace = learned()
    for second in range(20):
        assert told(pace, SLOW, float(second), steps=3) == []
        assert pace.take(USUAL, second + 0.9) is None


def test_what_is_usual_on_a_long_line_is_not_slow() -> None:
    assert told(learned(SLOW), 1.5 * SLOW, 0.0) == []
    assert told(learned(SLOW), 3 * SLOW, 0.0) == [True]


def test_the_first_reports_of_a_young_connection_do_not_count_as_usual() -> None:
    pace = LinkPace()
    for delay in (10 * SLOW, USUAL, USUAL):
        assert pace.take(delay, 0.0) is None
    assert told(pace, SLOW, 0.0) == [True]


def test_a_link_does_not_get_used_to_being_slow() -> None:
    pace = learned()
    assert told(pace, SLOW, 0.0, steps=1000) == [True]
    assert told(pace, SLOW, 1000.0, steps=1000) == []


def test_the_change_says_how_long_it_takes_and_what_is_usual() -> None:
    pace = learned()
    pace.take(SLOW, 0.0)
    change = pace.take(SLOW, LASTING_SECONDS)
    assert change is not None and "200 ms on the way, usually 20 ms" in change.reason


class Told:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.now = 0.0
        self.links = SlowLinks(lambda kind, reason, **fields: self.events.append((kind, fields)), lambda: self.now)

    def report(
        self, delay: float, *, next: bool = True, deployment: str = "d", times: int = 8, sends: str = ""
    ) -> None:
        transfers = [Transfer(kind=sends)] if sends else []
        link = LinkState(node="b", next=next, delay_seconds=delay)
        for _ in range(times):
            self.now += STEP
            self.links.reported("a", Report(deployment=deployment, links=[link], transfers=transfers))


def test_both_ends_of_a_slow_link_are_named() -> None:
    told = Told()
    told.report(USUAL)
    told.report(SLOW)
    told.report(USUAL)
    assert told.events == [("link_slow", {"provider": "a", "to": "b"}), ("link_well", {"provider": "a", "to": "b"})]


def test_a_line_that_is_full_of_the_state_of_its_stage_is_not_slow_and_one_that_sends_a_replica_may_be() -> None:
    told = Told()
    told.report(USUAL)
    for _ in range(5):
        told.report(SLOW, times=2)
        told.report(SLOW, sends="part")
    assert told.events == []
    told.report(SLOW, sends="replica")
    assert [kind for kind, _ in told.events] == ["link_slow"]


@pytest.mark.parametrize("delay", [0.0, -1.0, math.inf, math.nan])
def test_what_is_no_delay_says_nothing(delay: float) -> None:
    told = Told()
    told.report(USUAL)
    told.report(delay)
    assert told.events == []


def test_the_link_back_and_other_deployments_have_their_own_measure() -> None:
    told = Told()
    told.report(USUAL)
    told.report(SLOW, next=False)
    told.report(SLOW, deployment="e")
    assert told.events == []

"""Delays of a link are told without a common clock, and soon after they change."""

import pytest

from ravnest.provider.links.link_delay import MIN_DELAYS, RECENT, RECENT_SECONDS, LinkDelay, ResidenceTimes


class Clock:
    """A clock that is moved by hand; each machine has its own."""

    def __init__(self, shift: float = 0.0) -> None:
        self.now = shift

    def __call__(self) -> float:
        return self.now


class Ends:
    """Both ends of a link whose clocks have nothing to do with one another."""

    def __init__(self) -> None:
        self.here, self.there = Clock(1000.0), Clock(-5.0)
        self.delay, self.residence = LinkDelay(self.here), ResidenceTimes(self.there)

    def passes(self, seconds: float) -> None:
        self.here.now += seconds
        self.there.now += seconds

    def send(self, microbatch: int, forth: float, stay: float, back: float) -> None:
        self.delay.handed_over(microbatch)
        self.passes(forth)
        self.residence.arrived(microbatch)
        self.passes(stay)
        micros = self.residence.left_micros(microbatch)
        self.passes(back)
        self.delay.returned(microbatch, micros)


@pytest.fixture
def ends() -> Ends:
    return Ends()


def test_the_stay_at_the_other_end_is_no_part_of_the_delay(ends: Ends) -> None:
    for number, stay in enumerate([0.2, 5.0, 0.1]):
        ends.send(number, 0.03, stay, 0.05)
    assert ends.delay.low_seconds == pytest.approx(0.08, abs=1e-5)


def test_nothing_is_known_before_a_microbatch_has_come_back(ends: Ends) -> None:
    ends.delay.handed_over(3)
    assert ends.delay.low_seconds == 0.0


def test_waiting_for_a_line_does_not_raise_the_delay(ends: Ends) -> None:
    for number in range(16):
        ends.send(number, 0.05 if number % 5 == 0 else 0.25, 0.1, 0.05)
    assert ends.delay.low_seconds == pytest.approx(0.1, abs=1e-5)


def test_a_way_that_has_become_longer_is_known_within_seconds(ends: Ends) -> None:
    for number in range(40):
        ends.send(number, 0.05, 0.01, 0.05)
    for number in range(40, 60):
        ends.send(number, 0.1, 0.01, 0.1)
    assert ends.delay.low_seconds == pytest.approx(0.2, abs=1e-5)


def test_delays_of_long_ago_count_only_where_there_are_no_others(ends: Ends) -> None:
    for number in range(RECENT):
        ends.send(number, 0.01, 0.0, 0.01)
    ends.passes(10 * RECENT_SECONDS)
    assert ends.delay.low_seconds == pytest.approx(0.02, abs=1e-5)
    for number in range(RECENT, RECENT + MIN_DELAYS):
        ends.send(number, 0.04, 0.0, 0.04)
    assert ends.delay.low_seconds == pytest.approx(0.08, abs=1e-5)


@pytest.mark.parametrize("micros", [0, 10**15])
def test_a_stay_that_is_not_told_or_cannot_be_is_left_out(ends: Ends, micros: int) -> None:
    ends.delay.handed_over(1)
    ends.passes(1.0)
    ends.delay.returned(1, micros)
    assert ends.delay.low_seconds == 0.0


def test_a_peer_that_exaggerates_its_stay_makes_no_delay_negative(ends: Ends) -> None:
    ends.delay.handed_over(1)
    ends.passes(1.0)
    ends.delay.returned(1, 5_000_000)
    assert ends.delay.low_seconds == 0.0


def test_gradients_of_a_microbatch_that_never_came_have_stayed_for_no_time(ends: Ends) -> None:
    assert ends.residence.left_micros(7) == 0
    ends.residence.arrived(7)
    assert ends.residence.left_micros(7) == 1
    assert ends.residence.left_micros(7) == 0


def test_microbatches_that_never_go_back_do_not_pile_up(ends: Ends) -> None:
    for number in range(20_000):
        ends.residence.arrived(number)
    assert len(ends.residence) <= 4096
    assert ends.residence.left_micros(19_999) == 1

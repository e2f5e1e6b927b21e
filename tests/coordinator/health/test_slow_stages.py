"""When a stage is taken for slow, and when that is a reason to give it to another."""

import pytest

from ravnest.coordinator.health.slow_stages import (
    GAIN,
    LASTING_SECONDS,
    SLOW,
    StagePace,
    Work,
    who_is_slow,
    worth_replacing,
)


class Stage:
    """A stage that takes as long for a microbatch as it is told, and reports every second."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.pace = StagePace()
        self.pieces, self.worked = 0, 0.0

    def second(self, now: float, pieces: int = 4) -> None:
        self.pieces += pieces
        self.worked += pieces * self.seconds
        self.pace.take(Work(self.pieces, self.worked), now)


def play(stages: dict[str, Stage], begin: float, seconds: int, pieces: int = 4) -> tuple[float, list[str]]:
    """So many seconds of training; when it is over, and whom somebody waited for meanwhile."""
    blamed = []
    for now in range(int(begin), int(begin) + seconds):
        for stage in stages.values():
            stage.second(float(now), pieces)
        found = who_is_slow(list(stages), {name: stage.pace for name, stage in stages.items()}, float(now))
        if found is not None:
            blamed.append(found[0])
    return begin + seconds, blamed


def test_a_stage_that_becomes_slow_for_good_is_named_after_a_while() -> None:
    stages = {"a": Stage(0.05), "b": Stage(0.06)}
    now, blamed = play(stages, 0, 60)
    assert blamed == []
    stages["b"].seconds = 0.3
    now, blamed = play(stages, now, int(LASTING_SECONDS))
    assert blamed == []
    now, blamed = play(stages, now, 15)
    assert blamed and set(blamed) == {"b"}
    stages["b"].seconds = 0.06
    play(stages, now, 15)
    assert play(stages, now + 15, 60)[1] == []


@pytest.mark.parametrize("times", [1.5, SLOW - 0.1])
def test_one_that_is_somewhat_slower_is_not(times: float) -> None:
    stages = {"a": Stage(0.05), "b": Stage(0.06)}
    now, _ = play(stages, 0, 60)
    stages["b"].seconds *= times
    assert play(stages, now, 300)[1] == []


def test_nor_one_of_several_that_all_are() -> None:
    """A machine that they share is busy: another would be no faster."""
    stages = {"a": Stage(0.05), "b": Stage(0.06)}
    now, _ = play(stages, 0, 60)
    for stage in stages.values():
        stage.seconds *= 10
    assert play(stages, now, 300)[1] == []


def test_nor_one_that_always_was() -> None:
    stages = {"a": Stage(0.05), "b": Stage(0.9)}
    assert play(stages, 0, 300)[1] == []


def test_nor_one_that_hardly_has_anything_to_do() -> None:
    stages = {"a": Stage(0.05), "b": Stage(0.06)}
    now, _ = play(stages, 0, 60)
    stages["b"].seconds = 1.0
    assert play(stages, now, 30, pieces=0)[1] == []


def test_one_that_began_anew_is_counted_from_there() -> None:
    pace = StagePace()
    for now in range(30):
        pace.take(Work(100 + 4 * now, 0.2 * now), float(now))
    pace.take(Work(0, 0.0), 30.0)
    pace.take(Work(20, 1.0), 36.0)
    assert pace.seconds == pytest.approx(0.05) and pace.slow_for(36.0) == 0


def test_it_is_given_to_whoever_makes_the_cluster_clearly_faster() -> None:
    now = 8 / 0.4
    assert "with c in its place" in worth_replacing(0.4, 8, {"b": 2 * now, "c": 3 * now})
    assert worth_replacing(0.4, 8, {"b": (GAIN - 0.1) * now}) == ""
    assert worth_replacing(0.4, 8, {}) == ""

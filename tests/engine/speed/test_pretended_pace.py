"""Work at a simulated pace takes as long as on the simulated machine, without using the CPU for it."""

import threading
import time

import pytest

from ravnest.engine.speed.pretended_pace import Pace, Pretence, StageSeconds

WORK_SECONDS = 0.02


def work() -> None:
    until = time.thread_time() + WORK_SECONDS
    while time.thread_time() < until:
        pass


def test_slower_work_takes_longer_but_no_more_cpu_time() -> None:
    pace = Pace(Pretence(4.0))
    elapsed, used = time.perf_counter(), time.thread_time()
    for _ in range(3):
        with pace.work("forward"):
            work()
    elapsed, used = time.perf_counter() - elapsed, time.thread_time() - used
    assert elapsed >= 3 * 4 * WORK_SECONDS * 0.95
    assert used < 3 * WORK_SECONDS * 1.5


@pytest.mark.parametrize(
    ("elapsed", "expected"),
    [
        (1.0, [3.0, 2.75, 2.75]),  # Woken a quarter of a second late each time.
        (2.0, [2.0, 1.75, 1.75]),  # Others had the processor for half of the time.
        (9.0, []),
    ],
)
def test_waits_make_up_for_late_wakeups_and_shared_cpus(
    elapsed: float, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, used = 0.0, 0.0
    waits: list[float] = []

    def wait(seconds: float) -> None:
        nonlocal now
        waits.append(seconds)
        now += seconds + 0.25

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr("ravnest.engine.speed.pretended_pace.work_clock", lambda: lambda: used)
    pace = Pace(Pretence(4.0), sleep=wait, max_late_seconds=1.0)
    for _ in range(3):
        with pace.work("forward"):
            now += elapsed
            used += 1.0
    assert waits == pytest.approx(expected)


def test_without_simulation_there_is_no_wait() -> None:
    waits: list[float] = []
    with Pace(sleep=waits.append).work("forward"):
        work()
    assert waits == []


def test_end_interrupts_the_wait_and_skips_later_ones() -> None:
    pace = Pace(Pretence(1e6))
    worked = threading.Event()

    def run() -> None:
        for _ in range(2):
            with pace.work("forward"):
                work()
                worked.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert worked.wait(10)
    pace.end()
    thread.join(10)
    assert not thread.is_alive()


def test_failed_work_is_not_followed_by_a_wait() -> None:
    pace = Pace(Pretence(1e6))
    with pytest.raises(ValueError, match="at once"), pace.work("forward"):
        work()
        raise ValueError("at once")


def test_interruptions_are_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    now, used = 0.0, 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr("ravnest.engine.speed.pretended_pace.work_clock", lambda: lambda: used)
    taken = []

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    pace = Pace(Pretence(10.0), sleep=wait)
    # One of four pieces of work is interrupted; then comes one of another size, and one of another kind.
    work = [("forward", 1.0), ("forward", 1.0), ("forward", 1.0), ("forward", 1.4), ("forward", 0.3), ("update", 1.4)]
    for kind, seconds in work:
        began = now
        with pace.work(kind):
            now, used = now + seconds, used + seconds
        taken.append(now - began)
    assert taken == pytest.approx([10.0, 10.0, 10.0, 10.0, 3.0, 14.0])


class Clock:
    """A clock that tests advance; each wait ends `late` seconds too late."""

    def __init__(self, late: float, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self._late = late
        patch.setattr(time, "perf_counter", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self._late

    def spent_on(self, pace: Pace, kind: str, seconds: float) -> float:
        began = self.now
        with pace.work(kind):
            self.now += seconds
        return self.now - began


def test_every_stage_takes_the_simulated_time_and_overruns_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(0.0, monkeypatch)
    pace = Pace(Pretence(seconds=StageSeconds(1.0, 2.0)), sleep=clock.sleep)
    work = [("forward", 0.5), ("backward", 0.5), ("forward", 0.9), ("evaluate", 0.1)]
    assert [clock.spent_on(pace, *each) for each in work] == pytest.approx([1.0, 2.0, 1.0, 1.0])
    assert pace.overruns == 0
    assert clock.spent_on(pace, "forward", 1.04) == pytest.approx(1.04)
    assert pace.overruns == 1
    # The next wait is shorter by the excess.
    assert clock.spent_on(pace, "forward", 0.5) == pytest.approx(0.96)


def test_late_wakeups_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0.01, monkeypatch)
    pace = Pace(Pretence(seconds=StageSeconds(1.0, 2.0)), sleep=clock.sleep)
    for _ in range(100):
        clock.spent_on(pace, "forward", 0.1)
    assert clock.now == pytest.approx(100.01)


def test_both_parts_of_a_split_backward_take_its_simulated_time() -> None:
    seconds = StageSeconds(1.0, 2.0)
    assert seconds.of_kind("backward") == 2.0 and seconds.of_kind("weights") == 0.0
    assert seconds.of_kind("backward", split_backward=True) + seconds.of_kind("weights", split_backward=True) == 2.0


def test_the_simulation_is_described_in_words() -> None:
    assert Pretence().in_words == ""
    assert "2.5 times slower" in Pretence(2.5).in_words
    told = Pretence(seconds=StageSeconds(0.05, 0.1))
    assert "50 ms forward and 100 ms backward" in told.in_words
    assert told.stage_seconds == pytest.approx(0.15)


def test_an_update_counts_as_part_of_the_simulated_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0.0, monkeypatch)
    pace = Pace(Pretence(seconds=StageSeconds(1.0, 2.0)), sleep=clock.sleep)
    for _ in range(10):
        for each in (("forward", 0.5), ("backward", 0.5), ("update", 0.05)):
            clock.spent_on(pace, *each)
    assert clock.now == pytest.approx(10 * 3.0 + 0.05), "the last one is made up for by what comes next"

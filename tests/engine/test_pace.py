"""A stage that pretends to be slower takes as long as a slower machine, without using the processor for it."""

import threading
import time

import pytest

from ravnest.engine.pace import Pace, Pretence

WORK_SECONDS = 0.02


def work() -> None:
    until = time.thread_time() + WORK_SECONDS
    while time.thread_time() < until:
        pass


def test_work_takes_so_many_times_as_long_and_no_more_of_the_processor() -> None:
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
def test_the_whole_takes_as_long_as_on_a_slower_machine_of_ones_own(
    elapsed: float, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    pace = Pace(Pretence(4.0))
    now, used = 0.0, 0.0
    waits: list[float] = []

    def wait(seconds: float) -> None:
        nonlocal now
        waits.append(seconds)
        now += seconds + 0.25

    monkeypatch.setattr("ravnest.engine.pace._MOST_LATE_SECONDS", 1.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr("ravnest.engine.pace.work_clock", lambda: lambda: used)
    monkeypatch.setattr(pace._ended, "wait", wait)
    for _ in range(3):
        with pace.work("forward"):
            now += elapsed
            used += 1.0
    assert waits == pytest.approx(expected)


def test_at_its_own_speed_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace()
    monkeypatch.setattr(pace._ended, "wait", None)
    with pace.work("forward"):
        work()


def test_the_end_interrupts_a_wait_and_later_ones() -> None:
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


def test_an_error_is_not_waited_for() -> None:
    pace = Pace(Pretence(1e6))
    with pytest.raises(ValueError, match="at once"), pace.work("forward"):
        work()
        raise ValueError("at once")


def test_what_comes_in_between_is_not_made_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace(Pretence(10.0))
    now, used = 0.0, 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr("ravnest.engine.pace.work_clock", lambda: lambda: used)
    taken = []

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(pace._ended, "wait", wait)
    # Of four pieces of work one is interrupted; then comes one of another size, and one of another kind.
    work = [("forward", 1.0), ("forward", 1.0), ("forward", 1.0), ("forward", 1.4), ("forward", 0.3), ("update", 1.4)]
    for kind, seconds in work:
        began = now
        with pace.work(kind):
            now, used = now + seconds, used + seconds
        taken.append(now - began)
    assert taken == pytest.approx([10.0, 10.0, 10.0, 10.0, 3.0, 14.0])

"""Limits of a user hold for everything that a process sends and receives, on average and for threads as well."""

import asyncio
import math

import pytest

from ravnest.net.pacing.traffic_limit import RateLimit, Traffic, UserLimits


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_without_a_limit_bytes_are_counted_and_nothing_waits() -> None:
    limit = RateLimit()
    assert [limit.take(1 << 30) for _ in range(3)] == [0.0] * 3
    assert limit.total_bytes == 3 << 30


def test_the_average_keeps_to_the_limit_whatever_the_size_of_messages() -> None:
    clock = Clock()
    limit = RateLimit(clock)
    limit.set(2e6)
    for number in range(300):
        clock.now += limit.take(10_000 if number % 3 else 4_000_000)
    clock.now += limit.take(10_000)
    assert limit.total_bytes / (clock.now - 50.0) == pytest.approx(0.95 * 2e6, rel=0.02)


def test_a_small_message_does_not_wait_behind_large_ones_and_counts_all_the_same() -> None:
    clock = Clock()
    limit = RateLimit(clock)
    limit.set(1e6)
    limit.take(9_500_000)
    assert limit.take(500) == 0.0
    assert limit.take(10_000) == pytest.approx(10.0, rel=0.01)


def test_both_directions_have_limits_of_their_own() -> None:
    clock = Clock()
    traffic = Traffic(clock)
    traffic.limit(UserLimits(1e6, math.inf))
    traffic.sent.take(1_000_000)
    assert traffic.sent.take(1_000_000) > 1.0 and traffic.received.take(1 << 30) == 0.0
    traffic.received.take(1 << 30)
    assert traffic.total_bytes == 2_000_000 + (2 << 30)


def test_a_thread_stops_waiting_once_its_line_is_closed() -> None:
    limit = RateLimit()
    limit.set(1e4)
    limit.take(1 << 40)
    limit.wait_turn(1 << 20, lambda: True)


def test_a_message_waits_in_an_event_loop_and_can_be_cancelled() -> None:
    async def test() -> None:
        limit = RateLimit()
        limit.set(1e4)
        await limit.turn(1 << 40)
        waiting = asyncio.create_task(limit.turn(1 << 20))
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(asyncio.wait_for(test(), 5.0))

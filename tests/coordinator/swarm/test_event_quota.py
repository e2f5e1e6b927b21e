"""No provider floods the log of a run."""

from ravnest.coordinator.swarm.event_quota import EventQuota


def test_a_provider_causes_many_events_at_once_and_few_in_the_long_run() -> None:
    quota = EventQuota()
    assert sum(quota.take(0.0) for _ in range(10_000)) == 50
    assert sum(quota.take(second) for second in range(1, 101) for _ in range(100)) == 50


def test_a_clock_that_stands_still_gives_nothing_back() -> None:
    quota = EventQuota()
    assert sum(quota.take(5.0 - number) for number in range(60)) == 50

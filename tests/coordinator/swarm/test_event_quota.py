"""No provider fills the log of a run."""

from ravnest.coordinator.swarm.event_quota import EventShare


def test_a_provider_causes_many_events_at_once_and_few_in_the_long_run() -> None:
    share = EventShare()
    assert sum(share.take("mallory", 0.0) for _ in range(10_000)) == 50
    assert sum(share.take("mallory", second) for second in range(1, 101) for _ in range(100)) == 50
    assert share.take("anna", 100.0), "what others say is heard all the same"


def test_a_clock_that_stands_still_gives_nothing_back() -> None:
    share = EventShare()
    taken = [share.take("mallory", 5.0 - number) for number in range(60)]
    assert sum(taken) == 50

"""Pauses between retries are short at first and grow to their maximum."""

from ravnest.net.streams.backoff import LAST_BACKOFF_SECONDS, Backoff


def test_a_peer_that_is_away_is_tried_often_at_first_and_seldom_later() -> None:
    now = 0.0
    backoff = Backoff(clock=lambda: now)
    pauses = []
    while now < 60:
        pauses.append(backoff.next_seconds())
        now += pauses[-1]
    assert pauses[:4] == [0.1, 0.2, 0.4, 0.4]
    assert max(pauses) == pauses[-1] == LAST_BACKOFF_SECONDS
    assert len(pauses) < 100


def test_after_a_success_the_pauses_are_short_again() -> None:
    now = 0.0
    backoff = Backoff(clock=lambda: now)
    assert backoff.is_first
    for _ in range(3):
        now += backoff.next_seconds()
    assert not backoff.is_first
    backoff.reset()
    assert backoff.is_first and backoff.elapsed_seconds == 0.0 and backoff.next_seconds() == 0.1

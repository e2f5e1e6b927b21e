"""One caller measures only a few times a minute, without an effect on others."""

from ravnest.net.probe.call_rate import CALLS_PER_MINUTE, CallRate


def test_each_caller_has_its_own_limit_which_ends_after_a_minute() -> None:
    now = 0.0
    rate = CallRate(lambda: now)
    for _ in range(CALLS_PER_MINUTE):
        assert rate.take("anna")[0]
    good, reason = rate.take("anna")
    assert not good and reason.startswith("anna has measured 6 times within a minute; try again")
    assert rate.take("ben")[0]
    now = 61.0
    assert rate.take("anna")[0]

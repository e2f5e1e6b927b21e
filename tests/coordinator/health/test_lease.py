"""A provider that is not heard is given up early only where it holds others up and somebody can take its place."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.coordinator.health.lease import (
    RETURN_SECONDS,
    SILENCE_SECONDS,
    Evidence,
    Gaps,
    Lease,
    Replacement,
    State,
    Uplink,
    after_a_stop,
    judge,
    late_by,
)
from ravnest.coordinator.swarm.heartbeat import RECONNECT_SECONDS

REGULAR = Gaps(1.2, 0.02)


def lost_after(**known: object) -> float:
    """How long it takes until the provider is lost, looking as often as the verdicts ask for."""
    broken = known.pop("broken", False)
    passed = 0.0
    for _ in range(10_000):
        evidence = Evidence(silent_seconds=passed, broken_seconds=passed if broken else None, **known)  # type: ignore[arg-type]
        verdict = judge(evidence)
        if verdict.state is State.LOST:
            return passed
        assert verdict.look_again_seconds > 0
        passed += verdict.look_again_seconds
    raise AssertionError("never lost")


def test_a_broken_connection_of_one_that_a_standby_can_replace_is_a_loss_after_a_second_or_two() -> None:
    assert 0.9 <= lost_after(broken=True, blocks=True, replacement="standby") <= 1.1
    far = Uplink(round_trip_seconds=0.15)
    assert 1.5 <= lost_after(broken=True, blocks=True, replacement="standby", uplink=far) <= 2.0


def test_silence_of_one_that_a_standby_can_replace_is_a_loss_after_three_to_five_seconds() -> None:
    assert 2.9 <= lost_after(blocks=True, replacement="standby", gaps=REGULAR) <= 3.1
    slow = Uplink(round_trip_seconds=0.06, up_bytes_per_second=20e6 / 8)
    assert 2.9 <= lost_after(blocks=True, replacement="standby", gaps=REGULAR, uplink=slow) <= 5.0


@pytest.mark.parametrize("blocks", [True, False])
def test_where_nobody_can_take_its_place_a_provider_is_waited_for(blocks: bool) -> None:
    assert lost_after(broken=True, blocks=blocks, replacement="none") >= RECONNECT_SECONDS - 0.1
    assert lost_after(blocks=blocks, replacement="none") >= SILENCE_SECONDS - 0.1


def test_one_that_holds_nobody_up_is_waited_for_though_a_standby_is_ready() -> None:
    assert lost_after(broken=True, blocks=False, replacement="standby") >= RECONNECT_SECONDS - 0.1
    assert lost_after(blocks=False, replacement="standby", gaps=REGULAR) >= SILENCE_SECONDS - 0.1


def test_the_more_there_is_to_do_without_it_the_longer_it_is_waited_for() -> None:
    for broken in (True, False):
        waits = [
            lost_after(broken=broken, blocks=True, replacement=replacement, gaps=REGULAR)
            for replacement in ("standby", "reform", "none")
        ]
        assert waits == sorted(waits) and len(set(waits)) == 3


def test_one_that_speaks_irregularly_is_waited_for_longer() -> None:
    gaps = Gaps()
    for gap in [0.5, 4.0] * 10:
        gaps = gaps.after(gap)
    assert lost_after(blocks=True, replacement="standby", gaps=gaps) > 5.0
    for _ in range(30):
        gaps = gaps.after(1.2)
    assert lost_after(blocks=True, replacement="standby", gaps=gaps) <= 3.2, "it has become regular again"


def test_a_neighbour_that_has_lost_it_too_shortens_the_wait() -> None:
    for broken in (True, False):
        alone = lost_after(broken=broken, blocks=True, replacement="standby", gaps=REGULAR)
        told = lost_after(broken=broken, blocks=True, replacement="standby", gaps=REGULAR, complaints=("ben",))
        assert told < 0.8 * alone
    verdict = judge(Evidence(9.0, 9.0, REGULAR, blocks=True, replacement="standby", complaints=("ben",)))
    assert "no connection with ben either" in verdict.reason


def test_a_neighbour_s_complaint_alone_loses_nobody_who_is_heard() -> None:
    assert judge(Evidence(0.4, blocks=True, replacement="standby", complaints=("ben",))).state is State.WELL


def test_one_whose_process_has_ended_is_not_waited_for() -> None:
    for replacement in ("standby", "reform"):
        assert lost_after(broken=True, blocks=True, replacement=replacement, refuses=True) <= 0.35
    # A router that is being restarted may say the same for a moment.
    assert lost_after(broken=True, blocks=True, replacement="none", refuses=True) >= RECONNECT_SECONDS - 0.1
    assert judge(Evidence(0.5, blocks=True, replacement="standby", refuses=True)).state is State.WELL


def test_one_that_builds_a_stage_may_be_silent_for_longer() -> None:
    usual = lost_after(blocks=True, replacement="standby", gaps=REGULAR)
    assert lost_after(blocks=True, replacement="standby", gaps=REGULAR, building=True) >= 1.5 * usual


def test_a_verdict_says_why() -> None:
    well = judge(Evidence(0.5))
    suspected = judge(Evidence(4.0, 4.0, blocks=True, replacement="none"))
    silent = judge(Evidence(4.0, gaps=REGULAR, blocks=True, replacement="standby"))
    broken = judge(Evidence(9.0, 9.0, blocks=True, replacement="reform"))
    assert (well.state, well.reason) == (State.WELL, "it was heard")
    assert suspected.state is State.SUSPECTED
    assert suspected.reason == "no connection for 4.0 s; timeout in 26.0 s"
    assert silent.reason == (
        "nothing received for 4.0 s (usually every 1.2 s), it blocks its cluster, and a standby is ready"
    )
    assert broken.reason == "no connection for 9.0 s, it blocks its cluster, and the others can go on without it"


@pytest.mark.parametrize("uplink", [Uplink(), Uplink(0.05, 100e6), Uplink(0.3, 50e3)])
def test_a_stage_that_does_not_report_is_lost_though_it_is_heard(uplink: Uplink) -> None:
    heard = Evidence(0.1, uplink=uplink, blocks=True, replacement="standby")
    assert judge(replace(heard, unreported_seconds=SILENCE_SECONDS - 0.1)).state is State.WELL
    verdict = judge(replace(heard, unreported_seconds=SILENCE_SECONDS + 5.0))
    assert verdict.state is State.LOST and "has not reported for 65 s" in verdict.reason
    assert judge(replace(heard, unreported_seconds=100.0, spared_seconds=1.0)).state is not State.LOST


@given(
    silent=st.floats(0, 100),
    broken=st.none() | st.floats(0, 100),
    gaps=st.lists(st.floats(0, 1000), max_size=20),
    trip=st.floats(0, 2),
    up=st.floats(0, 1e9),
    blocks=st.booleans(),
    replacement=st.sampled_from(["standby", "reform", "none"]),
    spared=st.floats(0, 20),
)
def test_nobody_is_lost_that_was_just_heard_and_everybody_is_in_the_end(
    silent: float,
    broken: float | None,
    gaps: list[float],
    trip: float,
    up: float,
    blocks: bool,
    replacement: Replacement,
    spared: float,
) -> None:
    usual = Gaps()
    for gap in gaps:
        usual = usual.after(gap)
    uplink = Uplink(trip, up)
    verdict = judge(Evidence(silent, broken, usual, uplink, blocks, replacement, spared_seconds=spared))
    assert verdict.state is State.LOST or verdict.look_again_seconds > 0
    if spared > 0 or (silent < 2 and broken is None):
        assert verdict.state is not State.LOST
    if spared == 0 and silent >= 75:
        assert verdict.state is State.LOST


def test_the_clock_on_the_wall_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here reads a clock: an hour that the wall's clock jumps is no hour of silence."""
    monkeypatch.setattr(time, "time", lambda: 1e12)
    now = time.monotonic()
    lease = Lease(now).seen(now + 1.0, None)
    assert lease.silent_seconds(now + 1.5) == pytest.approx(0.5)
    assert judge(Evidence(lease.silent_seconds(now + 1.5), blocks=True, replacement="standby")).state is State.WELL


def test_a_lease_learns_how_often_its_provider_speaks() -> None:
    lease = Lease(100.0)
    for number in range(1, 40):
        lease = lease.seen(100.0 + 0.3 * number, None)
        lease = lease.seen(100.0 + 0.3 * number, None)
    assert lease.gaps.mean_seconds == pytest.approx(0.3, abs=0.01) and lease.gaps.deviation_seconds < 0.01
    assert lease.silent_seconds(112.0) == pytest.approx(0.3)


def test_whoever_looks_late_was_stopped_and_gives_everybody_a_fresh_lease() -> None:
    assert late_by(10.0, 10.4) == 0.0
    assert late_by(10.0, 30.0) == 20.0
    connected, broken = Lease(9.5), Lease(9.5).seen(9.0, 9.8)
    for lease in (connected, broken):
        fresh = after_a_stop(lease, 20.0, 30.0)
        # It broke while nobody could see it: the links say since when, which does not count.
        fresh = fresh.seen(9.5, 12.0)
        assert (fresh.silent_seconds(30.0), fresh.broken_seconds(30.0)) == (0.0, 0.0)
        assert fresh.spared_seconds(30.0) == RETURN_SECONDS
        known = Evidence(3.9, 3.9, fresh.gaps, Uplink(), True, "standby", spared_seconds=fresh.spared_seconds(33.9))
        assert judge(known).state is State.SUSPECTED
        late = Evidence(11.0, 11.0, fresh.gaps, Uplink(), True, "standby", spared_seconds=fresh.spared_seconds(41.0))
        assert judge(late).state is State.LOST


def test_a_connection_that_comes_back_and_breaks_again_is_waited_for_again() -> None:
    lease = Lease(10.0).seen(10.0, 11.0)
    assert lease.broken_seconds(12.0) == 1.0
    lease = lease.seen(12.1, None)
    assert lease.broken_seconds(12.2) is None
    assert lease.seen(12.1, 13.0).broken_seconds(13.5) == 0.5


@pytest.mark.parametrize("replacement", ["standby", "reform"])
@pytest.mark.parametrize("megabits", [1, 2, 10, 100])
def test_a_heartbeat_behind_a_full_buffer_of_its_line_is_no_silence(replacement: Replacement, megabits: int) -> None:
    """2 MB of activations take 16 s at 1 Mbit/s, and heartbeats wait behind them."""
    uplink = Uplink(0.05, megabits * 1e6 / 8)
    silent = 1.0 + (2 << 20) / uplink.up_bytes_per_second
    evidence = Evidence(silent, uplink=uplink, blocks=True, replacement=replacement)
    assert judge(evidence).state is not State.LOST
    lost = replace(evidence, silent_seconds=silent + 25.0)
    assert judge(lost).state is State.LOST, "a provider that stays silent is given up"

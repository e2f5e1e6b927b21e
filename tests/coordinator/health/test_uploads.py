"""State that comes is work, at whatever rate its line has; what is only claimed, or trickles, is not."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from ravnest.coordinator.health.uploads import (
    MIN_SHARE,
    URGENT_SHARE,
    describe_claim,
    fills_its_line,
    is_progressing,
    last_progress_at,
    urgent_rate,
)
from ravnest.coordinator.recovery.membership_changes import leave_seconds
from ravnest.coordinator.replicas.pace import MIN_TIMEOUT_SECONDS, replica_timeout_seconds
from ravnest.coordinator.swarm import uploads as counters
from ravnest.coordinator.swarm.uploads import UploadProgress, Uploads
from ravnest.net.pacing.state_rate import DEFAULT_SETTINGS, piece_bytes
from ravnest.net.v1.control_pb2 import Report, Transfer

HOME = 10e6 / 8
"""Bytes a second of an uplink of 10 Mbit/s."""
STATE = 63_000_000


def test_state_that_comes_at_the_rate_of_its_line_is_work_however_long_it_takes() -> None:
    for rate in (HOME, HOME / 10, 125e6):
        for share in (0.1, 0.5, 1.0):
            done = int(share * STATE)
            assert is_progressing(UploadProgress(done, done / rate, 0.5), rate)[0]
            assert is_progressing(UploadProgress(done, 2 * done / rate, 0.5), rate)[0], "activations share the line"


def test_state_of_which_nothing_comes_any_more_is_no_work() -> None:
    is_work, why = is_progressing(UploadProgress(12_000_000, 60.0, 31.0), HOME)
    assert not is_work and why == "nothing has arrived for 31 s"
    assert is_progressing(UploadProgress(12_000_000, 60.0, 9.0), HOME)[0]
    assert is_progressing(UploadProgress(12_000_000, 600.0, 60.0), HOME / 10)[0], (
        "a piece takes as long as its line takes for it"
    )


def test_state_that_trickles_is_no_work_though_some_of_it_always_comes() -> None:
    seconds = 1.0
    while is_progressing(UploadProgress(int(0.002 * HOME * seconds), seconds, 0.1), HOME)[0]:
        seconds += 1.0
        assert seconds < 60.0
    assert (
        "its line takes less than 60 s for that"
        in is_progressing(UploadProgress(int(0.002 * HOME * 60), 60.0, 0.1), HOME)[1]
    )


def test_an_upload_that_a_stage_waits_for_has_the_line_for_itself() -> None:
    slow = UploadProgress(int(0.05 * HOME * 200), 200.0, 0.1)
    assert is_progressing(slow, HOME)[0], "a part that is collected in the background may take its time"
    assert not is_progressing(slow, HOME, URGENT_SHARE)[0]
    # Eight of them share the coordinator's line.
    assert urgent_rate(HOME, HOME / 16) == HOME / 16 and urgent_rate(HOME, 0.0) == HOME and urgent_rate(0.0, 0.0) == 0.0
    assert is_progressing(slow, urgent_rate(HOME, HOME / 16), URGENT_SHARE)[0]


def test_how_long_a_provider_can_claim_to_send_is_bounded_by_what_its_state_can_be() -> None:
    most = STATE / (MIN_SHARE * HOME) + 60.0
    assert not is_progressing(UploadProgress(STATE, most, 0.1), HOME)[0]


def test_what_the_coordinator_does_with_it_is_not_held_against_the_provider() -> None:
    assert is_progressing(UploadProgress(STATE, 1e6, 1e6, is_writing=True), HOME)[0]


def test_uploads_are_counted_as_they_come_and_only_they_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(counters.time, "monotonic", lambda: now)
    uploads = Uploads()
    claim = Transfer(kind="checkpoint", name="checkpoint-5", done_bytes=60_000_000, total_bytes=STATE, seconds=24.0)

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal now
        for _ in range(3):
            now += 1.0
            yield bytes(1_000_000)

    async def test() -> None:
        nonlocal now
        assert last_progress_at(uploads, "checkpoint-5", HOME, now) is None
        assert describe_claim(claim, uploads, HOME, now) == (
            "has been sending its state for 24 s (checkpoint-5), and nothing has arrived"
        )
        with uploads.track("checkpoint-5") as upload:
            count = 0
            async for data in upload.counted(chunks()):
                count += len(data)
                assert uploads.heard_at == now and last_progress_at(uploads, "checkpoint-5", HOME, now) == now
                assert last_progress_at(uploads, "checkpoint-6", HOME, now) is None, "no stage waits for that one"
                if count == 2_000_000:
                    break
            # A disk that is slow is the coordinator's own affair; a line over which nothing comes is not.
            assert upload.is_writing
            upload.is_writing = False
            now += 40.0
            assert last_progress_at(uploads, "checkpoint-5", HOME, now) is None
            assert "2 MB of 63 MB have arrived, nothing has arrived for 40 s" in describe_claim(
                claim, uploads, HOME, now
            )
        assert uploads.under_way == [] and uploads.heard_at == 1002.0

    asyncio.run(test())


def test_a_replica_has_as_long_as_its_line_takes_for_it() -> None:
    assert replica_timeout_seconds(1000, 0.0, 0.0) == MIN_TIMEOUT_SECONDS
    assert replica_timeout_seconds(STATE, HOME, 0.0) > 4 * STATE / HOME, "it has a quarter of the line"
    assert replica_timeout_seconds(STATE, 125e6, 0.0) == MIN_TIMEOUT_SECONDS
    assert replica_timeout_seconds(STATE, 125e6, 20.0) == 200.0


def test_who_wants_to_leave_is_kept_until_its_stage_can_have_gone_over_its_line() -> None:
    assert leave_seconds(0, HOME) == leave_seconds(STATE, 0.0) == 60.0
    assert leave_seconds(STATE, HOME) > 60.0 + STATE / HOME


@pytest.mark.parametrize("rate", [1e6 / 8, HOME, 125e6])
def test_state_that_yields_to_activations_all_the_time_is_work_on_any_line(rate: float) -> None:
    """Each transfer gets one hundredth of its line at least, in the pieces that the line takes."""
    share, piece = DEFAULT_SETTINGS.transfer_share * rate, piece_bytes(rate)
    for seconds in range(1, 5000, 7):
        done = int(share * seconds) // piece * piece
        still = seconds - done / share
        assert is_progressing(UploadProgress(done, float(seconds), still), rate)[0], seconds


def test_only_a_part_that_a_cluster_waits_for_is_a_reason_not_to_look_at_how_slow_its_line_is() -> None:
    assert not fills_its_line(Report(transfers=[Transfer(kind="replica"), Transfer(kind="checkpoint")]))
    assert fills_its_line(Report(transfers=[Transfer(kind="replica"), Transfer(kind="part")]))

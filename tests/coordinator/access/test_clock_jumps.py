"""A clock that is set while a run goes on ends no invite, makes no checkpoint due and spoils no figure."""

import time
from pathlib import Path

import pytest

from ravnest.coordinator.access.admission import Admission
from ravnest.coordinator.access.invites import admit
from ravnest.coordinator.access.steady_clock import SteadyClock
from ravnest.coordinator.feed.ledger import DataPosition, Ledger
from ravnest.coordinator.report.progress import Progress
from ravnest.monitor.events import EventLog, read_events
from ravnest.net.identity.certificates import certificate_request, new_key, read_certificate
from ravnest.net.identity.identity import Identity
from ravnest.settings import Checkpoint
from tests.coordinator.checkpoints.savers import a_saver

DAY_SECONDS = 86400.0
JUMPS = pytest.mark.parametrize("jump", [DAY_SECONDS, -DAY_SECONDS])


def jumps(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + seconds)


@JUMPS
def test_time_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    clock = SteadyClock()
    before = clock()
    assert abs(before - time.time()) < 1
    jumps(monkeypatch, jump)
    assert 0 <= clock() - before < 10


@JUMPS
def test_an_invite_ends_when_its_time_has_passed_and_not_when_the_clock_is_set(
    monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    admission = Admission.in_memory()
    invite = admission.invite("127.0.0.1", 1, lifetime_seconds=3600.0)
    over = admission.invite("127.0.0.1", 1, lifetime_seconds=0.0)
    jumps(monkeypatch, jump)
    identity = Identity("invite", invite.token.id)
    assert admission.check(identity)[0]
    assert not admission.check(Identity("invite", over.token.id))[0]
    request = certificate_request(new_key())
    found = admission.join(identity, request, "anna")
    # What other machines check against their own clocks is dated by the clock as it is now.
    assert abs(read_certificate(found.certificate).not_valid_after_utc.timestamp() - time.time() - 30 * 86400) < 10
    admission.close()


@JUMPS
def test_no_checkpoint_is_due_because_a_clock_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    saver = a_saver(tmp_path, Checkpoint(every_seconds=60))
    jumps(monkeypatch, jump)
    assert saver.due(1) is None


@JUMPS
def test_how_fast_a_run_is_does_not_hang_on_the_time_of_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    progress = Progress("digits", 1, Ledger(DataPosition()))
    progress.clock.run()
    jumps(monkeypatch, jump)
    summary = progress.summary("running", "")
    assert 0 <= summary.seconds < 60
    events = EventLog(tmp_path / "events.jsonl")
    events.emit("one", "")
    jumps(monkeypatch, jump)
    events.emit("two", "")
    one, two = read_events(tmp_path / "events.jsonl")
    assert 0 <= two["elapsed"] - one["elapsed"] < 60
    events.close()


def test_a_token_without_an_end_is_good_at_any_time() -> None:
    admission = Admission.in_memory()
    token = admission.invite("127.0.0.1", 1, lifetime_seconds=None).token
    assert admit(admission.tokens.token(token.id), 1e12)[0]
    admission.close()

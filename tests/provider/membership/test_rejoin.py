"""A provider joins again when its session ends, and tells its user while that fails."""

import asyncio
from collections.abc import Callable

import pytest

from ravnest.errors import PeerError, RefusedError
from ravnest.provider.membership import rejoin
from ravnest.provider.membership.departure import Departure
from ravnest.provider.membership.rejoin import SessionOverError, reach_again, serve_sessions

AWAY = PeerError("cannot reach the coordinator")
DROPPED = SessionOverError(RefusedError("it was thrown out"))
LOST = SessionOverError(PeerError("the connection is gone"))


def served(*results: int | Exception) -> tuple[Callable[[], int], list[str]]:
    """Sessions with these ends, one after the other; and the lines for the user."""
    said: list[str] = []
    left = list(results)

    async def serve() -> int:
        result = left.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    def run() -> int:
        departure = Departure(lambda: False, said.append)
        return asyncio.run(serve_sessions(serve, lambda: None, departure, said.append))

    return run, said


def test_the_user_hears_once_that_the_coordinator_is_away() -> None:
    run, said = served(LOST, AWAY, AWAY, LOST, AWAY, 0)
    assert run() == 0
    assert said == ["cannot reach the coordinator; trying to join again for 10 minutes"] * 2


def test_a_first_join_that_fails_is_not_retried() -> None:
    run, said = served(AWAY, 0)
    with pytest.raises(PeerError, match="cannot reach"):
        run()
    assert said == []


def test_a_provider_that_may_not_come_back_hears_why_it_was_dropped() -> None:
    run, _ = served(DROPPED, RefusedError("the invite has ended"))
    with pytest.raises(RefusedError, match="it was thrown out"):
        run()


def test_a_coordinator_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejoin, "REJOIN_SECONDS", 0.0)
    run, _ = served(LOST, AWAY)
    with pytest.raises(PeerError, match="cannot reach"):
        run()


@pytest.mark.parametrize("was_member", [True, False])
def test_only_a_machine_that_was_in_the_swarm_waits_for_a_coordinator_that_is_not_there_yet(was_member: bool) -> None:
    said: list[str] = []
    left = [AWAY, AWAY, None]

    async def reach() -> str:
        error = left.pop(0)
        if error is not None:
            raise error
        return "there"

    def reached() -> str | None:
        return asyncio.run(reach_again(reach, was_member, Departure(lambda: False, said.append), said.append))

    if was_member:
        assert reached() == "there"
        assert said == ["cannot reach the coordinator; this machine was in the swarm before: trying for 10 minutes"]
    else:
        with pytest.raises(PeerError, match="cannot reach"):
            reached()
        assert said == []

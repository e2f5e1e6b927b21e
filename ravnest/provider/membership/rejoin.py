"""Rejoining: serves one session after another, until the provider leaves or its coordinator stays away."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from ravnest.errors import PeerError, RefusedError
from ravnest.net.streams.backoff import Backoff
from ravnest.provider.membership.departure import Departure

REJOIN_SECONDS: Final = 600.0
"""Time for which a provider tries to join again, after its coordinator is gone."""


T = TypeVar("T")


class SessionOverError(Exception):
    """The coordinator has dropped this provider, or cannot be reached any more; `reason` says which."""

    def __init__(self, reason: PeerError) -> None:
        super().__init__(str(reason))
        self.reason = reason


async def reach_again(
    reach: Callable[[], Awaitable[T]], was_member: bool, departure: Departure, say: Callable[[str], None]
) -> T | None:
    """The result of `reach`, which contacts the coordinator; None if the provider leaves.

    PeerError when the coordinator is not there. A machine that was a member before tries for REJOIN_SECONDS: after a
    power cut it may be back sooner than the coordinator.
    """
    backoff, is_told = Backoff(), False
    while True:
        try:
            return await reach()
        except PeerError as error:
            if not was_member or backoff.elapsed_seconds > REJOIN_SECONDS:
                raise
            if not is_told:
                is_told = True
                say(f"{error}; this machine was in the swarm before: trying for {REJOIN_SECONDS / 60:.0f} minutes")
        if await departure.wait_for(backoff.next_seconds()):
            return None


async def serve_sessions(
    serve: Callable[[], Awaitable[int]],
    on_session_end: Callable[[], None],
    departure: Departure,
    say: Callable[[str], None],
) -> int:
    """Join, and join again whenever a session ends without an order to stop. Returns the exit code.

    `serve` joins and serves one session. It returns an exit code, raises SessionOverError, or PeerError when it cannot
    join. PeerError from here when the first join fails, or no later one succeeds for REJOIN_SECONDS.
    """
    reason: PeerError | None = None
    backoff, is_told = Backoff(), False
    while True:
        try:
            return await serve()
        except SessionOverError as ended:
            reason, is_told = ended.reason, False
            backoff.reset()
        except PeerError as error:
            # The first join is not retried: the user hears why it failed. A coordinator that was there may return.
            if reason is None or backoff.elapsed_seconds > REJOIN_SECONDS:
                raise
            if isinstance(error, RefusedError):
                raise (reason if isinstance(reason, RefusedError) else error) from None
            if not is_told:
                is_told = True
                say(f"{error}; trying to join again for {REJOIN_SECONDS / 60:.0f} minutes")
        finally:
            on_session_end()
        if await departure.wait_for(backoff.next_seconds()):
            return 0

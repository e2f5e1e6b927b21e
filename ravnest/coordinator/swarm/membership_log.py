"""What a coordinator does at its door while it runs: says who comes and goes, remembers it, and shows out who was
thrown out."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from ravnest.coordinator.access.swarm_store import Seen, SwarmState
from ravnest.coordinator.swarm.link_measurements import describe
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.errors import RunError

LOOK_SECONDS = 1.0
_SEEN_SECONDS = 5.0

log = logging.getLogger(__name__)


async def watch_for_kicks(swarm: Swarm, poll_seconds: float = LOOK_SECONDS) -> None:
    """Ends the streams of nodes that `ravnest kick` has thrown out, for ever.

    That command is another process, which leaves its word in the store: it is looked at once a second.
    """
    while True:
        await asyncio.sleep(poll_seconds)
        try:
            kicked = await asyncio.to_thread(swarm.admission.tokens.kicked)
        except RunError:
            # What a provider asks for next fails with the same error and reaches the user that way.
            log.exception("cannot tell who was thrown out")
            continue
        for node_id in swarm.members.node_ids():
            if node_id in kicked:
                swarm.expel(node_id, kicked[node_id])


async def remember(swarm: Swarm, state: SwarmState) -> None:
    """Keeps in the store who is connected, and what was seen of each provider, at each change and every few seconds."""
    known: dict[str, Seen] = {}

    def present() -> dict[str, Seen]:
        return {
            m.node_id: Seen(m.node_id, m.address, m.machine.device, m.machine.memory_bytes)
            for m in swarm.members.connected()
        }

    def changed() -> bool:
        return present() != known

    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SEEN_SECONDS if known else None):
                await swarm.members.changes.until(changed)
        now = present()
        try:
            await asyncio.to_thread(state.connected, list(now.values()), time.time())
            await asyncio.to_thread(state.attended, swarm.members.attendances())
        except RunError:
            # A disk that is full ends the run by what else cannot be written.
            log.exception("cannot keep who is connected")
        known = now


async def announce(swarm: Swarm, wanted: int | None, tell: Callable[[str], None]) -> None:
    """Tells of each provider that has joined or left, and how many there are of those that are wanted, for ever."""
    known: dict[str, str] = {}

    def present() -> dict[str, str]:
        return {member.node_id: describe(member) for member in swarm.members.connected()}

    def changed() -> bool:
        return present().keys() != known.keys()

    while True:
        await swarm.members.changes.until(changed)
        now = present()
        count = _counted(len(now), wanted)
        for node_id in now.keys() - known.keys():
            tell(f"{node_id} joined with {now[node_id]}: {count}")
        for node_id in known.keys() - now.keys():
            tell(f"{node_id} left: {count}")
        known = now


def _counted(present: int, wanted: int | None) -> str:
    if wanted is None:
        return f"{present} provider{'' if present == 1 else 's'}"
    return f"{present} of {wanted} providers" if present <= wanted else f"{present} providers, {wanted} needed"

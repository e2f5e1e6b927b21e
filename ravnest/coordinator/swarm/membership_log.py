"""Background tasks of a served swarm: they announce joins and departures, save them, and disconnect kicked nodes."""

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
SAVE_SECONDS = 5.0

log = logging.getLogger(__name__)


async def watch_for_kicks(swarm: Swarm, poll_seconds: float = LOOK_SECONDS) -> None:
    """Disconnects nodes that were kicked, forever. `ravnest kick` is another process, which writes to the store."""
    while True:
        await asyncio.sleep(poll_seconds)
        try:
            kicked = await asyncio.to_thread(swarm.admission.tokens.kicked)
        except RunError:
            # The next call of a provider fails with the same error, which then reaches the user.
            log.exception("cannot read which nodes were kicked")
            continue
        for node_id in swarm.members.node_ids():
            if node_id in kicked:
                swarm.expel(node_id, kicked[node_id])


async def remember(swarm: Swarm, state: SwarmState, interval_seconds: float = SAVE_SECONDS) -> None:
    """Saves the connected providers and their presence, at each change and every few seconds, forever."""
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
            async with asyncio.timeout(interval_seconds if known else None):
                await swarm.members.changes.until(changed)
        now = present()
        try:
            await asyncio.to_thread(state.connected, list(now.values()), time.time())
            await asyncio.to_thread(state.attended, swarm.members.attendances())
        except RunError:
            # A full disk ends the run elsewhere.
            log.exception("cannot save which providers are connected")
        known = now


async def announce(swarm: Swarm, wanted: int | None, tell: Callable[[str], None]) -> None:
    """Tells the user of each provider that joins or leaves, with the number of providers, forever."""
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

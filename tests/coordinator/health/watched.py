"""Watchdog over a connected swarm, with the decisions of a run set by the test."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ravnest.coordinator.health.lease import Replacement
from ravnest.coordinator.health.provider_health import is_well
from ravnest.coordinator.health.stalls import DEFAULT_TIMEOUTS, StallTimeouts
from ravnest.coordinator.health.watchdog import Watchdog
from tests.swarms.connected import ConnectedSwarm, Provider, connected_swarm

BEAT_SECONDS = 0.2


class Watched:
    """A connected swarm with a watchdog, whose events and losses are recorded."""

    def __init__(self, swarm: ConnectedSwarm, stall_timeouts: StallTimeouts) -> None:
        self.connected = swarm
        self.events: list[tuple[str, str, str]] = []
        self.lost: dict[str, tuple[str, float, float]] = {}
        """By provider: the reason, the seconds since it was heard, and the time."""
        self.blocking: set[str] = set()
        self.replacements: dict[str, Replacement] = {}
        self.clusters: list[tuple[str, ...]] = []
        self.awaited_upload = ""
        self.watch = Watchdog(
            swarm.swarm,
            blocks=lambda node_id: node_id in self.blocking,
            replacement=lambda node_id: self.replacements.get(node_id, "none"),
            emit=self._emit,
            on_lost=self._on_lost,
            clusters=lambda: self.clusters,
            stall_timeouts=stall_timeouts,
            awaited_upload=lambda: self.awaited_upload,
        )
        self._running = asyncio.create_task(self.watch.run())

    async def provider(self, name: str, beats: bool = True, replacement: Replacement | None = None) -> Provider:
        """A provider that has joined and is watched; with a `replacement`, it blocks its cluster."""
        provider = await self.connected.provider(name)
        if beats:
            beat(provider)
        if replacement is not None:
            self.blocking.add(name)
            self.replacements[name] = replacement
            self.connected.swarm.members[name].reports = True
        await self.until(lambda: self.is_well(name))
        return provider

    def is_well(self, node_id: str) -> bool:
        return is_well(self.connected.swarm.members, node_id)

    async def until(self, condition: Callable[[], bool], timeout_seconds: float = 20.0) -> None:
        async with asyncio.timeout(timeout_seconds):
            while not condition():
                await asyncio.sleep(0.02)

    def kinds(self, node_id: str) -> list[str]:
        return [kind for kind, who, _ in self.events if who == node_id]

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    def _emit(self, kind: str, reason: str, **values: object) -> None:
        self.events.append((kind, str(values["provider"]), reason))

    def _on_lost(self, node_id: str, reason: str, detect_seconds: float) -> None:
        self.lost[node_id] = reason, detect_seconds, time.monotonic()
        self.blocking.discard(node_id)


def beat(provider: Provider) -> None:
    """As a provider's agent does from the beginning."""
    provider.control.link.beat_seconds = BEAT_SECONDS


@asynccontextmanager
async def watched(stall_timeouts: StallTimeouts = DEFAULT_TIMEOUTS) -> AsyncIterator[Watched]:
    async with connected_swarm() as swarm:
        made = Watched(swarm, stall_timeouts)
        try:
            yield made
        finally:
            await made.close()

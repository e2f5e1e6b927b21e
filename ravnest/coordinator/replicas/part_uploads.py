"""Uploads of a replica's parts to the coordinator, which saves them as a checkpoint while training goes on.

Several providers may have each part. When one does not have it, sends a bad one, is lost or times out, the coordinator
asks the next. When no provider is left to ask, or the disk has no room, the replica is not saved. The bytes of a part
are checked against the hash that was reported for the provider.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace

from ravnest.coordinator.checkpoints.part_check import BadPartError
from ravnest.coordinator.checkpoints.reader import CheckpointInfo
from ravnest.coordinator.checkpoints.saver import Saver
from ravnest.coordinator.run.context import RunContext
from ravnest.coordinator.swarm.own_line import receiver_limit
from ravnest.errors import RefusedError, RunError
from ravnest.net.v1.control_pb2 import CoordinatorMessage, UploadPart


@dataclass(frozen=True, slots=True)
class PartRequest:
    """A part of a replica that the coordinator asks for."""

    key: str
    nodes: tuple[str, ...]
    """The providers that have it, in the order in which they are asked."""
    hashes: Mapping[str, str] = field(default_factory=dict)
    """By provider, the hash of the part that it has, where that is known: the holder of a replica may have a rounded
    part."""


@dataclass
class _Collection:
    """The collection of one replica. Once the saver has another pending checkpoint, it is over."""

    saver: Saver
    number: int
    wanted: dict[int, PartRequest]
    """By stage, the missing parts. The first node of each is being asked; nodes that failed are removed."""
    is_urgent: Callable[[], bool]
    """Whether training waits for the parts now."""
    urgent: bool = False
    """Whether the providers know that."""
    info: CheckpointInfo | None = None
    heard_at: dict[int, float] = field(default_factory=dict)
    """By stage, when a provider was asked for the part, or when the last bytes of it arrived."""

    @property
    def is_possible(self) -> bool:
        return self.saver.pending == self.number and all(part.nodes for part in self.wanted.values())


class PartUploads:
    """Part uploads of one run, for one replica at a time. All methods run on the network's event loop."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._current: _Collection | None = None

    async def collect(
        self, saver: Saver, number: int, wanted: Mapping[int, PartRequest], is_urgent: Callable[[], bool]
    ) -> CheckpointInfo | None:
        """Collects these parts, by stage, for the saver's pending checkpoint of this number. None when a part cannot be
        obtained, or the saver gives the checkpoint up. `is_urgent` tells whether training waits for them; when that
        begins later, the providers are told, and the context is notified."""
        current = self._current = _Collection(saver, number, dict(wanted), is_urgent, is_urgent())
        current.heard_at = dict.fromkeys(wanted, time.monotonic())
        try:
            for stage in wanted:
                await self._ask(current, stage)
            while current.info is None and current.is_possible:
                await self._wait_for_upload(current)
        finally:
            if self._current is current:
                self._current = None
        return current.info

    async def on_upload(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        """Receives a part. RefusedError when this node was not asked for it."""
        named = re.fullmatch("part-([0-9]{1,19})-([0-9]{1,9})", name)
        current = self._current
        if named is None or current is None or int(named[1]) != current.number:
            raise RefusedError(f"{node_id} may not upload {name[:80]!r}")
        stage = int(named[2])
        wanted = current.wanted.get(stage)
        if wanted is None or wanted.nodes[:1] != (node_id,):
            raise RefusedError(f"{node_id} may not upload {name[:80]!r}")
        try:
            heard = self._heard(current, stage, chunks)
            info = await current.saver.part(current.number, stage, heard, wanted.hashes.get(node_id, ""))
        except BadPartError as error:
            self._context.emit("upload_refused", f"{node_id} uploaded a bad part: {error}", provider=node_id)
            self.on_part_unavailable(node_id, wanted.key, current.number)
            raise
        except RunError as error:
            self._context.fail(error)
            raise
        if current.wanted.get(stage) is wanted:
            # The part stays valid if its sender is lost now.
            del current.wanted[stage]
        if info is not None:
            current.info = info
        self._context.notify()

    def is_asked(self, node_id: str, key: str, replica: int) -> bool:
        """Whether this part is being asked of this provider."""
        current = self._current
        wanted = () if current is None or current.number != replica else current.wanted.values()
        return any(part.key == key and part.nodes[:1] == (node_id,) for part in wanted)

    def on_part_unavailable(self, node_id: str, key: str, replica: int) -> None:
        """A provider reports that it does not have this part, or has sent a bad one. It may be late, and speak of the
        replica of an earlier collection."""
        current = self._current
        if current is None or current.number != replica:
            return
        for stage, wanted in list(current.wanted.items()):
            if wanted.key == key and wanted.nodes[:1] == (node_id,):
                self._ask_next(current, stage)
        self._context.notify()

    async def _heard(self, current: _Collection, stage: int, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for data in chunks:
            if self._current is not current:
                # The rest would only take the line away from what is wanted now.
                raise RefusedError(f"the part of stage {stage} is not wanted any more")
            yield data
            current.heard_at[stage] = time.monotonic()

    async def _ask(self, current: _Collection, stage: int) -> None:
        current.heard_at[stage] = time.monotonic()
        await self._order(current, stage)

    async def _order(self, current: _Collection, stage: int) -> None:
        wanted = current.wanted.get(stage)
        if wanted is not None and wanted.nodes:
            name = f"part-{current.number}-{stage}"
            order = UploadPart(key=wanted.key, replica=current.number, name=name, urgent=current.urgent)
            line = self._context.swarm.line.down_bytes_per_second
            order.max_bytes_per_second = receiver_limit(line, len(current.wanted))
            await self._context.tell(wanted.nodes[0], CoordinatorMessage(upload_part=order))

    def _ask_next(self, current: _Collection, stage: int) -> None:
        """Asks the next provider that has the part of a stage."""
        wanted = current.wanted[stage]
        current.wanted[stage] = replace(wanted, nodes=wanted.nodes[1:])
        current.heard_at[stage] = time.monotonic()
        self._context.spawn(self._ask(current, stage))

    async def _wait_for_upload(self, current: _Collection) -> None:
        """Waits until the checkpoint is complete or impossible, or until a provider is gone or has timed out; the next
        provider is then asked."""
        silence_seconds = self._context.timeouts.part_silence_seconds
        with contextlib.suppress(TimeoutError):
            heard = min((current.heard_at[stage] for stage in current.wanted), default=time.monotonic())
            async with asyncio.timeout(max(0.0, heard + silence_seconds - time.monotonic())):
                await self._context.until(
                    lambda: (
                        current.info is not None
                        or not current.is_possible
                        or bool(self._gone(current))
                        or (current.is_urgent() and not current.urgent)
                    )
                )
        if current.info is not None or not current.is_possible:
            return
        if current.is_urgent() and not current.urgent:
            current.urgent = True
            for stage in list(current.wanted):
                await self._order(current, stage)
            return
        late = self._gone(current)
        if not late:
            now = time.monotonic()
            late = [stage for stage in current.wanted if now - current.heard_at[stage] >= silence_seconds]
            for stage in late:
                node = current.wanted[stage].nodes[0]
                reason = f"{node} sent nothing of the part of stage {stage} for {silence_seconds:.0f} s"
                self._context.emit("part_missing", reason, provider=node)
        for stage in late:
            self._ask_next(current, stage)

    def _gone(self, current: _Collection) -> list[int]:
        present = self._context.members.is_present
        return [stage for stage, wanted in current.wanted.items() if wanted.nodes and not present(wanted.nodes[0])]

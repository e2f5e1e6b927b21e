"""Uploads of a replica's parts to the coordinator, which saves them as a checkpoint.

Several providers may have each part. When one does not have it, sends a bad one or times out, the coordinator asks the
next. When no provider is left to ask, or the disk has no room, the replica is not saved and the run continues from an
older checkpoint.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final

from ravnest.coordinator.checkpoints.part_check import BadPartError
from ravnest.coordinator.checkpoints.reader import CheckpointInfo
from ravnest.coordinator.checkpoints.saver import Mark, Saver
from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.run.context import RunContext
from ravnest.errors import DiskFullError, RefusedError, RunError
from ravnest.net.v1.control_pb2 import CoordinatorMessage, UploadPart

_SILENCE_SECONDS: Final = 300.0
"""Timeout while a provider sends nothing of its part. The whole of a large part may take longer."""


@dataclass(frozen=True, slots=True)
class PartRequest:
    """A part of a replica that the coordinator asks for."""

    key: str
    nodes: tuple[str, ...]
    """The providers that have it, in the order in which they are asked."""


class PartUploads:
    """Part uploads of one run, for one replica at a time."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._saver: Saver | None = None
        self._number = 0
        self._wanted: dict[int, PartRequest] = {}
        """By stage, the missing parts. The first node of each is being asked; nodes that failed are removed."""
        self._heard_at: dict[int, float] = {}
        """By stage, when a provider was asked for the part, or when the last bytes of it arrived."""
        self._info: CheckpointInfo | None = None

    async def collect(
        self, saver: Saver, number: int, place: DataPosition, wanted: Mapping[int, PartRequest]
    ) -> CheckpointInfo | None:
        """Saves a replica at this place in the data as a checkpoint, from these parts by stage. None when a part cannot
        be obtained, or the disk has no room."""
        saver.abort()
        try:
            self._begin(saver, Mark(number, place, self._context.ledger.counts()))
        except DiskFullError as error:
            self._context.emit("disk_full", f"replica {number} cannot be saved as a checkpoint: {error}")
            return None
        self._saver, self._number, self._wanted, self._info = saver, number, dict(wanted), None
        self._heard_at = dict.fromkeys(wanted, time.monotonic())
        self._context.emit("checkpoint_begun", f"replica {number} is saved as a checkpoint", microbatch=number - 1)
        try:
            for stage in wanted:
                await self._ask(stage)
            while self._info is None and self._is_possible():
                await self._wait_for_upload()
        finally:
            self._saver = None
        info = self._info
        if info is None:
            saver.abort()
        else:
            text = f"checkpoint {info.folder.name} is complete"
            self._context.emit("checkpoint", text, updates=info.updates, samples=info.samples)
        return info

    async def on_upload(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        """Receives a part. RefusedError when this node was not asked for it."""
        named = re.fullmatch("part-([0-9]{1,19})-([0-9]{1,9})", name)
        saver = self._saver
        if named is None or saver is None or int(named[1]) != self._number:
            raise RefusedError(f"{node_id} may not upload {name[:80]!r}")
        stage = int(named[2])
        wanted = self._wanted.get(stage)
        if wanted is None or wanted.nodes[:1] != (node_id,):
            raise RefusedError(f"{node_id} may not upload {name[:80]!r}")
        try:
            info = await saver.part(self._number, stage, self._heard(stage, chunks))
        except BadPartError as error:
            self._context.emit("upload_refused", f"{node_id} uploaded a bad part: {error}", provider=node_id)
            self.on_part_unavailable(node_id, wanted.key)
            raise
        except RunError as error:
            self._context.fail(error)
            raise
        if self._saver is saver and self._wanted.get(stage) is wanted:
            # The part stays valid if its sender is lost now.
            del self._wanted[stage]
        if info is not None:
            self._info = info
        self._context.notify()

    def on_part_unavailable(self, node_id: str, key: str) -> None:
        """A provider reports that it does not have this part, or has sent a bad one."""
        for stage, wanted in list(self._wanted.items()):
            if wanted.key == key and wanted.nodes[:1] == (node_id,):
                self._ask_next(stage)
        self._context.notify()

    async def _heard(self, stage: int, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for data in chunks:
            yield data
            self._heard_at[stage] = time.monotonic()

    def _begin(self, saver: Saver, mark: Mark) -> None:
        try:
            saver.begin(mark)
        except DiskFullError:
            # The replica is newer than all checkpoints, so older ones may go; the newest stays.
            if not saver.make_room():
                raise
            saver.begin(mark)

    async def _ask(self, stage: int) -> None:
        wanted = self._wanted.get(stage)
        if wanted is not None and wanted.nodes:
            self._heard_at[stage] = time.monotonic()
            # Training waits until the state that was saved is here.
            name = f"part-{self._number}-{stage}"
            order = UploadPart(key=wanted.key, replica=self._number, name=name, urgent=True)
            await self._context.tell(wanted.nodes[0], CoordinatorMessage(upload_part=order))

    def _ask_next(self, stage: int) -> None:
        """Asks the next provider that has the part of a stage."""
        wanted = self._wanted[stage]
        self._wanted[stage] = PartRequest(wanted.key, wanted.nodes[1:])
        self._heard_at[stage] = time.monotonic()
        self._context.spawn(self._ask(stage))

    async def _wait_for_upload(self) -> None:
        """Waits until the checkpoint is complete or impossible, or until a provider is gone or has timed out; the next
        provider is then asked."""
        with contextlib.suppress(TimeoutError):
            due = min((self._heard_at[stage] for stage in self._wanted), default=time.monotonic()) + _SILENCE_SECONDS
            async with asyncio.timeout(max(0.0, due - time.monotonic())):
                await self._context.until(
                    lambda: self._info is not None or not self._is_possible() or bool(self._gone())
                )
        late = self._gone()
        if self._info is None and self._is_possible() and not late:
            now = time.monotonic()
            late = [stage for stage in self._wanted if now - self._heard_at[stage] >= _SILENCE_SECONDS]
        for stage in late:
            self._ask_next(stage)

    def _gone(self) -> list[int]:
        present = self._context.members.is_present
        return [stage for stage, wanted in self._wanted.items() if wanted.nodes and not present(wanted.nodes[0])]

    def _is_possible(self) -> bool:
        # The saver aborts when the disk has no room.
        return self._saver is not None and self._saver.under_way and all(w.nodes for w in self._wanted.values())

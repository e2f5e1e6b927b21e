"""Parts of a replica on their way to the coordinator, where they become a checkpoint.

Of each part there may be several who have it: where one has not, sends a bad one, or does not come, the next is asked.
What happens on failure: where nobody is left to ask, or the disk has no room, there is no such checkpoint, and the run
goes on from another.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final

from ravnest.coordinator.checkpoints.part_check import BadPartError
from ravnest.coordinator.checkpoints.saver import Mark, Saver
from ravnest.coordinator.checkpoints.store import CheckpointInfo
from ravnest.coordinator.feed.ledger import Ledger, Place
from ravnest.coordinator.run.context import Course
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.errors import DiskFullError, RefusedError, RunError
from ravnest.net.v1.control_pb2 import CoordinatorMessage, UploadPart

_SECONDS: Final = 300.0
"""Timeout of a provider that sends nothing of the part it was asked for. A large part may take longer."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A part of a replica."""

    key: str
    nodes: tuple[str, ...]
    """Who has it, in the order in which they are asked."""


class PartUploads:
    """Of one run; one replica at a time."""

    def __init__(self, course: Course, swarm: Swarm, ledger: Ledger) -> None:
        self._course = course
        self._swarm = swarm
        self._ledger = ledger
        self._saver: Saver | None = None
        self._number = 0
        self._wanted: dict[int, Wanted] = {}
        """By stage, what has not come yet, from those who have not been asked in vain; the first is asked now."""
        self._heard_at: dict[int, float] = {}
        """By stage, when a provider was asked for its part, or some of it last came."""
        self._info: CheckpointInfo | None = None

    async def gather(
        self, saver: Saver, number: int, place: Place, wanted: Mapping[int, Wanted]
    ) -> CheckpointInfo | None:
        """The checkpoint of a replica at this place, of these parts, by stage. None where one of them cannot be had, or
        there is no room for them."""
        saver.abort()
        try:
            self._begin(saver, Mark(number, place, self._ledger.counts()))
        except DiskFullError as error:
            self._course.emit("disk_full", f"replica {number} cannot be made a checkpoint: {error}")
            return None
        self._saver, self._number, self._wanted, self._info = saver, number, dict(wanted), None
        self._heard_at = dict.fromkeys(wanted, time.monotonic())
        self._course.emit("checkpoint_begun", f"of replica {number}", microbatch=number - 1)
        try:
            for stage in wanted:
                await self._ask(stage)
            while self._info is None and self._may_come():
                await self._wait_for_those_asked()
        finally:
            self._saver = None
        info = self._info
        if info is None:
            saver.abort()
        else:
            text = f"{info.folder.name} is complete"
            self._course.emit("checkpoint", text, updates=info.updates, samples=info.samples)
        return info

    async def uploaded(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        """Takes a part. RefusedError for one that nobody asked this node for."""
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
            self._course.emit("upload_refused", f"{node_id} uploaded a bad part: {error}", provider=node_id)
            self.cannot_give(node_id, wanted.key)
            raise
        except RunError as error:
            self._course.fail(error)
            raise
        if self._saver is saver and self._wanted.get(stage) is wanted:
            # It is there, whatever becomes of who gave it.
            del self._wanted[stage]
        if info is not None:
            self._info = info
        self._course.notify()

    def cannot_give(self, node_id: str, key: str) -> None:
        """A provider has said that it has no such part, or has sent a bad one."""
        for stage, wanted in list(self._wanted.items()):
            if wanted.key == key and wanted.nodes[:1] == (node_id,):
                self._next(stage)
        self._course.notify()

    async def _heard(self, stage: int, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for data in chunks:
            yield data
            self._heard_at[stage] = time.monotonic()

    def _begin(self, saver: Saver, mark: Mark) -> None:
        try:
            saver.begin(mark)
        except DiskFullError:
            # What it is to make room for is newer than all of them; the newest stays all the same.
            if not saver.make_room():
                raise
            saver.begin(mark)

    async def _ask(self, stage: int) -> None:
        wanted = self._wanted.get(stage)
        if wanted is not None and wanted.nodes:
            self._heard_at[stage] = time.monotonic()
            order = UploadPart(key=wanted.key, replica=self._number, name=f"part-{self._number}-{stage}")
            await self._course.tell(wanted.nodes[0], CoordinatorMessage(upload_part=order))

    def _next(self, stage: int) -> None:
        """Asks the next who may have the part of a stage."""
        wanted = self._wanted[stage]
        self._wanted[stage] = Wanted(wanted.key, wanted.nodes[1:])
        self._heard_at[stage] = time.monotonic()
        self._course.spawn(self._ask(stage))

    async def _wait_for_those_asked(self) -> None:
        """Until it is all there or cannot be; or until somebody is gone, or has been waited for long enough, and the
        next is asked."""
        with contextlib.suppress(TimeoutError):
            due = min((self._heard_at[stage] for stage in self._wanted), default=time.monotonic()) + _SECONDS
            async with asyncio.timeout(max(0.0, due - time.monotonic())):
                await self._course.until(lambda: self._info is not None or not self._may_come() or bool(self._gone()))
        late = self._gone()
        if self._info is None and self._may_come() and not late:
            now = time.monotonic()
            late = [stage for stage in self._wanted if now - self._heard_at[stage] >= _SECONDS]
        for stage in late:
            self._next(stage)

    def _gone(self) -> list[int]:
        present = self._swarm.members.is_present
        return [stage for stage, wanted in self._wanted.items() if wanted.nodes and not present(wanted.nodes[0])]

    def _may_come(self) -> bool:
        # One for which the disk had no room is not under way any more.
        return self._saver is not None and self._saver.under_way and all(w.nodes for w in self._wanted.values())

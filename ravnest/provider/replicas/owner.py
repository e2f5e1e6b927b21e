"""Owner's side of replicas: writes the parts of the own stage to the disk, and sends them to their holder.

A thread writes the state to the disk while the stage goes on, which saves what it overwrites before the thread has come
there (engine/weights/frozen_state.py): a copy in memory would double its peak. The system keeps the bytes in its cache
of the disk, and gives that memory to whatever needs it. The hash of a part is computed from the file.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from ravnest.background import BackgroundTasks, in_thread
from ravnest.engine.weights.frozen_state import StateTensors
from ravnest.errors import PeerError, error_text
from ravnest.net.v1.control_pb2 import ProviderMessage, Replicate, Replicated
from ravnest.provider.replicas.coded_parts import CodedSender, HeldCopy
from ravnest.provider.replicas.files import PartFiles, PartWriter, ReplicaPart, check_key
from ravnest.provider.replicas.links import PartLink, PartLinks
from ravnest.provider.replicas.outgoing import OutgoingTransfers
from ravnest.state.codings import check_coding

Tell = Callable[[ProviderMessage], Awaitable[None]]
"""Sends a message to the coordinator; PeerError when the session is over."""


class ReplicaOwner:
    """Records the parts of the own stage, one at a time. If the stage is faster than the link, only the newest one
    counts.

    Every failure is reported in Replicated; the stage goes on.
    """

    def __init__(self, files: PartFiles, links: PartLinks, tell: Tell, sending: OutgoingTransfers) -> None:
        """Transfers to the holder are listed in `sending`, and take their turns in its budget."""
        self._sender = CodedSender(files, sending)
        self._files = files
        self._links = links
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._order: Replicate | None = None
        self._link: PartLink | None = None
        self._waiting: tuple[_PartName, PartWriter] | None = None
        self._came = asyncio.Event()
        self._is_closed = False
        self._writing = ThreadPoolExecutor(1, "ravnest-parts")
        self._tasks = BackgroundTasks()
        self._tasks.spawn(self._work())

    def follow(self, order: Replicate) -> None:
        """Send the parts of this stage to this holder from now on, also a part that is being sent to another one. With
        another coding and the same link, a part that is being sent keeps its coding."""
        check_key(order.key)
        check_coding(order.coding)
        if self._order is not None and (self._order.key, self._order.holder) == (order.key, order.holder):
            self._order = order
            return
        before, self._link = self._link, self._links.add(order.holder) if order.holder.node else None
        self._order = order
        if before is not None:
            self._tasks.spawn(before.close())

    def keep(self, key: str, replica: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write a stage's state to the disk, from where it is recorded. Any thread may call this; the tensors may
        change once it returns. A stage's own tensors are frozen, and written while the stage goes on."""
        name = _PartName(key, replica, time.perf_counter())
        state = tensors.freeze(metadata) if isinstance(tensors, StateTensors) else None
        if state is None:
            self._write(name, lambda: self._files.record(key, replica, tensors, metadata))
            return
        try:
            # At once, and not after the part that is being sent: a frozen state takes memory while the stage goes on.
            self._writing.submit(self._write, name, lambda: self._files.record_frozen(key, replica, state))
        except RuntimeError:
            # The session is over, and no part is needed any more.
            state.release()

    def _write(self, name: "_PartName", record: Callable[[], PartWriter]) -> None:
        try:
            writer = record()
        except Exception as error:
            # For example, the disk is full. The stage goes on, and the coordinator hears of it.
            self._call_soon(self._on_failed_write, name, error_text(error))
        else:
            if not self._call_soon(self._take, name, writer):
                writer.discard()

    async def close(self) -> None:
        """End the current transfer. The files stay; the links end with the session."""
        self._is_closed = True
        await in_thread(self._writing.shutdown)
        await self._tasks.close()
        if self._waiting is not None:
            self._waiting[1].discard()
            self._waiting = None

    def _call_soon(self, call: Callable[..., None], *arguments: object) -> bool:
        """Whether the loop will make this call: it does not if it is over."""
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            return False
        return True

    def _on_failed_write(self, name: "_PartName", error: str) -> None:
        if not self._is_closed:
            self._tasks.spawn(self._say(name, error=error))

    def _take(self, name: "_PartName", writer: PartWriter) -> None:
        if self._is_closed:
            writer.discard()
            return
        if self._waiting is not None:
            before, unfinished = self._waiting
            unfinished.discard()
            self._tasks.spawn(self._say(before, error="a newer replica came before it was stored"))
        self._waiting = name, writer
        self._came.set()

    async def _work(self) -> None:
        while True:
            await self._came.wait()
            self._came.clear()
            if self._waiting is None:
                continue
            (name, writer), self._waiting = self._waiting, None
            try:
                part = await in_thread(writer.finish)
            except Exception as error:
                # For example, the disk cannot be read. The stage goes on, and the coordinator hears of it.
                await self._say(name, error=error_text(error))
                continue
            finally:
                writer.discard()
            await self._say(name, part, *await self._hand_over(part))

    async def _hand_over(self, part: ReplicaPart) -> "tuple[_Held | None, str]":
        """The holder that has the part now, or why no holder has it."""
        while True:
            order, link = self._order, self._link
            if order is None or order.key != part.key or link is None:
                return None, ""
            try:
                link_now, node = await link.connected(), order.holder.node
                coding, limit = check_coding(order.coding), order.max_bytes_per_second
                return _Held(node, await self._sender.send(link_now, node, part, coding, limit)), ""
            except Exception as error:
                if self._order is order:
                    return None, error_text(error)

    async def _say(
        self, name: "_PartName", part: ReplicaPart | None = None, held: "_Held | None" = None, error: str = ""
    ) -> None:
        said = Replicated(
            key=name.key,
            replica=name.replica,
            size_bytes=0 if part is None else part.size_bytes,
            sha256="" if part is None else part.sha256,
            seconds=time.perf_counter() - name.began,
            error=error,
        )
        if held is not None:
            said.holder, said.holder_sha256 = held.node, held.copy.part.sha256
            said.sent_bytes = held.copy.sent_bytes
        with contextlib.suppress(PeerError):
            await self._tell(ProviderMessage(replicated=said))


@dataclass(frozen=True, slots=True)
class _Held:
    node: str
    copy: HeldCopy


@dataclass(frozen=True, slots=True)
class _PartName:
    key: str
    replica: int
    began: float

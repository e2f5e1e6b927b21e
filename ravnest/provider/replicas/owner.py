"""The owner's side of replicas: what a stage is after a microbatch goes to the disk here, and to its holder."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ravnest.background import BackgroundTasks, in_thread
from ravnest.errors import PeerError, RavnestError
from ravnest.net.v1.control_pb2 import ProviderMessage, Replicate, Replicated
from ravnest.provider.replicas.files import PartFiles, ReplicaPart, check_key
from ravnest.provider.replicas.links import PartLink, PartLinks
from ravnest.provider.replicas.outgoing import OutgoingTransfers
from ravnest.provider.replicas.transfer import SHARE, send_part

Tell = Callable[[ProviderMessage], Awaitable[None]]
"""Tells the coordinator something; PeerError when the stay is over."""

_State = tuple[Mapping[str, Tensor], Mapping[str, str]]
"""Tensors and metadata of a stage."""


class ReplicaOwner:
    """Keeps what it is given, one after the other. Where stages are faster than the line, the newest counts.

    Whatever goes wrong is told in Replicated; the stage goes on.
    """

    def __init__(self, files: PartFiles, links: PartLinks, tell: Tell, sending: OutgoingTransfers) -> None:
        """What goes to the holder is told of in `sending`."""
        self._sending = sending
        self._files = files
        self._links = links
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._order: Replicate | None = None
        self._link: PartLink | None = None
        self._waiting: tuple[_Which, _State] | None = None
        self._came = asyncio.Event()
        self._tasks = BackgroundTasks()
        self._tasks.spawn(self._work())

    def follow(self, order: Replicate) -> None:
        """From now on parts of this stage go to this holder; one that is under way to another goes to it too."""
        check_key(order.key)
        before, self._link = self._link, self._links.add(order.holder) if order.holder.node else None
        self._order = order
        if before is not None:
            self._tasks.spawn(before.close())

    def keep(self, key: str, replica: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Keeps copies of a stage's state, which nobody changes any more. On any thread; returns at once."""
        which, state = _Which(key, replica, time.perf_counter()), (tensors, metadata)
        with contextlib.suppress(RuntimeError):  # The loop is over.
            self._loop.call_soon_threadsafe(self._take, which, state)

    async def close(self) -> None:
        """Ends what is under way. The files stay; the links end with their stay."""
        await self._tasks.close()

    def _take(self, which: "_Which", state: _State) -> None:
        if self._waiting is not None:
            self._tasks.spawn(self._say(self._waiting[0], error="a newer one came before it was kept"))
        self._waiting = which, state
        self._came.set()

    async def _work(self) -> None:
        while True:
            await self._came.wait()
            self._came.clear()
            if self._waiting is None:
                continue
            (which, state), self._waiting = self._waiting, None
            try:
                part = await in_thread(partial(self._files.write, which.key, which.replica, *state))
            except Exception as error:
                # The disk is full, say: the stage is not to suffer, and somebody is to know.
                await self._say(which, error=in_words(error))
                continue
            finally:
                # The copies of the stage may go: the file has them.
                del state
            await self._say(which, part, *await self._hand_over(part))

    async def _hand_over(self, part: ReplicaPart) -> tuple[str, str]:
        """Who else has it now, and why nobody has."""
        while True:
            order, link = self._order, self._link
            if order is None or order.key != part.key or link is None:
                return "", ""
            try:
                with self._sending.sending("replica", part.key, part.size_bytes) as sending:
                    await send_part(await link.connected(), part, SHARE, sending.reached)
                return order.holder.node, ""
            except Exception as error:
                if self._order is order:
                    return "", in_words(error)

    async def _say(self, which: "_Which", part: ReplicaPart | None = None, holder: str = "", error: str = "") -> None:
        said = Replicated(
            key=which.key,
            replica=which.replica,
            holder=holder,
            size_bytes=0 if part is None else part.size_bytes,
            sha256="" if part is None else part.sha256,
            seconds=time.perf_counter() - which.began,
            error=error,
        )
        with contextlib.suppress(PeerError):
            await self._tell(ProviderMessage(replicated=said))


def in_words(error: Exception) -> str:
    """Why something did not go well, as the coordinator is told."""
    return str(error) if isinstance(error, RavnestError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class _Which:
    key: str
    replica: int
    began: float

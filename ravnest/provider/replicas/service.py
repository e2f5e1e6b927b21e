"""Replicas as one provider has to do with them: it keeps parts of its own stage and of others', gives them to whoever
needs them, and uploads them. What is said of it by the coordinator comes here."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final

from torch import Tensor

from ravnest.background import BackgroundTasks, in_thread
from ravnest.errors import PeerError, RefusedError
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.streams.frame_stream import Link
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Deploy, Failed, Give, ProviderMessage, UploadPart
from ravnest.provider.fetch.artifacts import Artifacts
from ravnest.provider.links.upload import upload
from ravnest.provider.replicas.fetch_part import Taking
from ravnest.provider.replicas.files import Part, PartFiles
from ravnest.provider.replicas.holder import Holding
from ravnest.provider.replicas.links import PartLink, PartLinks
from ravnest.provider.replicas.outgoing import StateTransfers
from ravnest.provider.replicas.owner import Replicating, in_words
from ravnest.provider.replicas.transfer import MAX_BYTES, refuse, send_part

ORDERS: Final = frozenset({"replicate", "hold", "forget", "give", "upload_part"})
"""What the coordinator says of replicas."""

_MAX_AT_ONCE: Final = 1000


class Parts:
    """All of it for one stay in the swarm, on the network's loop; the files outlive it.

    Whatever goes wrong is told to the coordinator: of the own stage in Replicated, else as Failed of kind "part" whose
    deployment is the key. Nothing of it ends the stay or the stage.
    """

    def __init__(
        self,
        files: PartFiles,
        node: NodeIdentity,
        client: CoordinatorClient,
        artifacts: Artifacts,
        tell: Callable[[ProviderMessage], Awaitable[None]],
        allow: Callable[[frozenset[str]], None],
        say: Callable[[str], None],
        sending: StateTransfers | None = None,
    ) -> None:
        """`tell` speaks to the coordinator, `allow` is told which nodes may dial in because of parts, `say` gets lines
        for the user; all parts that are sent are told of in `sending`."""
        self._sending = sending or StateTransfers()
        self._files = files
        self._client = client
        self._tell = tell
        self._links = PartLinks(node, client, allow)
        self._replicating = Replicating(files, self._links, tell, self._sending)
        self._holding = Holding(files, self._links, artifacts, say)
        self._taking = Taking(files, self._links, say)
        self._errands = BackgroundTasks()

    def obey(self, message: CoordinatorMessage) -> None:
        """Does what the coordinator says of replicas."""
        kind = message.WhichOneof("body")
        if kind == "replicate":
            self._try(message.replicate.key, lambda: self._replicating.follow(message.replicate))
        elif kind == "hold":
            self._try(message.hold.key, lambda: self._holding.hold(message.hold))
        elif kind == "forget":
            keep, of = frozenset(message.forget.keep), frozenset(message.forget.of)
            if not of:
                self._holding.forget(keep)
            self._errand("", in_thread(partial(self._files.forget, keep, message.forget.before, of)))
        elif kind == "give":
            self._errand(message.give.key, self._give(message.give, self._links.add(message.give.to)))
        elif kind == "upload_part":
            self._errand(message.upload_part.key, self._upload(message.upload_part))

    def expect(self, order: Deploy) -> None:
        """A stage is to be taken: whoever gives a part for it may dial from now on."""
        for before in self._taking.expect(order):
            self._errand(order.key, before.close())

    async def part(self, order: Deploy, max_bytes: int = MAX_BYTES) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors and metadata of the part that the order names, from the disk here or from its giver.

        PeerError when it is not here, does not come, is larger than `max_bytes` or is not what its hash says.
        """
        return await self._taking.part(order, max_bytes)

    async def donated(self, order: Deploy) -> list[tuple[dict[str, Tensor], dict[str, str]]]:
        """The same of all parts that the order's donors have."""
        return await self._taking.donated(order)

    def keeper(self, order: Deploy) -> Callable[[int, Mapping[str, Tensor], Mapping[str, str]], None]:
        """Who keeps the parts of the stage of this order: called on any thread with the number of the replica and
        copies of the stage's state, returns at once."""
        return partial(self._replicating.keep, order.key)

    async def accept(self, peer: str, connection: Link) -> bool:
        """A node has dialled: uses its connection until that breaks. False if it is for none of these links."""
        link = self._links.end(connection.label, peer)
        if link is None:
            return False
        await link.accept(connection)
        return True

    def meet(self, name: str) -> bool:
        """The other end of this link waits at the relay. False if it is none of these links."""
        return self._links.meet(name)

    async def close(self) -> None:
        """Ends links and transfers. The files stay."""
        await self._errands.close()
        await asyncio.gather(self._replicating.close(), self._holding.close(), self._links.close())

    async def _give(self, order: Give, link: PartLink) -> None:
        try:
            connection = await link.connected()
            try:
                part = self._files.find(order.key, order.replica)
            except PeerError as error:
                await refuse(connection, order.replica, str(error))
                raise
            with self._sending.sending("part", order.key, part.size_bytes) as sending:
                await send_part(connection, part, reached=sending.reached)
        finally:
            await link.close()

    async def _upload(self, order: UploadPart) -> None:
        part = self._files.find(order.key, order.replica)
        with self._sending.sending("part", order.name, part.size_bytes) as sending:
            await upload(self._client, order.name, lambda: sending.counted(_chunks(part)))

    def _errand(self, key: str, work: Coroutine[Any, Any, None]) -> None:
        if len(self._errands) >= _MAX_AT_ONCE:
            work.close()
            raise PeerError(f"the coordinator wants more than {_MAX_AT_ONCE} things done with parts at once")
        self._errands.spawn(self._telling(key, work))

    async def _telling(self, key: str, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:
            await self._failed(key, error)

    def _try(self, key: str, order: Callable[[], None]) -> None:
        try:
            order()
        except PeerError as error:
            self._errand(key, self._failed(key, error))

    async def _failed(self, key: str, error: Exception) -> None:
        failed = Failed(deployment=key, kind="part", message=in_words(error), microbatch=-1)
        with contextlib.suppress(PeerError):
            await self._tell(ProviderMessage(failed=failed))


async def _chunks(part: Part) -> AsyncIterator[bytes]:
    chunks = part.chunks()
    try:
        while (data := await in_thread(lambda: next(chunks, None))) is not None:
            yield data
    except PeerError as error:
        # To upload it again would be in vain.
        raise RefusedError(str(error)) from None

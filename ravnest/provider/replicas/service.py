"""Replica service: everything that a provider does with replicas in one session.

A *replica* is a copy of a cluster's state after one microbatch; its *parts* are the states of the single stages. The
provider writes the parts of its own stage to the disk and sends them to a holder, holds parts of other providers'
stages, fetches the parts that a stage starts from, and sends or uploads parts on request. Whatever goes wrong is told
to the coordinator, and ends neither the session nor the stage.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final

from torch import Tensor

from ravnest.background import BackgroundTasks, in_thread
from ravnest.errors import PeerError, RefusedError, error_text
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.pacing.budget import PacedTransfer
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.streams.frame_stream import Link
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Deploy, Failed, Give, ProviderMessage, UploadPart
from ravnest.provider.fetch.artifacts import Artifacts
from ravnest.provider.links.upload import upload
from ravnest.provider.replicas.fetch_part import PartFetcher
from ravnest.provider.replicas.files import PartFiles, ReplicaPart
from ravnest.provider.replicas.holder import ReplicaHolder
from ravnest.provider.replicas.links import PartLink, PartLinks
from ravnest.provider.replicas.outgoing import OutgoingTransfers
from ravnest.provider.replicas.owner import ReplicaOwner
from ravnest.provider.replicas.transfer import refuse, send_part

_MAX_TASKS: Final = 1000


class ReplicaService:
    """Carries out the commands about replicas, on the network's loop. The files outlive the session.

    A failure of the own stage's part is told as Replicated, any other one as Failed of the kind "part", whose
    deployment is the key of the stage, with the number of the replica.
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
        transfers: OutgoingTransfers | None = None,
    ) -> None:
        """`tell` sends a message to the coordinator, `allow` is told which nodes may dial in to exchange parts, and
        `say` prints lines for the user. The heartbeat reports the `transfers`."""
        self._transfers = transfers or OutgoingTransfers()
        self._files = files
        self._client = client
        self._tell = tell
        self._links = PartLinks(node, client, allow)
        self._owner = ReplicaOwner(files, self._links, tell, self._transfers)
        self._holder = ReplicaHolder(files, self._links, artifacts, say)
        self._fetcher = PartFetcher(files, self._links, say)
        self._tasks = BackgroundTasks()
        self._uploads: dict[tuple[str, int, str], PacedTransfer] = {}
        """The uploads of parts that are under way, by key, replica and name."""
        self._handlers: Mapping[str, Callable[[CoordinatorMessage], None]] = {
            "replicate": self._replicate,
            "hold": self._hold,
            "forget": self._forget,
            "give": self._give,
            "upload_part": self._upload,
        }

    def obey(self, message: CoordinatorMessage) -> None:
        """Carry out a command about replicas."""
        handler = self._handlers.get(message.WhichOneof("body") or "")
        if handler is not None:
            handler(message)

    def expect(self, order: Deploy) -> None:
        """A stage is about to be deployed: the sources of its parts may dial from now on."""
        for before in self._fetcher.expect(order):
            self._spawn(order.key, before.close())

    async def fetch_part(self, order: Deploy) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors and metadata of the part that the order names, from the disk here or from its source.

        PeerError when it is not here, does not arrive, is too large or does not match its hash.
        """
        return await self._fetcher.fetch(order)

    async def fetch_all_parts(self, order: Deploy) -> list[tuple[dict[str, Tensor], dict[str, str]]]:
        """The same for every part that a stage of another shape is joined from."""
        return await self._fetcher.fetch_all(order)

    def recorder(self, order: Deploy) -> Callable[[int, Mapping[str, Tensor], Mapping[str, str]], None]:
        """A function that records the parts of this order's stage. It may be called on any thread, with the number of
        the replica and the stage's state, which may change once it returns."""
        return partial(self._owner.keep, order.key)

    async def accept(self, peer: str, connection: Link) -> bool:
        """Use the connection of a node that has dialled until it breaks. False if it is for none of these links."""
        link = self._links.end(connection.label, peer)
        if link is None:
            return False
        await link.accept(connection)
        return True

    def meet(self, name: str) -> bool:
        """The other end of this link waits at the relay. False if it is none of these links."""
        return self._links.meet(name)

    async def close(self) -> None:
        """End links and transfers. The files stay."""
        await self._tasks.close()
        await asyncio.gather(self._owner.close(), self._holder.close(), self._links.close())

    def _replicate(self, message: CoordinatorMessage) -> None:
        self._try(message.replicate.key, lambda: self._owner.follow(message.replicate))

    def _hold(self, message: CoordinatorMessage) -> None:
        self._try(message.hold.key, lambda: self._holder.hold(message.hold))

    def _forget(self, message: CoordinatorMessage) -> None:
        keep, of = frozenset(message.forget.keep), frozenset(message.forget.of)
        if not of:
            self._holder.forget(keep)
        pinned = frozenset(message.forget.pinned)
        self._spawn("", in_thread(partial(self._files.forget, keep, message.forget.before, of, pinned)))

    def _give(self, message: CoordinatorMessage) -> None:
        # The link is added at once, so that the receiver may dial from now on.
        order = message.give
        self._spawn(order.key, self._send(order, self._links.add(order.to)), order.replica)

    def _upload(self, message: CoordinatorMessage) -> None:
        order = message.upload_part
        self._spawn(order.key, self._upload_part(order), order.replica)

    async def _send(self, order: Give, link: PartLink) -> None:
        try:
            connection = await link.connected()
            try:
                part = self._files.find(order.key, order.replica)
            except PeerError as error:
                await refuse(connection, order.replica, str(error))
                raise
            with self._transfers.sending("part", order.key, part.size_bytes) as sending:
                transfer = self._transfers.budget.transfer(
                    "part", urgent=not order.background, max_bytes_per_second=order.max_bytes_per_second
                )
                await send_part(connection, part, transfer, sending.reached)
        finally:
            await link.close()

    async def _upload_part(self, order: UploadPart) -> None:
        upload_id = order.key, order.replica, order.name
        if (running := self._uploads.get(upload_id)) is not None:
            # Training has come to wait for it.
            if order.urgent:
                running.hurry()
            return
        part = self._files.find(order.key, order.replica)
        transfer = self._uploads[upload_id] = self._transfers.budget.transfer(
            "part", urgent=order.urgent, max_bytes_per_second=order.max_bytes_per_second
        )
        try:
            with self._transfers.sending("part", order.name, part.size_bytes) as sending:
                await upload(self._client, order.name, lambda: sending.counted(_chunks(part)), transfer)
        finally:
            del self._uploads[upload_id]

    def _spawn(self, key: str, work: Coroutine[Any, Any, None], replica: int = 0) -> None:
        if len(self._tasks) >= _MAX_TASKS:
            work.close()
            raise PeerError(f"the coordinator wants more than {_MAX_TASKS} commands about parts carried out at once")
        self._tasks.spawn(self._told(key, work, replica))

    async def _told(self, key: str, work: Awaitable[None], replica: int) -> None:
        try:
            await work
        except Exception as error:
            await self._failed(key, error, replica)

    def _try(self, key: str, command: Callable[[], None]) -> None:
        try:
            command()
        except PeerError as error:
            self._spawn(key, self._failed(key, error))

    async def _failed(self, key: str, error: Exception, replica: int = 0) -> None:
        failed = Failed(deployment=key, kind="part", message=error_text(error), microbatch=-1, replica=replica)
        with contextlib.suppress(PeerError):
            await self._tell(ProviderMessage(failed=failed))


async def _chunks(part: ReplicaPart) -> AsyncIterator[bytes]:
    chunks = part.chunks()
    try:
        while (data := await in_thread(lambda: next(chunks, None))) is not None:
            yield data
    except PeerError as error:
        # A second upload would find the same damage.
        raise RefusedError(str(error)) from None

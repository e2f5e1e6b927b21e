"""Providers without stages that exchange parts of replicas: real files, real servers and TLS, a coordinator by hand."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ravnest.coordinator.access.admission import Admission
from ravnest.errors import PeerError, RefusedError
from ravnest.net.identity.identity import Identity
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.pacing.budget import PacedTransfer, StateBudget, Ticket
from ravnest.net.pacing.state_rate import StateKind
from ravnest.net.rpc.server import ProviderServer
from ravnest.net.streams.frame_stream import Link
from ravnest.net.v1.control_pb2 import (
    DIALLING_AWAIT,
    DIALLING_DIRECT,
    CoordinatorMessage,
    Deploy,
    Failed,
    Hold,
    Neighbour,
    ProviderMessage,
    Replicate,
    Replicated,
)
from ravnest.provider.fetch.artifacts import Artifacts
from ravnest.provider.replicas.files import PartFiles
from ravnest.provider.replicas.outgoing import OutgoingTransfers
from ravnest.provider.replicas.service import ReplicaService

KEY = "d1-c0-s1"
METADATA = {"version": "7", "applied": "[3, 4]"}


def a_state(values: int = 1000, fill: float = 1.0) -> dict[str, Tensor]:
    return {"param:w": torch.full((values,), fill), "buffer:n": torch.tensor(3)}


class ByHand:
    """A coordinator as far as parts need one."""

    def __init__(self) -> None:
        self.artifacts: dict[str, bytes] = {}
        self.uploads: dict[str, bytes] = {}

    async def fetch(self, artifact: str, offset: int = 0, end: int = 0) -> AsyncGenerator[bytes, None]:
        yield self.artifacts[artifact][offset:]

    async def upload(self, name: str, chunks: AsyncIterator[bytes]) -> None:
        if name == "unwanted":
            raise RefusedError("it was not asked for")
        self.uploads[name] = b"".join([chunk async for chunk in chunks])

    async def relay(self, link: str) -> Link:
        raise PeerError("there is no relay here")


class AskedBudget(StateBudget):
    """The budget of a fast line, which notes the transfers that take turns in it."""

    def __init__(self) -> None:
        super().__init__()
        self.measured(100e6)
        self.asked: list[tuple[StateKind, bool, float]] = []
        """Kind, urgency and limit of each."""
        self.turns: list[int] = []
        """Sizes of the turns that were not urgent."""

    def transfer(self, kind: StateKind, *, urgent: bool = False, max_bytes_per_second: float = 0.0) -> PacedTransfer:
        self.asked.append((kind, urgent, max_bytes_per_second))
        return super().transfer(kind, urgent=urgent, max_bytes_per_second=max_bytes_per_second)

    def join(self, kind: StateKind, size_bytes: int, wake: Callable[[], None]) -> Ticket:
        self.turns.append(size_bytes)
        return super().join(kind, size_bytes, wake)


class Keeper:
    """A provider, as far as it has to do with parts; `link` is what the agent does."""

    def __init__(self, name: str, admission: Admission, folder: Path) -> None:
        self.node = NodeIdentity.new()
        identity = Identity("invite", admission.invite("127.0.0.1", 1).token.id)
        admitted = admission.join(identity, self.node.request(), name)
        self.node.adopt(admitted.certificate, admission.authority.certificate)
        self.name = admitted.node_id
        self.files = PartFiles(folder / name)
        self.folder = folder / name
        self.coordinator = ByHand()
        self.said: asyncio.Queue[ProviderMessage] = asyncio.Queue()
        self.lines: list[str] = []
        self.incoming: list[Link] = []
        """Connections that other nodes have made."""
        self.server = ProviderServer(self, self.node)
        self.address = ""
        client: Any = self.coordinator
        artifacts = Artifacts(client, None)
        self.budget = AskedBudget()
        self.parts = ReplicaService(
            self.files,
            self.node,
            client,
            artifacts,
            self.said.put,
            self._allow,
            lambda text: self.lines.append(text),
            OutgoingTransfers(self.budget),
        )

    def _allow(self, keepers: frozenset[str]) -> None:
        self.server.keepers = keepers

    async def link(self, peer: str, connection: Link) -> None:
        self.incoming.append(connection)
        if not await self.parts.accept(peer, connection):
            raise RefusedError(f"there is no link {connection.label!r} with {peer} here")

    def obey(self, **order: Any) -> None:
        self.parts.obey(CoordinatorMessage(**order))

    def keep(self, replica: int, tensors: dict[str, Tensor], key: str = KEY) -> None:
        self.parts.recorder(Deploy(key=key))(replica, tensors, METADATA)

    async def hears(self) -> Replicated | Failed:
        """The next thing it says."""
        message = await self.said.get()
        kind = message.WhichOneof("body")
        assert kind in ("replicated", "failed"), message
        told: Replicated | Failed = getattr(message, kind)
        return told

    def dials(self, other: "Keeper", link: str) -> Neighbour:
        """The coordinator's description of a link to the other provider."""
        return Neighbour(node=other.name, address=other.address, link=link, dialling=DIALLING_DIRECT)

    def awaits(self, other: "Keeper", link: str) -> Neighbour:
        return Neighbour(node=other.name, link=link, dialling=DIALLING_AWAIT)


@asynccontextmanager
async def keepers(folder: Path, *names: str) -> AsyncIterator[list[Keeper]]:
    """Some of one swarm, listening."""
    admission = Admission.in_memory()
    made = [Keeper(name, admission, folder) for name in names]
    try:
        for keeper in made:
            keeper.address = f"127.0.0.1:{await keeper.server.start('127.0.0.1', 0)}"
        yield made
    finally:
        await asyncio.gather(*(keeper.parts.close() for keeper in made))
        for keeper in made:
            await keeper.server.stop(grace_seconds=0)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds; otherwise the test times out."""
    while not condition():
        await asyncio.sleep(0.001)


def pair(owner: Keeper, holder: Keeper, link: str = "rep-1", key: str = KEY, **hold: Any) -> None:
    """The owner's parts go to the holder from now on."""
    holder.obey(hold=Hold(key=key, owner=holder.awaits(owner, link), **hold))
    owner.obey(replicate=Replicate(deployment="d1", key=key, holder=owner.dials(holder, link)))

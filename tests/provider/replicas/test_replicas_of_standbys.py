"""A real provider in a process of its own: without a stage it holds parts of another's, with one it keeps its own, and
it has them again when it is killed and started again."""

import hashlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from ravnest.coordinator.swarm.artifacts import Artifact
from ravnest.engine.settings import StageSettings
from ravnest.graph.weights import stream_tensors
from ravnest.microbatch import Marks
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.identity.identity import Identity
from ravnest.net.v1.control_pb2 import (
    DIALLING_AWAIT,
    DIALLING_DIRECT,
    DIALLING_RELAY,
    ArtifactRef,
    CoordinatorMessage,
    Deploy,
    Give,
    Hold,
    JoinReply,
    JoinRequest,
    Neighbour,
    Ready,
    Replicate,
    Start,
    UploadPart,
)
from ravnest.provider.replicas.files import PartFiles
from ravnest.provider.replicas.links import PartLinks
from ravnest.provider.replicas.transfer import PartArrivals, send_part
from ravnest.spec import OptimizerSpec
from tests.coordinator.checkpoints.part_states import GRAPH
from tests.e2e.command import Running
from tests.swarms.in_process import Joined, LocalSwarm, run

KEY, OWN = "d1-c0-s1", "d1-c0-s0"
TENSORS, METADATA = {"param:w": torch.arange(200_000.0)}, {"version": "7"}


class Standby:
    """It, the coordinator it has joined, and the node whose parts it holds, which is in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.swarm = LocalSwarm()
        self.joins: list[JoinRequest] = []
        self.uploads: dict[str, bytes] = {}
        self.files = PartFiles(None)
        self.part = self.files.write(KEY, 4, TENSORS, METADATA)
        self._stack = ExitStack()
        self._join = self.swarm.swarm.join
        self.swarm.swarm.join = self._joined  # type: ignore[method-assign]
        self.swarm.told.uploaded = self._uploaded  # type: ignore[method-assign]

    async def _joined(self, identity: Identity, request: JoinRequest, seen_host: str) -> JoinReply:
        self.joins.append(request)
        return await self._join(identity, request, seen_host)

    async def _uploaded(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        self.uploads[name] = b"".join([chunk async for chunk in chunks])
        self.swarm.told.changes.notify()

    def start(self) -> Running:
        line = self.swarm.invite().line
        words = ("join", line, "--name", "standby", "--listen", "127.0.0.1:0")
        before = len(self.joins)
        process = self._stack.enter_context(Running(*words, folder=self.folder, warm=True))
        changes = self.swarm.swarm.members.changes
        run(changes.until(lambda: len(self.joins) > before and "standby" in self.swarm.connected()))
        return process

    def close(self) -> None:
        run(self.swarm.close())
        self._stack.close()

    @property
    def address(self) -> str:
        return self.swarm.swarm.members["standby"].address

    async def tell(self, **order: Any) -> None:
        await self.swarm.swarm.tell("standby", CoordinatorMessage(**order))

    async def says(self, kind: str) -> Any:
        """The first thing of this kind that it says from now on."""
        began = len(self.swarm.told.messages)

        def said() -> list[Any]:
            messages = self.swarm.told.messages[began:]
            return [getattr(message, kind) for _, message in messages if message.WhichOneof("body") == kind]

        await self.swarm.until(lambda: bool(said()))
        return said()[0]

    async def deploy(self, tensors: dict[str, torch.Tensor], generation: int, **fields: Any) -> Ready:
        """Gives it the only stage of a model, and says what it says to that."""
        settings = StageSettings(optimizer=OptimizerSpec("SGD", {"lr": 0.1}).to_json()).to_json()
        order = Deploy(deployment="d1", stages=1, settings_json=settings, generation=generation, key=OWN, **fields)
        for field, data in (("graph", GRAPH.to_json().encode()), ("weights", b"".join(stream_tensors(tensors, {})))):
            name = f"{field}-{generation}"
            self.swarm.swarm.artifacts[name] = Artifact(name, "", len(data), lambda o, data=data: iter([data[o:]]))
            ref = ArtifactRef(id=name, sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
            getattr(order, field).CopyFrom(ref)
        await self.tell(deploy=order)
        ready: Ready = await self.says("ready")
        return ready

    async def feed(self, microbatch: int, generation: int, replica: int = 0) -> None:
        values = {name: torch.full((2, 4), float(microbatch + 1)) for name in ("inputs", "targets")}
        frame = Frame(
            FrameKind.FEED, microbatch, marks=Marks(samples=2, replica=replica), generation=generation, tensors=values
        )
        await self.swarm.swarm.feed_frame("standby", frame)


@pytest.fixture
def standby(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standby]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    standby = Standby(tmp_path)

    async def start() -> None:
        standby.swarm.port = await standby.swarm.swarm.start()

    run(start())
    try:
        yield standby
    finally:
        standby.close()


async def hold(standby: Standby, owner: Joined) -> None:
    """The standby gets the part over the relay: neither is dialled, and it is called there though it has no stage."""
    standby.swarm.swarm.allow_relays({"rep-1": frozenset({"owner", "standby"})})
    await standby.tell(hold=Hold(key=KEY, owner=Neighbour(node="owner", link="rep-1", dialling=DIALLING_AWAIT)))
    links = PartLinks(owner.node, owner.client, lambda nodes: None)
    link = links.add(Neighbour(node="standby", link="rep-1", dialling=DIALLING_RELAY))
    await send_part(await link.connected(), standby.part)
    await links.close()


async def take(standby: Standby, owner: Joined) -> None:
    """The owner gets the part back, over a connection that it dials."""
    to = Neighbour(node="owner", link="give-1", dialling=DIALLING_AWAIT)
    await standby.tell(give=Give(key=KEY, replica=4, to=to))
    links, taken = PartLinks(owner.node, owner.client, lambda nodes: None), PartFiles(None)
    link = links.add(Neighbour(node="standby", address=standby.address, link="give-1", dialling=DIALLING_DIRECT))
    await PartArrivals(await link.connected(), lambda replica, size: taken.begin(KEY, replica, size)).next()
    await links.close()
    assert b"".join(taken.find(KEY, 4).chunks()) == b"".join(standby.part.chunks())


async def upload(standby: Standby) -> None:
    await standby.tell(upload_part=UploadPart(key=KEY, replica=4, name="replica-4"))
    await standby.swarm.until(lambda: "replica-4" in standby.uploads)
    assert standby.uploads["replica-4"] == b"".join(standby.part.chunks())
    await standby.tell(upload_part=UploadPart(key=KEY, replica=5, name="replica-5"))
    failed = await standby.says("failed")
    assert failed.kind == "part" and failed.deployment == KEY and "there is no part" in failed.message


def test_a_standby_holds_gives_and_uploads_parts_also_after_it_was_killed(standby: Standby) -> None:
    owners: list[Joined] = []

    async def first() -> None:
        owners.append(await standby.swarm.join("owner"))
        await hold(standby, owners[0])

    process = standby.start()
    assert [*standby.joins[-1].parts] == []
    run(first())
    process.signal(signal.SIGKILL)
    process.process.wait()
    standby.start()
    assert [(part.key, part.replica) for part in standby.joins[-1].parts] == [(KEY, 4)]
    run(take(standby, owners[0]))
    run(upload(standby))
    [folder] = standby.folder.glob("data/ravnest/nodes/*/standby/parts")
    assert [name.partition("@")[0] for name in os.listdir(folder)] == [KEY]


def test_a_stage_keeps_its_part_and_begins_with_it_after_it_was_killed(standby: Standby) -> None:
    async def train() -> None:
        ready = await standby.deploy({"weight:layer.weight": torch.ones(4, 4)}, 1)
        assert (ready.version, [*ready.applied]) == (0, [])
        await standby.tell(replicate=Replicate(deployment="d1", key=OWN))
        await standby.tell(start=Start(deployment="d1"))
        await standby.feed(0, 1)
        await standby.feed(1, 1, replica=2)
        told = await standby.says("replicated")
        assert (told.key, told.replica, told.holder, told.error) == (OWN, 2, "", "")

    async def begin_again() -> None:
        assert (OWN, 2) in [(part.key, part.replica) for part in standby.joins[-1].parts]
        ready = await standby.deploy({}, 2, part_key=OWN, part_replica=2)
        assert (ready.version, [*ready.applied]) == (2, [0, 1])

    process = standby.start()
    run(train())
    process.signal(signal.SIGKILL)
    process.process.wait()
    standby.start()
    run(begin_again())

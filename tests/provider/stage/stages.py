"""Hosted stages without a swarm: a client that has artifacts, machines with one stage each, and lines of two."""

import asyncio
import hashlib
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

import torch

from ravnest.engine.settings import StageSettings
from ravnest.graph.weights import stream_tensors
from ravnest.microbatch import Marks
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.v1.control_pb2 import ArtifactRef, Deploy, Neighbour, ProviderMessage
from ravnest.provider.fetch.artifacts import Artifacts
from ravnest.provider.fetch.progress import FetchProgress
from ravnest.provider.stage.build import build_stage
from ravnest.provider.stage.host import Host
from ravnest.provider.stage.hosted_stage import HostedStage
from ravnest.spec import OptimizerSpec
from tests.net.streams.pipes import Pipe
from tests.provider.stage.fake_client import FakeClient
from tests.provider.stage.kept_model import BATCHES, captured, graphs

SECONDS = 30.0
LENT_BYTES = 8 << 30
Part = tuple[int, dict[str, torch.Tensor], dict[str, str]]


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(SECONDS):
            await test

    # Capturing takes longest, and cannot hang.
    graphs()
    asyncio.run(bounded())


def a_host(node: NodeIdentity | None = None) -> Host:
    return Host(node or NodeIdentity.new(), torch.device("cpu"), LENT_BYTES)


def references(artifacts: dict[str, bytes]) -> dict[str, ArtifactRef]:
    return {
        name: ArtifactRef(id=name, sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
        for name, data in artifacts.items()
    }


async def built(order: Deploy, client: Any, node: NodeIdentity | None = None, part: Part | None = None) -> HostedStage:
    """The stage of this order, from this client."""
    progress = FetchProgress(order.graph.size_bytes + order.weights.size_bytes)
    return await build_stage(
        order, client, a_host(node), Artifacts(client), progress, None if part is None else part[1:]
    )


class Feed:
    """Collects a stage's answers to the coordinator."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()

    async def send(self, frame: Frame) -> None:
        await self.frames.put(frame)


class Wire(Pipe):
    label = ""
    peer_host = ""


class Machine:
    """A provider with one stage."""

    def __init__(self, name: str, stage: int) -> None:
        self.name, self.stage = name, stage
        self.feed, self.parts = Feed(), list[Part]()
        self.said: list[ProviderMessage] = []
        self.hosted: HostedStage
        self.client: Any = None

    def order(self, generation: int, neighbour: str, *, only_constants: bool = False, **more: Any) -> Deploy:
        graph = graphs()[self.stage]
        specs = graph.constants if only_constants else graph.weights
        weights = {f"weight:{spec.key}": captured().weights[spec.key] for spec in specs}
        artifacts = {"graph": graph.to_json().encode(), "weights": b"".join(stream_tensors(weights, {}))}
        self.client = FakeClient(artifacts)
        told = StageSettings(
            optimizer=OptimizerSpec("SGD", {"lr": 0.05, "momentum": 0.9}).to_json(), stage=self.stage, stages=2
        )
        other = Neighbour(node=neighbour, link=f"g{generation}")
        return Deploy(
            deployment="d1",
            stage=self.stage,
            stages=2,
            settings_json=told.to_json(),
            generation=generation,
            **references(artifacts),
            **({"previous": other} if self.stage else {"next": other}),
            **more,
        )

    async def take(self, order: Deploy, part: Part | None = None) -> None:
        self.hosted = await built(order, self.client, part=part)
        self.hosted.on_keep = self._record

    def _record(self, replica: int, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        """Takes a part as the provider's own recorder does: the tensors change afterwards."""
        self.parts.append((replica, {name: tensor.detach().clone() for name, tensor in tensors.items()}, metadata))

    async def keep(self, order: Deploy) -> None:
        await self.hosted.renew(order, self.client)

    def open(self) -> None:
        feed: Any = self.feed

        async def say(message: ProviderMessage) -> None:
            self.said.append(message)

        self.hosted.open(feed, say)

    def give(self, number: int, generation: int, **more: Any) -> None:
        """The coordinator's feed for a microbatch."""
        inputs, targets = BATCHES[number]
        tensors = {"inputs": inputs, "targets": targets}
        names = {value.name for value in graphs()[self.stage].inputs}
        given = {name: tensor for name, tensor in tensors.items() if name in names}
        self.hosted.take_feed(
            Frame(
                FrameKind.FEED, number, marks=Marks(samples=len(targets), **more), generation=generation, tensors=given
            )
        )

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.hosted.stage.state_tensors().items()}


class Line:
    """Two machines, and the connection between them."""

    def __init__(self, root: Machine, leaf: Machine) -> None:
        self.root, self.leaf = root, leaf
        self._tasks: list[asyncio.Task[None]] = []

    def connect(self, generation: int) -> None:
        self.root.open()
        self.leaf.open()
        one, other = Wire.pair(10**9)
        assert isinstance(one, Wire) and isinstance(other, Wire)
        one.label = other.label = f"g{generation}"
        self._tasks = [
            asyncio.create_task(self.root.hosted.accept(self.leaf.name, one)),  # type: ignore[arg-type]
            asyncio.create_task(self.leaf.hosted.accept(self.root.name, other)),  # type: ignore[arg-type]
        ]

    async def train(self, numbers: Sequence[int], generation: int, **more: Any) -> None:
        for number in numbers:
            marked = {name: value for name, (at, value) in more.items() if at == number}
            self.root.give(number, generation, **marked)
            self.leaf.give(number, generation, **marked)
        for number in numbers:
            frame = await self.root.feed.frames.get()
            assert (frame.kind, frame.microbatch, frame.generation) == (FrameKind.DONE, number, generation)
        await self.settled()

    async def settled(self) -> None:
        """A stage sends on before it updates: until both have."""
        loop = asyncio.get_running_loop()
        for machine in (self.root, self.leaf):
            between = asyncio.Event()
            machine.hosted.generation.worker.call_between_tasks(partial(loop.call_soon_threadsafe, between.set))
            await between.wait()

    async def close(self) -> None:
        for machine in (self.root, self.leaf):
            await machine.hosted.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def a_line(generation: int = 1) -> Line:
    root, leaf = Machine("a", 0), Machine("b", 1)
    await root.take(root.order(generation, "b"))
    await leaf.take(leaf.order(generation, "a"))
    line = Line(root, leaf)
    line.connect(generation)
    return line

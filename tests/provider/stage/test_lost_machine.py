"""Real providers in processes of their own: one is killed, its neighbour keeps its stage, a standby takes the other."""

import hashlib
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ravnest.coordinator.swarm.artifacts import Artifact
from ravnest.engine.settings import StageSettings
from ravnest.graph.portable import PortableGraph
from ravnest.graph.weights import stream_tensors
from ravnest.microbatch import Marks
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.v1.control_pb2 import (
    DIALLING_AWAIT,
    DIALLING_DIRECT,
    ArtifactRef,
    CoordinatorMessage,
    Deploy,
    Hold,
    Neighbour,
    ProviderMessage,
    Replicate,
    Start,
)
from ravnest.spec import OptimizerSpec
from tests.e2e.command import Running
from tests.known_speed import speed_is_known
from tests.provider.stage.kept_model import BATCHES, captured, graphs
from tests.swarms.in_process import LocalSwarm, run

NAMES = ("one", "two", "three")
KEY = "d1-c0-s1"


class Machines:
    """Three providers and a coordinator that does what the test says."""

    def __init__(self, stack: ExitStack, folder: Any) -> None:
        self.swarm = LocalSwarm()

        async def start() -> None:
            self.swarm.port = await self.swarm.swarm.start()

        run(start())
        self.processes = {}
        for name in NAMES:
            words = ("join", self.swarm.invite().line, "--name", name, "--listen", "127.0.0.1:0")
            self.processes[name] = stack.enter_context(Running(*words, folder=folder, warm=True))
            # One after the other: each measures its machine first.
            run(self.swarm.swarm.members.changes.until(lambda name=name: name in self.swarm.connected()))

    def artifact(self, name: str, data: bytes) -> ArtifactRef:
        sha256 = hashlib.sha256(data).hexdigest()
        self.swarm.swarm.artifacts[name] = Artifact(name, sha256, len(data), lambda offset: iter([data[offset:]]))
        return ArtifactRef(id=name, sha256=sha256, size_bytes=len(data))

    def graph(self, stage: int) -> ArtifactRef:
        return self.artifact(f"graph-{stage}", graphs()[stage].to_json().encode())

    def weights(self, stage: int, only_constants: bool = False) -> ArtifactRef:
        graph: PortableGraph = graphs()[stage]
        specs = graph.constants if only_constants else graph.weights
        tensors = {f"weight:{spec.key}": captured().weights[spec.key] for spec in specs}
        return self.artifact(f"weights-{stage}-{only_constants}", b"".join(stream_tensors(tensors, {})))

    def neighbour(self, name: str, link: str, dials: bool) -> Neighbour:
        address = self.swarm.swarm.members[name].address
        return Neighbour(node=name, link=link, address=address, dialling=DIALLING_DIRECT if dials else DIALLING_AWAIT)

    def order(self, stage: int, other: str, generation: int, **more: Any) -> Deploy:
        told = StageSettings(
            optimizer=OptimizerSpec("SGD", {"lr": 0.05, "momentum": 0.9}).to_json(), stage=stage, stages=2
        )
        link = self.neighbour(other, f"g{generation}", dials=stage == 0)
        return Deploy(
            deployment="d1",
            stage=stage,
            stages=2,
            graph=self.graph(stage),
            weights=self.weights(stage, "part_key" in more),
            settings_json=told.to_json(),
            generation=generation,
            **({"previous": link} if stage else {"next": link}),
            **more,
        )

    async def tell(self, name: str, **order: Any) -> None:
        await self.swarm.swarm.tell(name, CoordinatorMessage(**order))

    async def said(self, name: str, kind: str, count: int = 1) -> list[Any]:
        """All of its messages of this kind, once there is this number of them."""

        def found() -> list[ProviderMessage]:
            return [m for node, m in self.swarm.told.messages if node == name and m.HasField(kind)]  # type: ignore[arg-type]

        await self.swarm.until(lambda: len(found()) >= count)
        return [getattr(message, kind) for message in found()]

    async def train(self, stages: dict[str, int], numbers: range, generation: int, replica: int = 0) -> None:
        before = len(self.swarm.told.frames)
        for number in numbers:
            inputs, targets = BATCHES[number]
            for name, stage in stages.items():
                wanted = {value.name for value in graphs()[stage].inputs}
                tensors = {n: t for n, t in {"inputs": inputs, "targets": targets}.items() if n in wanted}
                marked = {"replica": replica} if replica == number + 1 else {}
                frame = Frame(
                    FrameKind.FEED, number, marks=Marks(samples=8, **marked), generation=generation, tensors=tensors
                )
                await self.swarm.swarm.feed_frame(name, frame)
        await self.swarm.until(lambda: len(self.swarm.told.frames) >= before + len(numbers))
        root = next(name for name, stage in stages.items() if stage == 0)
        assert self.swarm.told.frames[before:] == [(root, FrameKind.DONE, number) for number in numbers]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("machines")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        speed_is_known(folder / "cache")
        machines = Machines(stack, folder)
        try:
            yield machines
        finally:
            run(machines.swarm.close())


def test_a_killed_leaf_is_taken_by_its_holder_while_the_root_keeps_its_stage(machines: Machines) -> None:
    async def test() -> None:
        await machines.tell("one", deploy=machines.order(0, "two", 1, key="d1-c0-s0"))
        await machines.tell("two", deploy=machines.order(1, "one", 1, key=KEY))
        for name in ("one", "two"):
            [ready] = await machines.said(name, "ready")
            assert (ready.generation, ready.version, list(ready.applied)) == (1, 0, [])
        held = machines.neighbour("two", "replica", dials=False)
        order = Hold(key=KEY, owner=held, graph=machines.graph(1), weights=machines.weights(1, only_constants=True))
        await machines.tell("three", hold=order)
        holder = machines.neighbour("three", "replica", dials=True)
        await machines.tell("two", replicate=Replicate(deployment="d1", key=KEY, holder=holder))
        for name in ("one", "two"):
            await machines.tell(name, start=Start(deployment="d1"))
        await machines.train({"one": 0, "two": 1}, range(4), 1, replica=3)
        [kept] = await machines.said("two", "replicated")
        assert (kept.key, kept.replica, kept.holder, kept.error) == (KEY, 3, "three", "")
        os.kill(machines.processes["two"].process.pid, signal.SIGKILL)
        await machines.tell("one", deploy=machines.order(0, "three", 2, keep=True, key="d1-c0-s0"))
        take = machines.order(1, "one", 2, part_key=KEY, part_replica=3, key=KEY)
        await machines.tell("three", deploy=take)
        ready = (await machines.said("one", "ready", 2))[-1]
        assert (ready.generation, ready.version, list(ready.applied)) == (2, 4, [0, 1, 2, 3])
        [ready] = await machines.said("three", "ready")
        assert (ready.generation, ready.version, list(ready.applied)) == (2, 3, [0, 1, 2])
        for name in ("one", "three"):
            await machines.tell(name, start=Start(deployment="d1"))
        await machines.train({"one": 0, "three": 1}, range(3, 8), 2)
        # Replayed microbatches were not applied twice, and both stages have applied all of them.
        for name, updates in (("one", 8), ("three", 5)):
            reports = await machines.said(name, "report")
            while reports[-1].updates < updates:
                reports = await machines.said(name, "report", len(reports) + 1)
            assert reports[-1].updates == updates
        losses = [loss.microbatch for report in await machines.said("three", "report") for loss in report.losses]
        assert losses == [3, 4, 5, 6, 7]
        # A stage that is not there cannot be kept, and says so.
        other = machines.order(1, "one", 3, keep=True)
        other.deployment = "d2"
        await machines.tell("three", deploy=other)
        failed = (await machines.said("three", "failed"))[-1]
        assert (failed.kind, failed.generation) == ("deploy", 3) and "not here" in failed.message

    run(test())

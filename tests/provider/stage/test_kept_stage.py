"""A cluster that has lost a stage: the others go on with theirs, another machine with a part of the lost one's."""

import asyncio
import hashlib
import json
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from ravnest.engine.settings import StageSettings
from ravnest.errors import GraphError, PeerError
from ravnest.graph.weights import stream_tensors
from ravnest.microbatch import Marks
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.v1.control_pb2 import ArtifactRef, Deploy, Neighbour, ProviderMessage
from ravnest.provider.fetch.artifacts import Artifacts
from ravnest.provider.fetch.progress import FetchProgress
from ravnest.provider.replicas.format import Restored
from ravnest.provider.stage.hosted_stage import Deployment
from ravnest.spec import OptimizerSpec
from tests.net.streams.pipes import Pipe
from tests.provider.stage.fake_client import FakeClient
from tests.provider.stage.kept_model import BATCHES, captured, graphs

SECONDS = 30.0
Part = tuple[int, dict[str, torch.Tensor], dict[str, str]]


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(SECONDS):
            await test

    # What takes longest is not what may hang.
    graphs()
    asyncio.run(bounded())


class Feed:
    """Where a stage's answers to the coordinator go."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()

    async def send(self, frame: Frame) -> None:
        await self.frames.put(frame)


class Wire(Pipe):
    label = ""


class Machine:
    """A provider with one stage."""

    def __init__(self, name: str, stage: int) -> None:
        self.name, self.stage = name, stage
        self.feed, self.parts = Feed(), list[Part]()
        self.said: list[ProviderMessage] = []
        self.deployment: Deployment
        self._client: Any = None

    def order(self, generation: int, neighbour: str, *, only_constants: bool = False, **more: Any) -> Deploy:
        graph = graphs()[self.stage]
        specs = graph.constants if only_constants else graph.weights
        weights = {f"weight:{spec.key}": captured().weights[spec.key] for spec in specs}
        artifacts = {"graph": graph.to_json().encode(), "weights": b"".join(stream_tensors(weights, {}))}
        self._client = FakeClient(artifacts)
        refs = {
            n: ArtifactRef(id=n, sha256=hashlib.sha256(d).hexdigest(), size_bytes=len(d)) for n, d in artifacts.items()
        }
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
            **refs,
            **({"previous": other} if self.stage else {"next": other}),
            **more,
        )

    async def take(self, order: Deploy, part: Part | None = None) -> None:
        progress = FetchProgress(order.graph.size_bytes + order.weights.size_bytes)
        self.deployment = await Deployment.make(
            *(order, self._client, NodeIdentity.new(), torch.device("cpu"), 0, Artifacts(self._client), progress),
            part=None if part is None else part[1:],
        )
        self.deployment.on_keep = lambda *kept: self.parts.append(kept)

    async def keep(self, order: Deploy) -> None:
        self.deployment = await self.deployment.renewed(order, self._client, NodeIdentity.new())

    def open(self) -> None:
        feed: Any = self.feed

        async def say(message: ProviderMessage) -> None:
            self.said.append(message)

        self.deployment.open(feed, say)

    def give(self, number: int, generation: int, **more: Any) -> None:
        """What the coordinator feeds of a microbatch."""
        inputs, targets = BATCHES[number]
        tensors = {"inputs": inputs, "targets": targets}
        names = {value.name for value in graphs()[self.stage].inputs}
        given = {name: tensor for name, tensor in tensors.items() if name in names}
        self.deployment.take_feed(
            Frame(
                FrameKind.FEED, number, marks=Marks(samples=len(targets), **more), generation=generation, tensors=given
            )
        )

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.deployment._stage.state_tensors().items()}


class Line:
    """Two machines, and the connection between them."""

    def __init__(self, root: Machine, leaf: Machine) -> None:
        self.root, self.leaf = root, leaf
        self._wires: tuple[Wire, Wire] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def connect(self, generation: int) -> None:
        self.root.open()
        self.leaf.open()
        one, other = Wire.pair(10**9)
        assert isinstance(one, Wire) and isinstance(other, Wire)
        one.label = other.label = f"g{generation}"
        self._tasks = [
            asyncio.create_task(self.root.deployment.accept(self.leaf.name, one)),  # type: ignore[arg-type]
            asyncio.create_task(self.leaf.deployment.accept(self.root.name, other)),  # type: ignore[arg-type]
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
            machine.deployment._worker.between(partial(loop.call_soon_threadsafe, between.set))
            await between.wait()

    async def close(self) -> None:
        for machine in (self.root, self.leaf):
            await machine.deployment.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def a_line(generation: int = 1) -> Line:
    root, leaf = Machine("a", 0), Machine("b", 1)
    await root.take(root.order(generation, "b"))
    await leaf.take(leaf.order(generation, "a"))
    line = Line(root, leaf)
    line.connect(generation)
    return line


async def break_with_some_in_flight(line: Line) -> None:
    """The leaf gets no targets any more, and then is gone."""
    for number in (4, 5):
        line.root.give(number, 1)
    while line.root.deployment.report()[0].forwards < 5:
        await asyncio.sleep(0.001)
    await line.leaf.deployment.close()


def test_a_lost_leaf_is_made_again_and_the_run_is_bit_for_bit_the_undisturbed_one() -> None:
    async def test() -> None:
        plain = await a_line()
        await plain.train(range(6), 1)
        line = await a_line()
        await line.train(range(4), 1, replica=(3, 4))
        [part] = line.leaf.parts
        [own] = line.root.parts
        assert part[0] == own[0] == 4
        await break_with_some_in_flight(line)
        before = line.root.deployment.report()[0]
        taker = Machine("c", 1)
        await line.root.keep(line.root.order(2, "c", keep=True))
        await taker.take(taker.order(2, "a", only_constants=True, part_key="k", part_replica=4), part)
        for machine in (line.root, taker):
            ready = machine.deployment.ready()
            told = (ready.deployment, ready.generation, ready.version, list(ready.applied))
            assert told == ("d1", 2, 4, [0, 1, 2, 3])
        again = Line(line.root, taker)
        again.connect(2)
        await again.train(range(4, 6), 2)
        for one, other in ((plain.root, line.root), (plain.leaf, taker)):
            have, want = other.state(), one.state()
            assert have.keys() == want.keys()
            assert all(torch.equal(have[name], tensor) for name, tensor in want.items())
        report = line.root.deployment.report()[0]
        assert (report.updates, sum(report.staleness_counts), report.backwards) == (6, 6, 6)
        assert report.bytes_sent > before.bytes_sent > 0 and report.seconds > before.seconds
        assert report.busy_seconds > before.busy_seconds and line.root.deployment.samples == 48
        assert [loss.microbatch for loss in taker.deployment.report()[0].losses] == [4, 5]
        await plain.close()
        await again.close()

    run(test())


def test_stages_that_are_apart_each_apply_what_they_lack() -> None:
    async def test() -> None:
        line = await a_line()
        await line.train(range(4), 1, replica=(1, 2))
        [part] = line.leaf.parts
        await break_with_some_in_flight(line)
        taker = Machine("c", 1)
        await line.root.keep(line.root.order(2, "c", keep=True))
        await taker.take(taker.order(2, "a", only_constants=True, part_key="k", part_replica=2), part)
        assert list(taker.deployment.ready().applied) == [0, 1] and taker.deployment.ready().version == 2
        again = Line(line.root, taker)
        again.connect(2)
        await again.train(range(2, 6), 2)
        for machine in (line.root, taker):
            ready = machine.deployment.ready()
            assert (ready.version, list(ready.applied)) == (6, list(range(6)))
            counters = {int(t) for name, t in machine.state().items() if name.endswith("num_batches_tracked")}
            assert counters == {6}
        assert [loss.microbatch for loss in taker.deployment.report()[0].losses] == [2, 3, 4, 5]
        await again.close()

    run(test())


def test_a_stage_whose_neighbour_is_gone_can_be_kept_and_what_it_had_to_tell_is_told() -> None:
    async def test() -> None:
        line = await a_line()
        await line.train(range(2), 1)
        # It ends in order, as far as the other can tell: that is a failure of the link, which does not end the stage.
        await line.root.deployment.close()
        kind, _, _ = await line.leaf.deployment.failure
        assert kind == "link"
        kept = Machine("b", 1)
        kept.deployment, kept._client = line.leaf.deployment, line.leaf._client
        await kept.keep(kept.order(2, "c", keep=True))
        assert not kept.deployment.failure.done() and kept.deployment.neighbours == {"c"}
        assert kept.deployment.news.is_set()
        report = kept.deployment.report()[0]
        assert [loss.microbatch for loss in report.losses] == [0, 1] and report.updates == 2
        root = Machine("c", 0)
        await root.take(root.order(2, "b"))
        again = Line(root, kept)
        again.connect(2)
        with pytest.raises(PeerError, match="a frame of generation 1 came, this stage is of 2"):
            kept.give(2, 1)
        await again.train(range(2, 4), 2)
        assert kept.deployment.report()[0].updates == 4
        await again.close()

    run(test())


def test_a_second_loss_while_the_first_is_being_repaired_is_repaired_too() -> None:
    async def test() -> None:
        line = await a_line()
        await line.train(range(2), 1)
        await line.leaf.deployment.close()
        first = asyncio.create_task(line.root.keep(line.root.order(2, "c", keep=True)))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await line.root.keep(line.root.order(3, "d", keep=True))
        # Not opened: the next loss came before it was.
        await line.root.keep(line.root.order(4, "e", keep=True))
        leaf = Machine("e", 1)
        await leaf.take(leaf.order(4, "a"))
        again = Line(line.root, leaf)
        again.connect(4)
        await again.train(range(2, 4), 4)
        assert line.root.deployment.ready().version == 4
        await again.close()

    run(test())


def test_only_the_stage_that_is_here_and_well_is_kept() -> None:
    async def test() -> None:
        line = await a_line()
        await line.train(range(1), 1)
        for change, why in (
            ({"deployment": "d2"}, "which is not here"),
            ({"stage": 1}, "which is not here"),
            ({"stages": 3}, "which is not here"),
            ({"graph": ArtifactRef(id="graph", sha256="0" * 64)}, "another graph"),
        ):
            order = line.root.order(2, "c", keep=True)
            order.MergeFrom(Deploy(**change))  # type: ignore[arg-type]
            with pytest.raises(PeerError, match=why):
                await line.root.keep(order)
        # It has not been disturbed by that.
        await line.train(range(1, 3), 1)
        parameters = line.leaf.deployment._stage.state_tensors()
        parameters[next(name for name in parameters if name.startswith("param:"))].data.fill_(float("nan"))
        for machine in (line.root, line.leaf):
            machine.give(3, 1)
        kind, _, _ = await line.leaf.deployment.failure
        assert kind == "not_finite"
        with pytest.raises(PeerError, match="has failed and cannot be kept: the loss of microbatch 3"):
            await line.leaf.keep(line.leaf.order(2, "c", keep=True))
        await line.close()

    run(test())


def test_a_part_that_does_not_fit_is_refused_by_name() -> None:
    async def test() -> None:
        line = await a_line()
        await line.train(range(2), 1, replica=(1, 2))
        [(replica, tensors, metadata)] = line.leaf.parts
        await line.close()
        name = next(name for name in tensors if name.startswith("param:"))
        for broken, why in (
            ({n: t for n, t in tensors.items() if n != name}, "lack 'param:"),
            ({**tensors, name: torch.zeros(3)}, "do not have the shape"),
        ):
            taker = Machine("c", 1)
            with pytest.raises(GraphError, match=why):
                await taker.take(taker.order(2, "a", only_constants=True, part_key="k"), (replica, broken, metadata))

    run(test())


@pytest.mark.parametrize("text", ['{"1": 2}', "[-1]", "[1.5]", '["a"]', "[true]", "7", "[", json.dumps([0] * 5000)])
def test_what_a_part_says_of_microbatches_is_checked(text: str) -> None:
    with pytest.raises(GraphError, match="cannot be read"):
        Restored.of({}, {"applied": text})
    with pytest.raises(GraphError, match="cannot be read"):
        Restored.of({}, {"rings": json.dumps({"0": text})})

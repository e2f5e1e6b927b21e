"""A neighbour that holds the stage next to a real one breaks the rules on the link between them, over real sockets.

The stage gives the link up with a sentence that names the neighbour, tells it why, and takes nothing more of it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ravnest.coordinator.access.admission import Admission
from ravnest.engine.settings import StageSettings
from ravnest.errors import PeerError, RefusedError
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.graph.portable import PortableGraph, ValueSpec
from ravnest.graph.weights import stream_tensors
from ravnest.microbatch import Marks
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.identity.identity import Identity
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.rpc.client import dial_link
from ravnest.net.rpc.server import ProviderServer
from ravnest.net.streams.frame_stream import Link
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.net.v1.control_pb2 import DIALLING_AWAIT, Deploy, Neighbour, ProviderMessage
from ravnest.provider.stage.hosted_stage import HostedStage
from ravnest.spec import OptimizerSpec
from tests.provider.stage.fake_client import FakeClient, captured
from tests.provider.stage.stages import built, references
from tests.swarms.in_process import run

GENERATION = 4
LINK = "d1-0"
SAMPLES = 8


@dataclass
class Victim:
    """A provider that listens, with a real stage on it. Its one neighbour is mallory."""

    server: ProviderServer
    address: str
    nodes: dict[str, NodeIdentity]
    graph: PortableGraph
    hosted: HostedStage
    feed: ResumableLink

    async def link(self, peer: str, connection: Link) -> None:
        await self.hosted.accept(peer, connection)

    async def dial(self, name: str = "mallory", link: str = LINK) -> Link:
        """A connection of this node; the counts have not been said yet."""
        return await dial_link(self.address, "victim", self.nodes[name], link)

    async def begin(self) -> Link:
        """A connection on which mallory began as it should."""
        connection = await self.dial()
        await connection.send(Frame(FrameKind.RESUME, 0))
        first = await connection.receive()
        assert first is not None and first.kind is FrameKind.RESUME
        return connection

    async def failure(self) -> str:
        """Why the stage cannot go on, as the coordinator is told; a neighbour that broke the rules is named."""
        failure = await self.hosted.generation.failure
        accused = "mallory" if failure.text.startswith("mallory broke the protocol: ") else ""
        assert (failure.kind, failure.about) == ("neighbour" if accused else "link", accused)
        return failure.text


def values(specs: tuple[ValueSpec, ...]) -> dict[str, Tensor]:
    shapes = {
        s.name: tuple(d if isinstance(d, int) else SAMPLES for d in s.shape) for s in specs if s.dtype is not None
    }
    return {s.name: torch.zeros(shapes[s.name], dtype=s.dtype) for s in specs if s.dtype is not None}


@contextlib.asynccontextmanager
async def victim(stage: int) -> AsyncIterator[Victim]:
    """The first of two stages, or the second."""
    found = captured()
    graph = split(found.graph, layout(found.graph).cuts[1:2])[stage]
    weights = {f"weight:{w.key}": found.weights[w.key] for w in graph.weights}
    artifacts = {"graph": graph.to_json().encode(), "weights": b"".join(stream_tensors(weights, {}))}
    refs = references(artifacts)
    settings = StageSettings(
        optimizer=OptimizerSpec("SGD", {"lr": 0.1}).to_json(), stage=stage, stages=2, in_flight=3
    ).to_json()
    order = Deploy(deployment="d1", stage=stage, stages=2, settings_json=settings, generation=GENERATION, **refs)
    mallory = Neighbour(node="mallory", link=LINK, dialling=DIALLING_AWAIT)
    (order.next if stage == 0 else order.previous).CopyFrom(mallory)

    admission = Admission.in_memory()
    nodes = {}
    for name in ("victim", "mallory", "other"):
        node = nodes[name] = NodeIdentity.new()
        identity = Identity("invite", admission.invite("127.0.0.1", 1).token.id)
        node.adopt(admission.join(identity, node.request(), name).certificate, admission.authority.certificate)
    client: Any = FakeClient(artifacts)
    hosted = await built(order, client, nodes["victim"])

    class Handler:
        async def link(self, peer: str, connection: Link) -> None:
            await made.link(peer, connection)

    server = ProviderServer(Handler(), nodes["victim"])
    server.neighbours = {"mallory"}
    port = await server.start("127.0.0.1", 0)
    made = Victim(server, f"127.0.0.1:{port}", nodes, graph, hosted, ResumableLink("the coordinator"))
    hosted.open(made.feed, unheard)
    hosted.connect()
    try:
        yield made
    finally:
        await hosted.close()
        await server.stop(grace_seconds=0)


async def unheard(message: ProviderMessage) -> None:
    """Nobody hears what the victim says of rounds."""


def forward(stage: Victim, microbatch: int = 0) -> Frame:
    """What mallory should send to the leaf."""
    return Frame(
        FrameKind.FORWARD,
        microbatch,
        marks=Marks(samples=SAMPLES),
        generation=GENERATION,
        tensors=values(stage.graph.receives),
    )


def fed(stage: Victim, microbatch: int = 0) -> Frame:
    return replace(forward(stage, microbatch), kind=FrameKind.FEED, tensors=values(stage.graph.inputs))


def with_values(frame: Frame, change: Any) -> Frame:
    return replace(frame, tensors={name: change(tensor) for name, tensor in frame.tensors.items()})


async def is_told(connection: Link, words: str, kind: type[PeerError] = RefusedError) -> None:
    """Whoever dialled learns why it was dropped, behind whatever it was sent before."""
    with pytest.raises(kind, match=words):
        while await connection.receive() is not None:
            pass


TO_A_LEAF: dict[str, tuple[Any, str]] = {
    "BACKWARD for FORWARD": (
        lambda f: [replace(f, kind=FrameKind.BACKWARD)],
        "a BACKWARD frame came where only FORWARD",
    ),
    "FEED for FORWARD": (lambda f: [replace(f, kind=FrameKind.FEED)], "a FEED frame came where only FORWARD"),
    "DONE for FORWARD": (lambda f: [replace(f, kind=FrameKind.DONE)], "a DONE frame came where only FORWARD"),
    "CONTROL for FORWARD": (lambda f: [replace(f, kind=FrameKind.CONTROL)], "a CONTROL frame came where only FORWARD"),
    "an old generation": (lambda f: [replace(f, generation=3)], "a frame of generation 3 came, this stage is of 4"),
    "a generation to come": (lambda f: [replace(f, generation=5)], "a frame of generation 5 came, this stage is of 4"),
    "another type": (lambda f: [with_values(f, Tensor.double)], "has type torch.float64"),
    "another shape": (lambda f: [with_values(f, lambda t: t[:, :-1])], "which does not fit the stage's"),
    "no dimensions": (lambda f: [with_values(f, lambda t: t.sum())], r"and shape \(\), which does not fit"),
    "no values": (lambda f: [replace(f, tensors={})], "a FORWARD frame has the wrong values"),
    "more values": (lambda f: [replace(f, scalars={"x": 1})], r"foreign \['x'\]"),
    "the same again": (lambda f: [f, f], "microbatch 0 came again"),
    "a flood of microbatches": (
        lambda f: [replace(f, microbatch=n) for n in range(1000)],
        "76 microbatches wait here already, more than can be in flight",
    ),
}


@pytest.mark.parametrize("trick", TO_A_LEAF)
def test_a_leaf_whose_neighbour_sends(trick: str) -> None:
    frames, words = TO_A_LEAF[trick]

    async def test() -> None:
        async with victim(1) as leaf:
            connection = await leaf.begin()
            with contextlib.suppress(PeerError):
                for frame in frames(forward(leaf)):
                    await connection.send(frame)
            # Where the end of a stream meets a write, gRPC says no more than that it ended.
            gist = "Internal error from Core|" if trick == "a flood of microbatches" else ""
            await is_told(
                connection, f"{gist}mallory broke the protocol: .*{words}", PeerError if gist else RefusedError
            )
            said = await leaf.failure()
            assert said.startswith("mallory broke the protocol: ")
            # It may not come again on this link either, and is told the same.
            again = await leaf.dial()
            await is_told(again, f"mallory broke the protocol: .*{words}")
            report, _ = leaf.hosted.report()
            assert (report.forwards, report.updates) == (0, 0)

    run(test())


def marked(**marks: Any) -> Callable[[Frame], Frame]:
    return lambda frame: replace(frame, marks=replace(frame.marks, **marks))


@pytest.mark.parametrize("feed_first", [True, False], ids=["after its feed", "before its feed"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: with_values(f, lambda t: t[:-1]), r"\(7, .*\), whose dimension 0 \(s\d+\) is 8 in this microbatch"),
        (marked(samples=SAMPLES + 1), "have samples 9, but its feed has 8"),
        (marked(checkpoint=7), "have checkpoint 7, but its feed has 0"),
        (marked(train=False), "have train False, but its feed has True"),
    ],
    ids=["another batch", "another number of samples", "a checkpoint that nobody asked for", "for evaluation"],
)
def test_a_leaf_whose_neighbour_sends_another_microbatch_than_was_fed(
    change: Any, words: str, feed_first: bool
) -> None:
    async def test() -> None:
        async with victim(1) as leaf:
            connection = await leaf.begin()
            if feed_first:
                leaf.hosted.take_feed(fed(leaf))
            await connection.send(change(forward(leaf)))
            if not feed_first:
                while all(half.what != "feed" for half in leaf.hosted.generation.worker.activity().missing):
                    await asyncio.sleep(0.01)
                # The coordinator is not to blame: this raises nothing.
                leaf.hosted.take_feed(fed(leaf))
            await is_told(connection, f"mallory broke the protocol: .*{words}")
            await leaf.failure()
            report, _ = leaf.hosted.report()
            assert (report.forwards, report.updates) == (0, 0)

    run(test())


TO_A_ROOT: dict[str, tuple[Any, str]] = {
    "FORWARD for BACKWARD": (lambda f: replace(f, kind=FrameKind.FORWARD), "a FORWARD frame came where only BACKWARD"),
    "gradients that nobody waits for": (
        lambda f: f,
        "gradients of microbatch 7 arrived, but this stage does not wait for any",
    ),
    "gradients of another type": (lambda f: with_values(f, Tensor.half), "has type torch.float16"),
    "gradients of another shape": (lambda f: with_values(f, lambda t: t[:, :-1]), "which does not fit the stage's"),
    "gradients of an old generation": (lambda f: replace(f, generation=1), "a frame of generation 1 came"),
}


@pytest.mark.parametrize("trick", TO_A_ROOT)
def test_a_root_whose_neighbour_sends(trick: str) -> None:
    change, words = TO_A_ROOT[trick]

    async def test() -> None:
        async with victim(0) as root:
            connection = await root.begin()
            gradients = values(tuple(v for v in root.graph.sends if v.needs_grad))
            frame = Frame(FrameKind.BACKWARD, 7, marks=Marks(samples=SAMPLES), generation=GENERATION, tensors=gradients)
            await connection.send(change(frame))
            await is_told(connection, f"mallory broke the protocol: .*{words}")
            assert (await root.failure()).startswith("mallory broke the protocol: ")
            report, _ = root.hosted.report()
            assert report.updates == 0

    run(test())


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([Frame(FrameKind.ACK, 3)], "mallory confirms 3 frames, 0 to 0 are possible; the link is given up"),
        ([Frame(FrameKind.RESUME, 0)], "mallory sent its count twice over one connection; the link is given up"),
        ([Frame(FrameKind.ACK, 0, scalars={"x": 1})], "mallory sent a ACK frame that carries values"),
    ],
    ids=["a confirmation of nothing", "its count in the middle", "a confirmation with values"],
)
def test_a_stage_whose_neighbour_abuses_the_counts(frames: list[Frame], words: str) -> None:
    async def test() -> None:
        async with victim(1) as leaf:
            connection = await leaf.begin()
            for frame in frames:
                await connection.send(frame)
            await is_told(connection, words)
            assert words in await leaf.failure()

    run(test())


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice, and goes on"])
def test_a_stage_whose_neighbour_ends_the_link(again: bool) -> None:
    async def test() -> None:
        async with victim(1) as leaf:
            connection = await leaf.begin()
            await connection.send(Frame(FrameKind.END, 0))
            with contextlib.suppress(PeerError):
                for frame in (Frame(FrameKind.END, 0), forward(leaf)) if again else ():
                    await connection.send(frame)
            # Not silence: the coordinator is told that the stage cannot go on.
            assert await leaf.failure() == "mallory ended the link"
            report, _ = leaf.hosted.report()
            assert report.forwards == 0
            connection.abort()

    run(test())


def test_an_honest_neighbour_goes_on_beside_a_stranger_who_tries_everything() -> None:
    async def test() -> None:
        async with victim(1) as leaf:
            # The node of this name is honest in this test.
            link = ResumableLink("victim")
            dialling = asyncio.create_task(link.keep_dialling(leaf.dial))
            for microbatch in range(10):
                with pytest.raises(RefusedError, match="other may not call Link: mallory may"):
                    await leaf.dial("other")
                # Neither may a neighbour speak on a link that it was not given.
                stray = await leaf.dial("mallory", f"d{microbatch}-7")
                await is_told(stray, f"there is no link 'd{microbatch}-7' with mallory here")
                await link.send(forward(leaf, microbatch))
                leaf.hosted.take_feed(fed(leaf, microbatch))
                gradients = await link.receive()
                assert gradients is not None
                assert (gradients.kind, gradients.microbatch) == (FrameKind.BACKWARD, microbatch)
            assert link.connections == 1 and not leaf.hosted.generation.failure.done()
            link.fail(PeerError("the test is over"))
            with contextlib.suppress(PeerError):
                await dialling

    run(test())

"""A node that has joined asks for what is another's, or says what is not its to say.

It is refused or dropped with a sentence, and the others go on.
"""

import gc
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
import torch

from ravnest.coordinator.checkpoints.part_check import StagePart
from ravnest.coordinator.checkpoints.saver import Mark, Saver
from ravnest.coordinator.checkpoints.store import CheckpointStore, newest_good
from ravnest.coordinator.coordinator import Coordinator
from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.deploy.recovery import Recovery
from ravnest.coordinator.feed.cluster_state import Clusters
from ravnest.coordinator.feed.evaluation import Evaluation
from ravnest.coordinator.feed.ledger import DataPosition, Ledger
from ravnest.coordinator.report.progress import Progress
from ravnest.coordinator.run.checkpointer import Checkpointer
from ravnest.coordinator.run.dispatcher import Dispatcher
from ravnest.coordinator.swarm.changes import Changes
from ravnest.errors import PeerError, RefusedError
from ravnest.graph.portable import PortableGraph, WeightSpec
from ravnest.graph.weights import stream_tensors
from ravnest.microbatch import Marks
from ravnest.monitor.display import QuietDisplay
from ravnest.monitor.events import Event, EventLog
from ravnest.monitor.metrics import MetricLog
from ravnest.monitor.run_directory import RunDirectory
from ravnest.net.frames.encoding import encode
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.rpc.client import dial_link
from ravnest.net.rpc.server import ProviderServer
from ravnest.net.streams.frame_stream import CONTROL_BYTES, Link
from ravnest.net.v1.control_pb2 import Chunk, CoordinatorMessage, Deploy, ProviderMessage, UploadHeader
from ravnest.provider.links.upload import upload
from ravnest.settings import Checkpoint
from tests.builders import cluster_plan, stage_plan
from tests.swarms.in_process import A_PICKLE, Joined, LocalSwarm, attacked, raw_stream, refusal, run

MANY = 200_000
MEMORY_BYTES = 150 << 20


def control_frame(data: bytes) -> bytes:
    return encode(
        Frame(FrameKind.CONTROL, 0, tensors={"message": torch.frombuffer(bytearray(data), dtype=torch.uint8)})
    )


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


@contextmanager
def a_run(swarm: LocalSwarm, folder: Path) -> Iterator[tuple[Coordinator, EventLog]]:
    """A real run that listens to the swarm, and its events."""
    with RunDirectory.open(folder / "run", job_name="job", resume=False) as directory:
        events, metrics = EventLog(directory.events_path), MetricLog(directory.metrics_path)
        progress = Progress("job", 1, Ledger())
        coordinator = Coordinator(swarm.swarm, directory, events, metrics, progress, QuietDisplay())
        swarm.swarm.events = coordinator
        yield coordinator, events
        events.close()
        metrics.close()


def trains(coordinator: Coordinator, swarm: LocalSwarm, folder: Path, *nodes: str) -> Saver:
    """Makes these nodes hold the stages of the run's cluster, a parameter each; what saves its checkpoints."""
    specs = [WeightSpec("w", f"layer{n}", torch.float32, (3,)) for n in range(len(nodes))]
    graphs = [PortableGraph((), parameters=(spec,)) for spec in specs]
    stages = tuple(
        stage_plan(node, n, graph, parameters=3) for n, (node, graph) in enumerate(zip(nodes, graphs, strict=True))
    )
    cluster = cluster_plan(stages)
    parts = {n: StagePart.of(n, graph) for n, graph in enumerate(graphs)}
    saver = Saver(CheckpointStore(folder, 1), Checkpoint(), parts, {})
    ledger, course = coordinator.progress.ledger, coordinator._course
    clusters = Clusters([cluster])
    formation = SimpleNamespace(
        id="d1",
        clusters=clusters,
        stage_of={stage.node: stage.stage for stage in stages},
        feeding=Dispatcher(course, swarm.swarm, clusters, ledger, coordinator._recorder, coordinator.progress),
        checkpointing=Checkpointer(course, swarm.swarm, lambda _: saver, clusters.all[0], "d1", ledger),
        averaging=None,
        holders=SimpleNamespace(remove=lambda node_id: None),
        close=lambda: None,
    )
    coordinator._formation = cast(Deployment, formation)
    coordinator._recovery = cast(Recovery, Losses())
    return saver


class Losses:
    """Hears which stages nobody holds any more, and why."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def stage_lost(self, node_id: str, reason: str, last_well: float, *, failed: bool = False) -> None:
        self.heard.append((node_id, reason))


async def the_event(events: EventLog, kind: str) -> Event:
    """The event of this kind, once it is there."""
    changes = Changes()
    unsubscribe = events.subscribe(lambda _: changes.notify())
    await changes.until(lambda: any(event["kind"] == kind for event in events.recent))
    unsubscribe()
    (found,) = (event for event in events.recent if event["kind"] == kind)
    return found


def test_fetching_the_artifact_of_another_stage() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            anna, mallory = await swarm.join("anna"), await swarm.join("mallory")
            await swarm.deploy(anna.id, 0, 2, graph=b"the graph of anna", weights=b"the weights of anna")
            await swarm.deploy(mallory.id, 1, 2, graph=b"the graph of mallory")
            wanted = ["graph-0", "weights-0", "weights-1", "../identity/authority.pem", "/etc/passwd", "\x1b[2J"]
            for name in wanted:
                with pytest.raises(PeerError, match="there is no artifact") as refused:
                    async for _ in mallory.client.fetch(name):
                        pass
                assert str(refused.value).isprintable()
            for offset in (21, 10**6, 2**63):
                with pytest.raises(RefusedError, match=f"'graph-1' has 20 bytes and no byte {offset}"):
                    await anext(mallory.client.fetch("graph-1", offset))
            assert [chunk async for chunk in anna.client.fetch("graph-0")] == [b"the graph of anna"]
            await swarm.still_works(anna)

    run(test())


def test_fetching_without_having_a_stage() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            anna, mallory = await swarm.join("anna"), await swarm.join("mallory")
            await swarm.deploy(anna.id, 0, 1, graph=b"the graph of anna")
            with pytest.raises(PeerError, match="there is no artifact 'graph-0' for mallory here"):
                async for _ in mallory.client.fetch("graph-0"):
                    pass

    run(test())


@pytest.mark.parametrize(
    "name", ["checkpoint-1", "checkpoint-../../x", "x", "checkpoint-" + "9" * 5000, "checkpoint-٣"]
)
def test_uploading_without_having_a_stage(tmp_path: Path, name: str) -> None:
    async def test() -> None:
        async with attacked() as swarm:
            mallory = await swarm.join("mallory")
            with a_run(swarm, tmp_path) as (coordinator, _):
                with pytest.raises(PeerError, match="mallory may not upload"):
                    await mallory.client.upload(name, pieces(A_PICKLE))
                await coordinator.close()
            assert not list((tmp_path / "run/checkpoints").iterdir())

    run(test())


def test_uploading_while_no_run_is_there_is_not_tried_again() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            mallory = await swarm.join("mallory")
            swarm.swarm.events = None
            with pytest.raises(RefusedError, match="there is no run to upload to"):
                await upload(mallory.client, "checkpoint-1", lambda: pieces(b"x"))

    run(test())


def test_what_may_not_be_uploaded_is_not_tried_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with attacked() as swarm:
            mallory = await swarm.join("mallory")
            with a_run(swarm, tmp_path) as (coordinator, _):
                with pytest.raises(RefusedError, match="mallory may not upload 'checkpoint-1'"):
                    await upload(mallory.client, "checkpoint-1", lambda: pieces(b"x"))
                await coordinator.close()

    run(test())


def a_part(*keys: str) -> bytes:
    metadata = {"version": "1", "optimizer": '{"values": {}, "groups": []}', "schedule": "null"}
    return b"".join(stream_tensors({f"param:{key}": torch.ones(3) for key in keys}, metadata))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ([a_part("layer0", "layer1")], "holds 'param:layer1', which is not that stage's"),
        ([a_part("layer1")], "lacks 'param:layer0'"),
        ([A_PICKLE], "cannot be used"),
        ([bytes(1 << 20)] * 70, "has more than the 67109056 bytes its state can need"),
    ],
    ids=["another's parameter too", "another's parameter", "pickle", "no end"],
)
def test_uploading_a_part_of_a_checkpoint_that_is_not_ones_own(tmp_path: Path, part: list[bytes], words: str) -> None:
    async def test() -> None:
        async with attacked() as swarm:
            mallory, anna = await swarm.join("mallory"), await swarm.join("anna")
            with a_run(swarm, tmp_path) as (coordinator, events):
                folder = tmp_path / "run/checkpoints"
                saver = trains(coordinator, swarm, folder, "mallory", "anna")
                saver.begin(Mark(1, DataPosition(), {}))
                await anna.client.upload("checkpoint-1", pieces(a_part("layer1")))
                with pytest.raises(PeerError):
                    await mallory.client.upload("checkpoint-1", pieces(*part))
                refused = await the_event(events, "upload_refused")
                assert refused["provider"] == "mallory" and words in str(refused["reason"])
                with pytest.raises(RefusedError, match=words):
                    await mallory.feed.receive()
                lost = await the_event(events, "lost")
                assert lost["provider"] == "mallory" and words in str(lost["reason"])
                # Nothing counts, somebody else is to take the stage for that reason, and the other is still there.
                assert newest_good(folder) == (None, []) and swarm.connected() == ["anna"]
                [(node_id, reason)] = cast(Losses, coordinator._recovery).heard
                assert node_id == "mallory" and "mallory, which held stage 0, is gone: mallory uploaded a bad" in reason
                await coordinator.check()
                await coordinator.close()

    run(test())


def test_uploading_pieces_that_do_not_fit_together() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            mallory, anna = await swarm.join("mallory"), await swarm.join("anna")
            for chunks, words in (
                ([Chunk(data=b"x")], "does not begin with its name"),
                ([Chunk(header=UploadHeader(name="a")), Chunk(data=b"x", offset=7)], "goes on at byte 7, not 0"),
            ):
                call = await raw_stream(swarm, mallory, "Upload")
                for chunk in chunks:
                    await call.write(chunk.SerializeToString())
                assert words in await refusal(call)
                call.cancel()
            await swarm.still_works(anna)

    run(test())


@pytest.mark.parametrize(
    ("stage", "kind", "words"),
    [
        (1, FrameKind.DONE, "sent a DONE frame, which is not for stage 1 of 3"),
        (2, FrameKind.DONE, "sent a DONE frame, which is not for stage 2 of 3"),
        (0, FrameKind.RESULT, "sent a RESULT frame, which is not for stage 0 of 3"),
        (1, FrameKind.FORWARD, "sent a FORWARD frame"),
        (1, FrameKind.FEED, "sent a FEED frame"),
    ],
)
def test_ending_a_microbatch_or_giving_a_result_that_is_another_stages(stage: int, kind: FrameKind, words: str) -> None:
    async def test() -> None:
        async with attacked() as swarm:
            anna, mallory = await swarm.join("anna"), await swarm.join("mallory")
            await swarm.deploy(mallory.id, stage, 3)
            await mallory.feed.send(Frame(kind, 1, generation=1))
            await swarm.until(lambda: bool(swarm.told.gone))
            assert swarm.told.gone[0][0] == "mallory" and words in swarm.told.gone[0][1]
            with pytest.raises(RefusedError, match=words):
                await mallory.feed.receive()
            assert swarm.told.frames == []
            await swarm.still_works(anna)

    run(test())


def test_ending_a_microbatch_that_is_not_under_way(tmp_path: Path) -> None:
    async def test() -> None:
        async with attacked() as swarm:
            mallory, anna = await swarm.join("mallory"), await swarm.join("anna")
            with a_run(swarm, tmp_path) as (coordinator, events):
                trains(coordinator, swarm, tmp_path / "run/checkpoints", "mallory")
                await swarm.swarm.tell(mallory.id, an_order(0, 1))
                await mallory.feed.send(Frame(FrameKind.DONE, 999))
                with pytest.raises(PeerError, match="mallory reported microbatch 999 done, which was not under way"):
                    await mallory.feed.receive()
                lost = await the_event(events, "lost")
                assert lost["provider"] == "mallory" and "was not under way" in str(lost["reason"])
                assert coordinator.progress.ledger.completed == 0
                assert swarm.connected() == ["anna"]
                await coordinator.close()
            assert anna.control.link.error is None

    run(test())


def test_a_result_of_measures_that_nobody_asked_for(tmp_path: Path) -> None:
    async def test() -> None:
        async with attacked() as swarm:
            mallory = await swarm.join("mallory")
            with a_run(swarm, tmp_path) as (coordinator, _):
                trains(coordinator, swarm, tmp_path / "run/checkpoints", "mallory")
                coordinator._items.evaluation, coordinator._items.scores = Evaluation(), {"loss"}
                coordinator._items.evaluation.sent(-1, 8)
                await swarm.swarm.tell(mallory.id, an_order(0, 1))
                # Named like a field of every event, it would have broken the event that tells of the evaluation.
                await mallory.feed.send(
                    Frame(FrameKind.RESULT, -1, marks=Marks(train=False), scalars={"loss": 1.0, "kind": 1.0})
                )
                with pytest.raises(PeerError, match=r"mallory sent a result of other measures than \['loss'\]"):
                    await mallory.feed.receive()
                assert coordinator._items.evaluation.outstanding == 1
                await coordinator.close()

    run(test())


def an_order(stage: int, stages: int) -> CoordinatorMessage:
    return CoordinatorMessage(deploy=Deploy(deployment="d1", stage=stage, stages=stages))


def test_failing_a_run_that_one_has_no_part_in(tmp_path: Path) -> None:
    async def test() -> None:
        async with attacked() as swarm:
            mallory = await swarm.join("mallory")
            with a_run(swarm, tmp_path) as (coordinator, events):
                trains(coordinator, swarm, tmp_path / "run/checkpoints", "anna")
                name = "d1"
                await mallory.control.send(ProviderMessage(failed={"deployment": name, "kind": "not_finite"}))
                await mallory.control.send(ProviderMessage(report={"deployment": name, "updates": 9}))
                await mallory.control.send(ProviderMessage(leaving={"reason": "\x1b[2J" + "x" * 100_000}))
                await mallory.control.link.close()
                lost = await the_event(events, "lost")
                reason = str(lost["reason"])
                assert reason.startswith("it left:") and reason.isprintable() and len(reason) <= 2000
                assert [event["kind"] for event in events.recent] == ["lost"]
                await coordinator.check()
                await coordinator.close()

    run(test())


FRAME = encode(Frame(FrameKind.DONE, 1, generation=1))


@pytest.mark.parametrize(
    ("method", "message", "words"),
    [
        ("Feed", A_PICKLE, "mallory sent a bad frame: a message begins with"),
        ("Feed", FRAME[:-1], "mallory sent a bad frame: a frame is cut short"),
        ("Feed", FRAME[:40], "mallory sent a bad frame: a frame is cut short"),
        ("Feed", b"RVN\x01" + b"\xff" * 60, "mallory sent a bad frame: the header of a frame has 4294967295 bytes"),
        ("Feed", FRAME + b"x" * 64, "mallory sent a bad frame"),
        ("Control", A_PICKLE, "mallory sent a bad frame: a message begins with"),
        ("Control", control_frame(b"\xff" * 100), "mallory sent a bad message"),
        ("Control", control_frame(A_PICKLE), "mallory sent a bad message"),
        ("Control", control_frame(bytes(CONTROL_BYTES + 1)), "a bad message: 16777217 bytes are more than 16777216"),
        ("Control", FRAME, "mallory sent a bad message: a DONE frame is none"),
        ("Control", encode(Frame(FrameKind.CONTROL, 0)), "mallory sent a bad message: a CONTROL frame is none"),
        ("Fetch", A_PICKLE, "mallory sent a bad message|names no artifact|there is no artifact"),
        ("Upload", A_PICKLE, "mallory sent a bad message|does not begin with its name"),
    ],
    ids=[
        *("pickle for a frame", "truncated", "truncated in the header", "endless header", "something behind a frame"),
        *("pickle for a control frame", "noise for a message", "pickle for a message", "oversized message"),
        *("frame for a message", "no message", "pickle to fetch", "pickle to upload"),
    ],
)
def test_garbage_on_a_stream(method: str, message: bytes, words: str) -> None:

    async def test() -> None:
        async with attacked() as swarm:
            anna, mallory = await swarm.join("anna"), await swarm.join("mallory")
            await swarm.deploy(mallory.id, 0, 1)
            call = await raw_stream(swarm, mallory, method)
            await call.write(message)
            said = await refusal(call)
            assert re.search(words, said), said
            call.cancel()
            if method in ("Feed", "Control"):
                assert re.search(words, await swarm.dropped("mallory"))
            await swarm.still_works(anna)

    run(test())


def test_a_flood_of_tiny_frames() -> None:
    """200,000 of them, which take a few seconds; see test_abusing_links for a flood that nobody takes."""

    async def test() -> None:
        async with attacked() as swarm:
            anna, mallory = await swarm.join("anna"), await swarm.join("mallory")
            await swarm.deploy(mallory.id, 0, 1)
            gc.collect()
            before = psutil.Process().memory_info().rss
            frames = b"".join(encode(Frame(FrameKind.DONE, number)) for number in range(1000))
            call = await raw_stream(swarm, mallory, "Feed")
            # All of an old generation, so that each is looked at and passed over.
            for _ in range(MANY // 1000):
                await call.write(frames)
            await swarm.still_works(anna)
            assert psutil.Process().memory_info().rss - before < MEMORY_BYTES
            call.cancel()

    run(test())


def test_a_stream_that_stays_open_and_says_nothing_holds_nobody_up() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            mallory, anna = await swarm.join("mallory"), await swarm.join("anna")
            calls = [await raw_stream(swarm, mallory, "Upload") for _ in range(20)]
            for call in calls:
                await call.write(Chunk(header=UploadHeader(name="slow"), data=b"x").SerializeToString())
            await swarm.still_works(anna)
            for call in calls:
                call.cancel()

    run(test())


def test_calling_a_stage_that_is_not_ones_neighbour() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            nodes: list[Joined] = [await swarm.join(name) for name in ("before", "called", "mallory")]
            before, called, mallory = (joined.node for joined in nodes)
            links: list[str] = []

            class Stage:
                async def link(self, peer: str, link: Link) -> None:
                    links.append(peer)
                    await link.receive()

            server = ProviderServer(Stage(), called)
            port = await server.start("127.0.0.1", 0)
            try:
                address = f"127.0.0.1:{port}"
                with pytest.raises(RefusedError, match="mallory may not call Link: nobody may"):
                    await dial_link(address, called.node_id, mallory)
                server.neighbours = {before.node_id}
                with pytest.raises(RefusedError, match="mallory may not call Link: before may, as the stages next"):
                    await dial_link(address, called.node_id, mallory)
                assert links == []
                good = await dial_link(address, called.node_id, before)
                await good.close()
                assert links == ["before"]
                # And nobody is fooled by who answers: mallory's address in the place of another's.
                with pytest.raises(PeerError, match="is another node of this swarm than the one expected there"):
                    await dial_link(address, mallory.node_id, before)
            finally:
                await server.stop(grace_seconds=0)

    run(test())

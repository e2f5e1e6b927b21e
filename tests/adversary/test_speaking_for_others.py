"""A node that has joined asks for what is another's, or says what is not its to say.

It is refused or dropped with a sentence, and the others go on.
"""

import asyncio
import gc
import re
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import psutil
import pytest
import torch

from ravnest.coordinator.checkpoints.reader import newest_good
from ravnest.coordinator.feed.feeder import EvalBatch, EvalEnd
from ravnest.errors import PeerError, RefusedError
from ravnest.graph.weights import stream_tensors
from ravnest.microbatch import Marks
from ravnest.net.frames.encoding import encode
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.rpc.client import dial_link
from ravnest.net.rpc.server import ProviderServer
from ravnest.net.streams.frame_stream import Link
from ravnest.net.streams.messages import CONTROL_BYTES
from ravnest.net.v1.control_pb2 import Chunk, ProviderMessage, UploadHeader
from ravnest.provider.links.upload import upload
from tests.adversary.deployed_run import a_run, prepared
from tests.swarms.in_process import A_PICKLE, Joined, attacked, raw_stream, refusal, run

MANY = 200_000
MEMORY_BYTES = 150 << 20


def control_frame(data: bytes) -> bytes:
    return encode(
        Frame(FrameKind.CONTROL, 0, tensors={"message": torch.frombuffer(bytearray(data), dtype=torch.uint8)})
    )


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


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
            async with a_run(swarm, tmp_path):
                with pytest.raises(PeerError, match="mallory may not upload"):
                    await mallory.client.upload(name, pieces(A_PICKLE))
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
            async with a_run(swarm, tmp_path):
                with pytest.raises(RefusedError, match="mallory may not upload 'checkpoint-1'"):
                    await upload(mallory.client, "checkpoint-1", lambda: pieces(b"x"))

    run(test())


def a_part(parameters: Mapping[str, tuple[int, ...]]) -> bytes:
    """The state of a stage with these parameters."""
    metadata = {"version": "1", "optimizer": '{"values": {}, "groups": []}', "schedule": "null"}
    tensors = {f"param:{key}": torch.ones(shape) for key, shape in parameters.items()}
    return b"".join(stream_tensors(tensors, metadata))


Parameters = dict[str, tuple[int, ...]]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (lambda own, others: [a_part(own | others)], "which is not that stage's"),
        (lambda own, others: [a_part(others)], "lacks 'param:"),
        (lambda own, others: [A_PICKLE], "cannot be used"),
        (lambda own, others: [bytes(1 << 20)] * 70, "bytes its state can need"),
    ],
    ids=["another's parameter too", "another's parameter", "pickle", "no end"],
)
def test_uploading_a_part_of_a_checkpoint_that_is_not_ones_own(
    tmp_path: Path, part: Callable[[Parameters, Parameters], list[bytes]], words: str
) -> None:
    async def test() -> None:
        async with attacked() as swarm:
            mallory, anna = await swarm.join("mallory"), await swarm.join("anna")
            async with a_run(swarm, tmp_path) as trained:
                await trained.deploy([mallory, anna])
                own, others = await trained.parameters_of(mallory), await trained.parameters_of(anna)
                await trained.begin_to_save(2)
                name = f"checkpoint-{trained.saving['anna']}"
                await anna.client.upload(name, pieces(a_part(others)))
                with pytest.raises(PeerError):
                    await mallory.client.upload(name, pieces(*part(own, others)))
                refused = await trained.event("upload_refused")
                assert refused["provider"] == "mallory" and words in str(refused["reason"])
                with pytest.raises(RefusedError, match=words):
                    await mallory.feed.receive()
                lost = await trained.event("lost")
                assert lost["provider"] == "mallory" and words in str(lost["reason"])
                # Nothing of the checkpoint counts, and the other provider is still there.
                assert newest_good(tmp_path / "run/checkpoints") == (None, []) and swarm.connected() == ["anna"]
                await trained.coordinator.check()

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
            mallory = await swarm.join("mallory")
            async with a_run(swarm, tmp_path) as trained:
                await trained.deploy([mallory])
                anna = await swarm.join("anna")
                await mallory.feed.send(Frame(FrameKind.DONE, 999, generation=trained.orders["mallory"].generation))
                with pytest.raises(PeerError, match="mallory reported microbatch 999 done, which was not in flight"):
                    await mallory.feed.receive()
                lost = await trained.event("lost")
                assert lost["provider"] == "mallory" and "was not in flight" in str(lost["reason"])
                assert trained.coordinator.progress.ledger.completed == 0
                assert swarm.connected() == ["anna"]
            assert anna.control.link.error is None

    run(test())


def test_a_result_of_measures_that_nobody_asked_for(tmp_path: Path) -> None:
    async def test() -> None:
        async with attacked() as swarm:
            mallory = await swarm.join("mallory")
            async with a_run(swarm, tmp_path) as trained:
                await trained.deploy([mallory])
                await trained.coordinator.take(EvalBatch(-1, prepared().captured.sample, 8))
                evaluating = asyncio.create_task(trained.coordinator.take(EvalEnd()))
                # Named like a field of every event, it would have broken the event that tells of the evaluation.
                scores, generation = {"loss": 1.0, "kind": 1.0}, trained.orders["mallory"].generation
                await mallory.feed.send(
                    Frame(FrameKind.RESULT, -1, generation=generation, marks=Marks(train=False), scalars=scores)
                )
                with pytest.raises(PeerError, match=r"mallory sent other scores than \['loss'\]"):
                    while await mallory.feed.receive() is not None:
                        pass
                lost = await trained.event("lost")
                assert lost["provider"] == "mallory"
                assert not evaluating.done() and "evaluated" not in [event["kind"] for event in trained.events.heard]
                evaluating.cancel()

    run(test())


def test_failing_a_run_that_one_has_no_part_in(tmp_path: Path) -> None:
    async def test() -> None:
        async with attacked() as swarm:
            anna = await swarm.join("anna")
            async with a_run(swarm, tmp_path) as trained:
                await trained.deploy([anna])
                mallory = await swarm.join("mallory")
                before = len(trained.events.heard)
                name = trained.orders["anna"].deployment
                await mallory.control.send(ProviderMessage(failed={"deployment": name, "kind": "not_finite"}))
                await mallory.control.send(ProviderMessage(report={"deployment": name, "updates": 9}))
                await mallory.control.send(ProviderMessage(leaving={"reason": "\x1b[2J" + "x" * 100_000}))
                await mallory.control.link.close()
                lost = await trained.event("lost")
                reason = str(lost["reason"])
                assert lost["provider"] == "mallory"
                assert reason.startswith("it left:") and reason.isprintable() and len(reason) <= 2000
                # Its own joining, and a link for replicas to it, may be told late on a busy machine.
                heard = trained.events.heard[before:]
                late = [e for e in heard if e["kind"] in ("joined", "linked") and "mallory" in str(e["reason"])]
                kinds = [event["kind"] for event in heard if event not in late]
                assert set(kinds) <= {"standby", "lost"}, "nothing came of what it said"
                await trained.coordinator.check()

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
        ("Control", FRAME, "mallory sent a bad message: a DONE frame without a control message"),
        (
            "Control",
            encode(Frame(FrameKind.CONTROL, 0)),
            "mallory sent a bad message: a CONTROL frame without a control message",
        ),
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
                with pytest.raises(RefusedError, match="mallory may not call Link: no node may"):
                    await dial_link(address, called.node_id, mallory)
                server.neighbours = {before.node_id}
                with pytest.raises(RefusedError, match="mallory may not call Link: before may, as neighbours of"):
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

"""What a stage puts out on its own thread arrives on the network's loop, as frames and in order."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest
import torch

from ravnest.engine.messages import LossRecord, Message
from ravnest.engine.stage import Update
from ravnest.errors import PeerError, RefusedError
from ravnest.graph.weights import WeightsReader
from ravnest.microbatch import Marks
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.provider.stage import outbox as outbox_module
from ravnest.provider.stage.outbox import FrameOutbox, message_of


def on_a_loop(test: Callable[[FrameOutbox], Awaitable[None]], record_updates: bool = True) -> list[bytes]:
    """Runs `test` with an outbox; what was uploaded."""
    uploaded: list[bytes] = []

    async def upload(name: str, chunks: Callable[[], AsyncIterator[bytes]]) -> None:
        if name == "checkpoint-13":
            raise PeerError("the coordinator is gone")
        if name == "checkpoint-14":
            raise RefusedError("nobody has asked for it")
        if name == "checkpoint-15":
            await asyncio.Event().wait()
        uploaded.append(b"".join([chunk async for chunk in chunks()]))

    async def run() -> None:
        await test(FrameOutbox(7, upload, record_updates))

    asyncio.run(run())
    return uploaded


def a_message(number: int = 3) -> Message:
    return Message(number, {"hidden": torch.ones(2), "size": 4}, marks=Marks(samples=2, checkpoint=5, flush=True))


def test_each_kind_goes_its_own_way_and_keeps_its_order() -> None:
    async def test(outbox: FrameOutbox) -> None:
        def work() -> None:
            for number in range(3):
                outbox.forward(a_message(number))
            outbox.backward(a_message())
            outbox.done(a_message())
            outbox.evaluated(a_message())

        await asyncio.to_thread(work)
        frames = [(await outbox.to_next.get()).frame for _ in range(3)]
        assert [frame.microbatch for frame in frames] == [0, 1, 2]
        assert {frame.kind for frame in frames} == {FrameKind.FORWARD}
        assert (await outbox.to_previous.get()).frame.kind is FrameKind.BACKWARD
        assert [(await outbox.to_coordinator.get()).frame.kind for _ in range(2)] == [FrameKind.DONE, FrameKind.RESULT]

    on_a_loop(test)


def test_a_message_is_the_same_at_the_other_end() -> None:
    async def test(outbox: FrameOutbox) -> None:
        await asyncio.to_thread(outbox.forward, a_message())
        frame: Frame = (await outbox.to_next.get()).frame
        assert frame.generation == 7
        found, sent = message_of(frame), a_message()
        assert torch.equal(found.values["hidden"], sent.values["hidden"])
        assert found.values["size"] == 4
        assert (found.microbatch, found.marks) == (sent.microbatch, sent.marks)

    on_a_loop(test)


def test_saving_returns_when_the_state_has_been_taken() -> None:
    async def test(outbox: FrameOutbox) -> None:
        await asyncio.to_thread(outbox.save, 12, {"param:weight": torch.arange(3.0)}, {"version": "4"})
        await asyncio.wait_for(outbox.news.wait(), 10)
        assert outbox.take_records()[2] == [12]
        assert not outbox.news.is_set()

    [data] = on_a_loop(test)
    reader = WeightsReader(len(data))
    reader.feed(data)
    tensors, metadata = reader.finish()
    assert tensors["param:weight"].tolist() == [0.0, 1.0, 2.0] and metadata["version"] == "4"


def test_a_checkpoint_taken_with_a_microbatch_has_what_lies_beside_the_stage_and_one_that_brings_it_is_left_alone() -> (
    None
):
    async def test(outbox: FrameOutbox) -> None:
        outbox.beside = lambda: {"outer:weight": torch.full((3,), 7.0)}
        await asyncio.to_thread(outbox.save, 1, {"param:weight": torch.arange(3.0)}, {})
        brought = {"param:weight": torch.arange(3.0), "outer:weight": torch.full((3,), 8.0)}
        await asyncio.to_thread(outbox.save, 2, brought, {})

    found = []
    for data in on_a_loop(test):
        reader = WeightsReader(len(data))
        reader.feed(data)
        tensors, _ = reader.finish()
        assert tensors["param:weight"].tolist() == [0.0, 1.0, 2.0]
        found.append(tensors["outer:weight"].tolist())
    assert found == [[7.0] * 3, [8.0] * 3]


def test_a_state_that_nobody_took_is_the_workers_problem() -> None:
    async def test(outbox: FrameOutbox) -> None:
        with pytest.raises(PeerError, match="the coordinator is gone"):
            await asyncio.to_thread(outbox.save, 13, {"param:weight": torch.ones(1)}, {})
        assert outbox.take_records()[2] == []

    on_a_loop(test)


@pytest.mark.parametrize("checkpoint", [14, 15], ids=["refused", "under way"])
def test_a_checkpoint_of_a_coordinator_that_is_gone_is_nobodys_problem(checkpoint: int) -> None:
    async def test(outbox: FrameOutbox) -> None:
        saving = asyncio.create_task(asyncio.to_thread(outbox.save, checkpoint, {"param:weight": torch.ones(1)}, {}))
        await asyncio.sleep(0.1)
        assert not saving.done()
        outbox.save_no_more()
        await asyncio.wait_for(saving, 10)
        # Nor is any other that it had wanted.
        await asyncio.wait_for(asyncio.to_thread(outbox.save, 16, {"param:weight": torch.ones(1)}, {}), 10)
        assert outbox.take_records()[2] == []

    assert on_a_loop(test) == []


def test_a_checkpoint_that_is_refused_while_the_coordinator_stays_is_the_workers_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox_module, "_ANOTHER_SECONDS", 0.1)

    async def test(outbox: FrameOutbox) -> None:
        with pytest.raises(RefusedError, match="nobody has asked for it"):
            await asyncio.to_thread(outbox.save, 14, {"param:weight": torch.ones(1)}, {})

    on_a_loop(test)


def test_where_there_is_room_for_a_copy_the_stage_goes_on_and_what_it_was_is_uploaded() -> None:
    async def test(outbox: FrameOutbox) -> None:
        asked: list[int] = []
        outbox.has_room = lambda size_bytes: asked.append(size_bytes) or True  # type: ignore[func-returns-value]
        weight = torch.arange(3.0)
        # It returns though nothing is taken while the loop is busy here, and the stage learns on.
        outbox.save(12, {"param:weight": weight}, {"version": "4"})
        weight.add_(100.0)
        assert asked == [12] and outbox.take_records()[2] == []
        async with asyncio.timeout(10):
            await outbox.news.wait()
        assert outbox.take_records()[2] == [12] and outbox.transfers.told() == []

    [data] = on_a_loop(test)
    reader = WeightsReader(len(data))
    reader.feed(data)
    assert reader.finish()[0]["param:weight"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("checkpoint", [13, 14])
def test_a_copy_that_nobody_takes_fails_the_stage_as_its_own_state_does(
    checkpoint: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "_ANOTHER_SECONDS", 0.1)

    async def test(outbox: FrameOutbox) -> None:
        outbox.has_room = lambda size_bytes: True
        outbox.save(checkpoint, {"param:weight": torch.ones(1)}, {})
        async with asyncio.timeout(10):
            kind, text, _ = await outbox.failure
        assert kind == "error" and text in ("the coordinator is gone", "nobody has asked for it")
        assert outbox.take_records()[2] == []

    on_a_loop(test)


def test_a_copy_under_way_is_told_of_and_ends_with_the_stage_or_the_coordinator() -> None:
    async def test(outbox: FrameOutbox) -> None:
        outbox.has_room = lambda size_bytes: True
        for end in (outbox.save_no_more, outbox.give_up):
            outbox._nobody_saves.clear()
            outbox.save(15, {"param:weight": torch.ones(5)}, {})
            await asyncio.sleep(0.05)
            [transfer] = outbox.transfers.told()
            assert (transfer.kind, transfer.name, transfer.total_bytes) == ("checkpoint", "checkpoint-15", 20)
            end()
            await asyncio.sleep(0.05)
            assert outbox.transfers.told() == [] and not outbox.failure.done()

    assert on_a_loop(test) == []


def test_another_checkpoint_takes_the_place_of_a_copy_that_is_still_under_way() -> None:
    async def test(outbox: FrameOutbox) -> None:
        outbox.has_room = lambda size_bytes: True
        outbox.save(15, {"param:weight": torch.ones(5)}, {})
        await asyncio.sleep(0.05)
        outbox.save(16, {"param:weight": torch.ones(5)}, {})
        async with asyncio.timeout(10):
            await outbox.news.wait()
        assert outbox.take_records()[2] == [16] and not outbox.failure.done()

    assert len(on_a_loop(test)) == 1


def test_losses_are_news_and_updates_are_recorded_only_if_asked_for() -> None:
    async def test(outbox: FrameOutbox) -> None:
        def work() -> None:
            outbox.trained(LossRecord(0, 1.5, 8))
            outbox.updated(Update(0, 0, 1))

        await asyncio.to_thread(work)
        await asyncio.wait_for(outbox.news.wait(), 10)
        await asyncio.sleep(0)
        losses, updates, _ = outbox.take_records()
        assert losses == [LossRecord(0, 1.5, 8)]
        recorded.append(updates)
        assert outbox.take_records() == ([], [], [])

    recorded: list[list[Update]] = []
    on_a_loop(test, record_updates=True)
    on_a_loop(test, record_updates=False)
    assert recorded == [[Update(0, 0, 1)], []]


def test_the_first_failure_is_the_one_that_counts() -> None:
    async def test(outbox: FrameOutbox) -> None:
        def work() -> None:
            outbox.failed("not_finite", "the loss is nan", 4)
            outbox.failed("error", "and then everything else", None)

        await asyncio.to_thread(work)
        assert await outbox.failure == ("not_finite", "the loss is nan", 4)

    on_a_loop(test)


def test_gradients_say_how_long_their_microbatch_has_been_here() -> None:
    async def test(outbox: FrameOutbox) -> None:
        forward = Frame(FrameKind.FORWARD, 3, generation=7)
        outbox.came(forward)
        await asyncio.to_thread(outbox.backward, a_message(3))
        assert (await outbox.to_previous.get()).frame.residence_micros > 0
        outbox.came(replace(forward, microbatch=-1, marks=Marks(train=False)))
        await asyncio.to_thread(outbox.backward, a_message(-1))
        assert (await outbox.to_previous.get()).frame.residence_micros == 0, "an evaluation has no way back"

    on_a_loop(test)


def test_the_delay_of_a_link_is_measured_by_what_is_trained_on_alone() -> None:
    async def test(outbox: FrameOutbox) -> None:
        await asyncio.to_thread(outbox.forward, replace(a_message(-1), marks=Marks(train=False)))
        outbox.came(Frame(FrameKind.BACKWARD, -1, residence_micros=1))
        assert outbox.delay.low_seconds == 0.0
        await asyncio.to_thread(outbox.forward, a_message(3))
        outbox.came(Frame(FrameKind.BACKWARD, 3, residence_micros=1))
        assert outbox.delay.low_seconds > 0.0

    on_a_loop(test)


def test_a_part_of_a_replica_is_a_copy_and_the_stage_goes_on_at_once() -> None:
    kept: list[tuple[int, dict[str, torch.Tensor], dict[str, str]]] = []

    async def test(outbox: FrameOutbox) -> None:
        own = torch.ones(3, requires_grad=True)
        # Nobody has said what is to become of it yet.
        outbox.keep(1, {"param:w": own}, {})
        outbox.on_keep = lambda *part: kept.append(part)
        await asyncio.to_thread(outbox.keep, 2, {"param:w": own}, {"version": "7"})
        own.data.add_(1)

    on_a_loop(test)
    [(replica, tensors, metadata)] = kept
    assert (replica, metadata) == (2, {"version": "7"})
    assert tensors["param:w"].tolist() == [1, 1, 1] and not tensors["param:w"].requires_grad

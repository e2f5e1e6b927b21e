"""A stage's output, put out on its own thread, arrives on the network's loop as frames and in order."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ravnest.engine.messages import LossRecord, Message
from ravnest.engine.stage import Update
from ravnest.microbatch import Marks
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.provider.stage.failure import FirstFailure, StageFailure
from ravnest.provider.stage.outbox import FrameOutbox, StageHooks, message_of
from ravnest.provider.stage.records import StageRecords


@dataclass
class Ends:
    """An outbox, and where things come out of it."""

    outbox: FrameOutbox
    records: StageRecords
    failures: FirstFailure


def on_a_loop(
    test: Callable[[Ends], Awaitable[None]], record_updates: bool = True, hooks: StageHooks | None = None
) -> None:
    """Runs `test` with an outbox."""

    async def run() -> None:
        records, failures = StageRecords(record_updates), FirstFailure()
        uploads: Any = None
        await test(Ends(FrameOutbox(7, records, uploads, failures, hooks or StageHooks()), records, failures))

    asyncio.run(run())


def a_message(number: int = 3) -> Message:
    return Message(number, {"hidden": torch.ones(2), "size": 4}, marks=Marks(samples=2, checkpoint=5, flush=True))


def test_each_kind_goes_its_own_way_and_keeps_its_order() -> None:
    async def test(ends: Ends) -> None:
        def work() -> None:
            for number in range(3):
                ends.outbox.forward(a_message(number))
            ends.outbox.backward(a_message())
            ends.outbox.done(a_message())
            ends.outbox.evaluated(a_message())

        await asyncio.to_thread(work)
        frames = [(await ends.outbox.to_next.get()).frame for _ in range(3)]
        assert [frame.microbatch for frame in frames] == [0, 1, 2]
        assert {frame.kind for frame in frames} == {FrameKind.FORWARD}
        assert (await ends.outbox.to_previous.get()).frame.kind is FrameKind.BACKWARD
        assert [(await ends.outbox.to_coordinator.get()).frame.kind for _ in range(2)] == [
            FrameKind.DONE,
            FrameKind.RESULT,
        ]

    on_a_loop(test)


def test_a_message_is_the_same_at_the_other_end() -> None:
    async def test(ends: Ends) -> None:
        await asyncio.to_thread(ends.outbox.forward, a_message())
        frame: Frame = (await ends.outbox.to_next.get()).frame
        assert frame.generation == 7
        found, sent = message_of(frame), a_message()
        assert torch.equal(found.values["hidden"], sent.values["hidden"])
        assert found.values["size"] == 4
        assert (found.microbatch, found.marks) == (sent.microbatch, sent.marks)

    on_a_loop(test)


def test_losses_are_news_and_updates_are_recorded_only_if_asked_for() -> None:
    async def test(ends: Ends) -> None:
        def work() -> None:
            ends.outbox.trained(LossRecord(0, 1.5, 8))
            ends.outbox.updated(Update(0, 0, 1))

        await asyncio.to_thread(work)
        await asyncio.wait_for(ends.records.news.wait(), 10)
        await asyncio.sleep(0)
        losses, updates, _ = ends.records.take()
        assert losses == [LossRecord(0, 1.5, 8)]
        recorded.append(updates)
        assert ends.records.take() == ([], [], [])

    recorded: list[list[Update]] = []
    on_a_loop(test, record_updates=True)
    on_a_loop(test, record_updates=False)
    assert recorded == [[Update(0, 0, 1)], []]


def test_the_first_failure_is_the_one_that_counts() -> None:
    async def test(ends: Ends) -> None:
        def work() -> None:
            ends.outbox.failed("not_finite", "the loss is nan", 4)
            ends.outbox.failed("error", "and then everything else", None)

        await asyncio.to_thread(work)
        assert await ends.failures.future == StageFailure("not_finite", "the loss is nan", 4)

    on_a_loop(test)


def test_gradients_say_how_long_their_microbatch_has_been_here() -> None:
    async def test(ends: Ends) -> None:
        forward = Frame(FrameKind.FORWARD, 3, generation=7)
        ends.outbox.on_frame(forward)
        await asyncio.to_thread(ends.outbox.backward, a_message(3))
        assert (await ends.outbox.to_previous.get()).frame.residence_micros > 0
        ends.outbox.on_frame(replace(forward, microbatch=-1, marks=Marks(train=False)))
        await asyncio.to_thread(ends.outbox.backward, a_message(-1))
        assert (await ends.outbox.to_previous.get()).frame.residence_micros == 0, "an evaluation has no way back"

    on_a_loop(test)


def test_the_delay_of_a_link_is_measured_by_what_is_trained_on_alone() -> None:
    async def test(ends: Ends) -> None:
        await asyncio.to_thread(ends.outbox.forward, replace(a_message(-1), marks=Marks(train=False)))
        ends.outbox.on_frame(Frame(FrameKind.BACKWARD, -1, residence_micros=1))
        assert ends.outbox.delay.low_seconds == 0.0
        await asyncio.to_thread(ends.outbox.forward, a_message(3))
        ends.outbox.on_frame(Frame(FrameKind.BACKWARD, 3, residence_micros=1))
        assert ends.outbox.delay.low_seconds > 0.0

    on_a_loop(test)


def test_a_part_of_a_replica_is_recorded_from_the_stages_own_memory_before_the_stage_goes_on() -> None:
    kept: list[tuple[int, dict[str, list[float]], dict[str, str]]] = []
    own = torch.ones(3, requires_grad=True)

    def record(replica: int, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        assert tensors["param:w"].data_ptr() == own.data_ptr()
        kept.append((replica, {name: tensor.tolist() for name, tensor in tensors.items()}, metadata))

    async def test(ends: Ends) -> None:
        await asyncio.to_thread(ends.outbox.keep, 2, {"param:w": own}, {"version": "7"})
        own.data.add_(1)

    on_a_loop(test, hooks=StageHooks(on_keep=record))
    assert kept == [(2, {"param:w": [1, 1, 1]}, {"version": "7"})]

"""When a checkpoint is due, and that it counts only when every stage's part of it is there."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ravnest.coordinator.checkpoints import store as checkpoints
from ravnest.coordinator.checkpoints.disk_space import DiskRoom
from ravnest.coordinator.checkpoints.reader import newest_good
from ravnest.coordinator.checkpoints.saver import Mark, place_of
from ravnest.coordinator.feed.ledger import DataPosition, Ledger
from ravnest.errors import DiskFullError, PeerError
from ravnest.graph.weights import stream_tensors
from ravnest.settings import Checkpoint
from tests.coordinator.checkpoints.savers import a_saver

PLACE = DataPosition(epoch=2, position=3, microbatches=23, updates=11, samples=184, data_state="abc")


METADATA = {"version": "11", "optimizer": '{"values": {}, "groups": []}', "schedule": "null"}


async def a_part(stage: int) -> AsyncIterator[bytes]:
    for chunk in stream_tensors({f"param:layer{stage}": torch.ones(3)}, METADATA):
        yield chunk


def a_mark(number: int = 1) -> Mark:
    return Mark(number, PLACE, Ledger(PLACE).counts())


def test_a_checkpoint_counts_when_its_last_part_is_there(tmp_path: Path) -> None:
    async def save() -> None:
        saver = a_saver(tmp_path)
        saver.begin(a_mark())
        assert saver.under_way
        assert await saver.part(1, 1, a_part(1)) is None
        assert newest_good(tmp_path) == (None, [])
        info = await saver.part(1, 0, a_part(0))
        assert info is not None and not saver.under_way
        assert newest_good(tmp_path)[0] == info
        assert place_of(info) == PLACE

    asyncio.run(save())


def test_what_is_in_flight_is_not_counted_in_the_checkpoint(tmp_path: Path) -> None:
    async def save() -> None:
        saver = a_saver(tmp_path)
        saver.begin(Mark(1, PLACE, {"fed": 27, "completed": 21, "replayed": 0, "lost": 6, "applied_twice": 0}))
        await saver.part(1, 0, a_part(0))
        info = await saver.part(1, 1, a_part(1))
        assert info is not None
        assert info.manifest["ledger"] == {"fed": 23, "completed": 23, "replayed": 0, "lost": 0, "applied_twice": 0}

    asyncio.run(save())


def test_a_part_of_another_checkpoint_is_thrown_away(tmp_path: Path) -> None:
    async def save() -> None:
        saver = a_saver(tmp_path)
        saver.begin(a_mark(1))
        saver.begin(a_mark(2))
        assert await saver.part(1, 0, a_part(0)) is None
        assert await saver.part(2, 0, a_part(0)) is None
        assert await saver.part(2, 1, a_part(1)) is not None

    asyncio.run(save())


def test_a_checkpoint_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    async def save() -> None:
        saver = a_saver(tmp_path)
        saver.begin(a_mark())
        await saver.part(1, 0, a_part(0))
        saver.abort()
        assert list(tmp_path.iterdir()) == []
        assert await saver.part(1, 1, a_part(1)) is None

    asyncio.run(save())


def test_due_by_updates_since_the_last_one(tmp_path: Path) -> None:
    saver = a_saver(tmp_path, Checkpoint(every_seconds=None, every_updates=5), updates=11)
    assert saver.due(15) is None
    assert saver.due(16) == "5 updates since the last one"
    saver.begin(a_mark())
    assert saver.due(100) is None, "one is under way"


def test_a_part_that_comes_twice_does_not_stand_for_one_that_is_missing(tmp_path: Path) -> None:
    async def save() -> None:
        saver = a_saver(tmp_path)
        saver.begin(a_mark())
        assert await saver.part(1, 0, a_part(0)) is None
        # A stage that did not hear the answer sends it again, over another connection.
        assert await saver.part(1, 0, a_part(0)) is None
        assert newest_good(tmp_path) == (None, [])
        assert await saver.part(1, 1, a_part(1)) is not None

    asyncio.run(save())


def test_a_part_that_broke_off_may_come_again(tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"half"
        raise PeerError("anna went away")

    async def save() -> None:
        saver = a_saver(tmp_path)
        saver.begin(a_mark())
        with pytest.raises(PeerError, match="anna went away"):
            await saver.part(1, 0, broken())
        assert await saver.part(1, 0, a_part(0)) is None
        assert await saver.part(1, 1, a_part(1)) is not None

    asyncio.run(save())


def test_a_part_of_a_checkpoint_that_was_thrown_away_meanwhile_is_nobodys_fault(tmp_path: Path) -> None:
    async def main() -> None:
        saver = a_saver(tmp_path)
        saver.begin(Mark(1, DataPosition(), {}))

        async def interrupted() -> AsyncIterator[bytes]:
            yield b"not all of it"
            saver.abort()

        assert await saver.part(1, 0, interrupted()) is None

    asyncio.run(main())


def test_training_waits_for_a_checkpoint_that_would_put_more_than_an_interval_at_risk(tmp_path: Path) -> None:
    async def save() -> None:
        saver = a_saver(tmp_path, Checkpoint(every_seconds=None, every_updates=11))
        assert saver.due(10) is None and saver.due(11)
        assert not saver.must_wait(12), "there is nothing to wait for before one is begun"
        saver.begin(a_mark())
        assert not saver.must_wait(11)
        assert saver.must_wait(12)
        await saver.part(1, 0, a_part(0))
        assert saver.must_wait(12)
        assert await saver.part(1, 1, a_part(1)) is not None
        assert not saver.must_wait(22)

    asyncio.run(save())


@pytest.mark.parametrize("given_up", [True, False], ids=["given up", "by time"])
def test_nobody_waits_for_one_that_is_given_up_or_taken_by_time(tmp_path: Path, given_up: bool) -> None:
    saver = a_saver(tmp_path, Checkpoint(every_updates=1 if given_up else None))
    saver.begin(a_mark())
    if given_up:
        assert saver.must_wait(1000)
        saver.abort()
    assert not saver.must_wait(1000)


def test_what_another_saved_counts_when_its_place_is_taken(tmp_path: Path) -> None:
    async def save() -> None:
        settings = Checkpoint(every_seconds=None, every_updates=10)
        before = a_saver(tmp_path, settings)
        before.begin(a_mark())
        for stage in range(2):
            await before.part(1, stage, a_part(stage))
        before.begin(Mark(2, replace(PLACE, updates=21), {}))
        before.abort()
        after = a_saver(tmp_path, settings, updates=25)
        after.follow(before)
        assert after.due(21), "11 is what is saved, and not 25"
        after.begin(Mark(3, replace(PLACE, updates=21), {}))
        assert after.must_wait(22)

    asyncio.run(save())


def test_a_disk_that_is_full_costs_the_checkpoint_alone_and_every_stage_has_done_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1000
    monkeypatch.setattr(checkpoints.DiskRoom, "of", lambda place: DiskRoom(2000, free))
    told: list[DiskFullError] = []
    read: list[int] = []

    async def in_pieces(stage: int) -> AsyncIterator[bytes]:
        async for chunk in a_part(stage):
            for byte in chunk:
                yield bytes([byte])
        read.append(stage)

    async def save() -> None:
        nonlocal free
        saver = a_saver(tmp_path)
        saver.on_full = told.append
        saver.begin(a_mark(1))
        other = asyncio.create_task(saver.part(1, 1, in_pieces(1)))
        await asyncio.sleep(0)
        free = 0
        assert await saver.part(1, 0, in_pieces(0)) is None
        assert await other is None
        assert len(told) == 1 and sorted(read) == [0, 1]
        assert not saver.under_way and not saver.whole and list(tmp_path.iterdir()) == []
        free = 1000
        saver.begin(a_mark(2))
        await saver.part(2, 0, a_part(0))
        assert await saver.part(2, 1, a_part(1)) is not None

    asyncio.run(save())


def test_one_that_does_not_fit_is_not_tried_with_every_microbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = a_saver(tmp_path, Checkpoint(every_seconds=None, every_updates=5))
    assert saver.due(11) is not None
    monkeypatch.setattr(checkpoints.DiskRoom, "of", lambda place: DiskRoom(100, 0))
    with pytest.raises(DiskFullError, match="no room"):
        saver.begin(a_mark())
    assert saver.due(12) is None and saver.due(16) is not None


def test_a_checkpoint_that_is_given_up_while_a_part_comes_is_no_failure(tmp_path: Path) -> None:
    """A stage was lost: its neighbours' parts were on their way."""

    async def save() -> None:
        saver = a_saver(tmp_path)
        saver.begin(a_mark())
        coming = asyncio.create_task(saver.part(1, 0, a_part(0)))
        await asyncio.sleep(0)
        saver.abort()
        assert await coming is None
        assert newest_good(tmp_path) == (None, [])

    asyncio.run(save())


@pytest.mark.parametrize("number", [2, 1])
def test_a_checkpoint_that_is_given_up_while_it_is_written_leaves_the_next_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Also one of the same number, of a run that went back behind it."""

    async def save() -> None:
        saver = a_saver(tmp_path)
        saver.begin(a_mark(1))
        await saver.part(1, 0, a_part(0))
        loop, began, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        commit = checkpoints.PendingCheckpoint.commit

        def slowly(pending: checkpoints.PendingCheckpoint, **values: Any) -> checkpoints.CheckpointInfo:
            loop.call_soon_threadsafe(began.set)
            go_on.wait(10)
            return commit(pending, **values)

        monkeypatch.setattr(checkpoints.PendingCheckpoint, "commit", slowly)
        committing = asyncio.create_task(saver.part(1, 1, a_part(1)))
        await began.wait()
        saver.begin(a_mark(number))
        monkeypatch.setattr(checkpoints.PendingCheckpoint, "commit", commit)
        go_on.set()
        assert await committing is None
        assert saver.under_way
        await saver.part(number, 0, a_part(0))
        assert await saver.part(number, 1, a_part(1)) is not None

    asyncio.run(save())

"""When a checkpoint is due, and that it counts only when every stage's part of it is there."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from ravnest.coordinator import saving
from ravnest.coordinator.checkpoints import CheckpointStore, newest_good
from ravnest.coordinator.ledger import Ledger, Place
from ravnest.coordinator.saving import Mark, Saver, place_of
from ravnest.coordinator.stage_parts import StagePart
from ravnest.errors import PeerError
from ravnest.graph.portable import PortableGraph, WeightSpec
from ravnest.graph.weights import stream_tensors
from ravnest.settings import Checkpoint

PLACE = Place(epoch=2, position=3, microbatches=23, updates=11, samples=184, data_state="abc")


METADATA = {"version": "11", "optimizer": '{"values": {}, "groups": []}', "schedule": "null"}


async def a_part(stage: int) -> AsyncIterator[bytes]:
    for chunk in stream_tensors({f"param:layer{stage}": torch.ones(3)}, METADATA):
        yield chunk


def stages() -> list[StagePart]:
    return [
        StagePart.of(n, PortableGraph((), parameters=(WeightSpec("w", f"layer{n}", torch.float32, (3,)),)))
        for n in range(2)
    ]


def a_saver(folder: Path, settings: Checkpoint | None = None, updates: int = 0) -> Saver:
    return Saver(CheckpointStore(folder, keep=2), settings or Checkpoint(), stages(), {"aliases": {}}, updates)


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


def test_due_by_time_since_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(saving.time, "monotonic", lambda: now)
    saver = a_saver(tmp_path, Checkpoint(every_seconds=60))
    assert saver.due(1) is None
    now += 61
    assert saver.due(1) == "61 s since the last one"


def test_never_due_when_both_are_switched_off(tmp_path: Path) -> None:
    assert a_saver(tmp_path, Checkpoint(every_seconds=None)).due(10**9) is None


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
        saver.begin(Mark(1, Place(), {}))

        async def interrupted() -> AsyncIterator[bytes]:
            yield b"not all of it"
            saver.abort()

        assert await saver.part(1, 0, interrupted()) is None

    asyncio.run(main())

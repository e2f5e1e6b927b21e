"""Uploads of a stage's state to a checkpoint: where the stage waits, and whose problem it is when one fails."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ravnest.errors import PeerError, RefusedError
from ravnest.graph.weights import WeightsReader
from ravnest.provider.replicas.outgoing import OutgoingTransfers
from ravnest.provider.stage.checkpoint_upload import CheckpointUploads
from ravnest.provider.stage.failure import FirstFailure
from ravnest.provider.stage.records import StageRecords

RESTART_SECONDS = 5.0


@dataclass
class Ends:
    """Uploads, and what they tell."""

    uploads: CheckpointUploads
    records: StageRecords
    failures: FirstFailure
    transfers: OutgoingTransfers

    async def news(self) -> None:
        async with asyncio.timeout(10):
            await self.records.news.wait()


def on_a_loop(
    test: Callable[[Ends], Awaitable[None]], *, restart_seconds: float = RESTART_SECONDS, **more: Any
) -> list[bytes]:
    """Runs `test`; what was uploaded. Checkpoint 13 fails, 14 is refused, and 15 does not come to an end."""
    uploaded: list[bytes] = []

    async def upload(name: str, chunks: Callable[[], AsyncIterator[bytes]]) -> None:
        if name == "checkpoint-13":
            raise PeerError("the coordinator is gone")
        if name == "checkpoint-14":
            raise RefusedError("it was not asked for")
        if name == "checkpoint-15":
            await asyncio.Event().wait()
        uploaded.append(b"".join([chunk async for chunk in chunks()]))

    async def run() -> None:
        records, failures, transfers = StageRecords(), FirstFailure(), OutgoingTransfers()
        uploads = CheckpointUploads(upload, records, failures, transfers, restart_seconds=restart_seconds, **more)
        await test(Ends(uploads, records, failures, transfers))

    asyncio.run(run())
    return uploaded


def has_room(size_bytes: int) -> bool:
    return True


def test_saving_returns_when_the_state_has_been_taken() -> None:
    async def test(ends: Ends) -> None:
        await asyncio.to_thread(ends.uploads.save, 12, {"param:weight": torch.arange(3.0)}, {"version": "4"})
        await ends.news()
        assert ends.records.take()[2] == [12]
        assert not ends.records.news.is_set()

    [data] = on_a_loop(test)
    reader = WeightsReader(len(data))
    reader.feed(data)
    tensors, metadata = reader.finish()
    assert tensors["param:weight"].tolist() == [0.0, 1.0, 2.0] and metadata["version"] == "4"


def test_a_checkpoint_gets_the_outer_state_unless_it_has_one() -> None:
    async def test(ends: Ends) -> None:
        await asyncio.to_thread(ends.uploads.save, 1, {"param:weight": torch.arange(3.0)}, {})
        brought = {"param:weight": torch.arange(3.0), "outer:weight": torch.full((3,), 8.0)}
        await asyncio.to_thread(ends.uploads.save, 2, brought, {})

    found = []
    for data in on_a_loop(test, outer_state=lambda: {"outer:weight": torch.full((3,), 7.0)}):
        reader = WeightsReader(len(data))
        reader.feed(data)
        tensors, _ = reader.finish()
        assert tensors["param:weight"].tolist() == [0.0, 1.0, 2.0]
        found.append(tensors["outer:weight"].tolist())
    assert found == [[7.0] * 3, [8.0] * 3]


def test_a_stage_that_waits_for_its_line_says_so() -> None:
    said: list[str] = []

    async def test(ends: Ends) -> None:
        ends.uploads.say = said.append
        await asyncio.to_thread(ends.uploads.save, 12, {"param:weight": torch.ones(1024)}, {})

    on_a_loop(test, has_room=has_room)
    assert said == []
    on_a_loop(test)
    [text] = said
    assert "the stage waits while its state is uploaded (4 KiB)" in text and "free some space" in text


def test_a_failed_upload_fails_the_worker() -> None:
    async def test(ends: Ends) -> None:
        with pytest.raises(PeerError, match="the coordinator is gone"):
            await asyncio.to_thread(ends.uploads.save, 13, {"param:weight": torch.ones(1)}, {})
        assert ends.records.take()[2] == []

    on_a_loop(test)


@pytest.mark.parametrize("checkpoint", [14, 15], ids=["refused", "under way"])
def test_a_checkpoint_of_a_coordinator_that_is_gone_is_dropped(checkpoint: int) -> None:
    async def test(ends: Ends) -> None:
        saving = asyncio.create_task(
            asyncio.to_thread(ends.uploads.save, checkpoint, {"param:weight": torch.ones(1)}, {})
        )
        await asyncio.sleep(0.1)
        assert not saving.done()
        ends.uploads.on_coordinator_gone()
        await asyncio.wait_for(saving, 10)
        # Nor is any other that it had wanted.
        await asyncio.wait_for(asyncio.to_thread(ends.uploads.save, 16, {"param:weight": torch.ones(1)}, {}), 10)
        assert ends.records.take()[2] == []

    assert on_a_loop(test) == []


def test_a_checkpoint_that_is_refused_while_the_coordinator_stays_is_the_workers_problem() -> None:
    async def test(ends: Ends) -> None:
        with pytest.raises(RefusedError, match="it was not asked for"):
            await asyncio.to_thread(ends.uploads.save, 14, {"param:weight": torch.ones(1)}, {})

    on_a_loop(test, restart_seconds=0.1)


def test_where_there_is_room_for_a_copy_the_stage_goes_on_and_what_it_was_is_uploaded() -> None:
    asked: list[int] = []

    def asked_for(size_bytes: int) -> bool:
        asked.append(size_bytes)
        return True

    async def test(ends: Ends) -> None:
        weight = torch.arange(3.0)
        # It returns though nothing is taken while the loop is busy here, and the stage learns on.
        ends.uploads.save(12, {"param:weight": weight}, {"version": "4"})
        weight.add_(100.0)
        assert asked == [12] and ends.records.take()[2] == []
        await ends.news()
        assert ends.records.take()[2] == [12] and ends.transfers.told() == []

    [data] = on_a_loop(test, has_room=asked_for)
    reader = WeightsReader(len(data))
    reader.feed(data)
    assert reader.finish()[0]["param:weight"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("checkpoint", [13, 14])
def test_a_copy_whose_upload_fails_fails_the_stage(checkpoint: int) -> None:
    async def test(ends: Ends) -> None:
        ends.uploads.save(checkpoint, {"param:weight": torch.ones(1)}, {})
        async with asyncio.timeout(10):
            failure = await ends.failures.future
        assert failure.kind == "error" and failure.text in ("the coordinator is gone", "it was not asked for")
        assert ends.records.take()[2] == []

    on_a_loop(test, has_room=has_room, restart_seconds=0.1)


@pytest.mark.parametrize("end", [CheckpointUploads.on_coordinator_gone, CheckpointUploads.close])
def test_a_copy_under_way_is_told_of_and_ends_with_the_stage_or_the_coordinator(
    end: Callable[[CheckpointUploads], None],
) -> None:
    async def test(ends: Ends) -> None:
        ends.uploads.save(15, {"param:weight": torch.ones(5)}, {})
        await asyncio.sleep(0.05)
        [transfer] = ends.transfers.told()
        assert (transfer.kind, transfer.name, transfer.total_bytes) == ("checkpoint", "checkpoint-15", 20)
        end(ends.uploads)
        await asyncio.sleep(0.05)
        assert ends.transfers.told() == [] and not ends.failures.future.done()

    assert on_a_loop(test, has_room=has_room) == []


def test_another_checkpoint_takes_the_place_of_a_copy_that_is_still_under_way() -> None:
    async def test(ends: Ends) -> None:
        ends.uploads.save(15, {"param:weight": torch.ones(5)}, {})
        await asyncio.sleep(0.05)
        ends.uploads.save(16, {"param:weight": torch.ones(5)}, {})
        await ends.news()
        assert ends.records.take()[2] == [16] and not ends.failures.future.done()

    assert len(on_a_loop(test, has_room=has_room)) == 1


def test_the_state_is_written_to_a_file_and_uploaded_again_after_a_broken_line(tmp_path: Path) -> None:
    arrived: list[bytes] = []
    weight = torch.arange(700_000.0)

    async def upload(name: str, chunks: Callable[[], AsyncIterator[bytes]]) -> None:
        first = await anext(chunks())
        arrived.append(b"".join([chunk async for chunk in chunks()]))
        assert arrived[-1].startswith(first)

    async def run() -> None:
        records, failures = StageRecords(), FirstFailure()
        more: dict[str, Any] = {"folder": tmp_path, "has_room": refuse_a_copy}
        uploads = CheckpointUploads(upload, records, failures, OutgoingTransfers(), **more)
        uploads.save(12, {"param:weight": weight}, {"version": "4"})
        weight.add_(100.0)
        async with asyncio.timeout(10):
            await records.news.wait()
        assert records.take()[2] == [12] and not failures.future.done()

    asyncio.run(run())
    reader = WeightsReader(len(arrived[0]))
    reader.feed(arrived[0])
    assert torch.equal(reader.finish()[0]["param:weight"], torch.arange(700_000.0))
    assert list(tmp_path.iterdir()) == []


def refuse_a_copy(size_bytes: int) -> bool:
    raise AssertionError("the disk has room")


def test_without_room_on_the_disk_a_copy_is_uploaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3))

    async def test(ends: Ends) -> None:
        ends.uploads.save(12, {"param:weight": torch.ones(5)}, {})
        await ends.news()
        assert ends.records.take()[2] == [12]

    assert len(on_a_loop(test, folder=tmp_path, has_room=has_room)) == 1
    gone = tmp_path / "gone"
    assert len(on_a_loop(test, folder=gone, has_room=has_room)) == 1, "a folder that cannot be used is no failure"

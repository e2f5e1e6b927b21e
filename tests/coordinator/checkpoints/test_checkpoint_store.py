"""A checkpoint is whole or does not count; a damaged one is passed over; a failed save loses nothing."""

import asyncio
import json
import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ravnest.coordinator.checkpoints import store as checkpoints
from ravnest.coordinator.checkpoints.disk_space import DiskRoom
from ravnest.coordinator.checkpoints.reader import CheckpointInfo, DamagedCheckpoint, find_checkpoint, newest_good
from ravnest.coordinator.checkpoints.store import CheckpointStore
from ravnest.errors import DiskFullError, RunError
from ravnest.graph.weights import stream_tensors


async def chunked(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> AsyncIterator[bytes]:
    for chunk in stream_tensors(tensors, metadata, chunk_bytes=64):
        yield chunk


def stage_tensors(stage: int, value: float) -> dict[str, Tensor]:
    return {
        f"param:layers.{stage}.weight": torch.full((4, 3), value),
        f"buffer:layers.{stage}.mean": torch.full((3,), value),
        f"optim:layers.{stage}.weight:exp_avg": torch.full((4, 3), -value),
        f"optim:layers.{stage}.weight:step": torch.tensor(value),
    }


def save(store: CheckpointStore, updates: int, stages: int = 2) -> CheckpointInfo:
    async def write() -> CheckpointInfo:
        pending = store.begin(updates)
        # Both at once, as uploads arrive.
        await asyncio.gather(
            *(
                pending.write_part(stage, chunked(stage_tensors(stage, float(updates)), {"stage": str(stage)}))
                for stage in reversed(range(stages))
            )
        )
        return pending.commit(
            updates=updates,
            samples=updates * 64,
            epoch=1,
            position=updates,
            ledger={"fed": updates},
            state={"aliases": {"head.weight": "layers.0.weight"}},
        )

    return asyncio.run(write())


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    assert store.latest() is None
    saved = save(store, 10)
    info = store.latest()
    assert info == saved
    assert (info.updates, info.samples, info.epoch, info.position) == (10, 640, 1, 10)
    assert info.state["aliases"] == {"head.weight": "layers.0.weight"}
    contents = store.load(info)
    assert contents.parameters.keys() == {"layers.0.weight", "layers.1.weight"}
    assert torch.equal(contents.parameters["layers.1.weight"], torch.full((4, 3), 10.0))
    assert torch.equal(contents.buffers["layers.0.mean"], torch.full((3,), 10.0))
    assert torch.equal(contents.optimizer["layers.0.weight"]["exp_avg"], torch.full((4, 3), -10.0))
    assert contents.optimizer["layers.1.weight"]["step"].item() == 10.0
    assert contents.metadata == [{"stage": "0"}, {"stage": "1"}]
    assert contents.manifest["ledger"] == {"fed": 10}


def test_the_manifest_is_as_documented(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path, keep=1), 10)
    folder = tmp_path / "0000000010"
    assert names(folder) == ["checkpoint.json", "part-0.safetensors", "part-1.safetensors"]
    manifest = json.loads((folder / "checkpoint.json").read_text())
    fields = "format checkpoint updates samples epoch position parts ledger state created_at"
    assert list(manifest) == fields.split()
    assert manifest["parts"][0]["file"] == "part-0.safetensors"
    assert manifest["parts"][0]["size"] == (folder / "part-0.safetensors").stat().st_size


def test_loaded_tensors_survive_the_removal_of_their_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    contents = store.load(save(store, 10))
    save(store, 20)
    assert names(tmp_path) == ["0000000020"]
    assert torch.equal(contents.parameters["layers.0.weight"], torch.full((4, 3), 10.0))


def test_only_the_newest_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for updates in (10, 20, 30, 40):
        save(store, updates)
    assert names(tmp_path) == ["0000000030", "0000000040"]


def test_the_same_number_of_updates_may_be_saved_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 10, stages=3)
    save(store, 10, stages=1)
    assert names(tmp_path) == ["0000000010"]
    info = store.latest()
    assert info is not None and len(info.manifest["parts"]) == 1


def test_a_crash_while_replacing_gives_the_old_one_back(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path, keep=2), 10)
    os.rename(tmp_path / "0000000010", tmp_path / ".replaced-0000000010")
    info = CheckpointStore(tmp_path, keep=2).latest()
    assert info is not None and info.updates == 10
    shutil.copytree(tmp_path / "0000000010", tmp_path / ".replaced-0000000010")
    CheckpointStore(tmp_path, keep=2)
    assert names(tmp_path) == ["0000000010"]


def test_what_was_not_committed_does_not_count_and_is_cleared_away(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 10)
    pending = store.begin(11)
    asyncio.run(pending.write_part(0, chunked(stage_tensors(0, 1.0))))
    assert names(tmp_path) == [".pending-11", "0000000010"]
    info = store.latest()
    assert info is not None and info.updates == 10
    CheckpointStore(tmp_path, keep=2)
    assert names(tmp_path) == ["0000000010"]


@pytest.mark.parametrize("number", range(30))
def test_a_checkpoint_that_is_aborted_while_parts_begin_leaves_nothing(number: int, tmp_path: Path) -> None:
    pending = CheckpointStore(tmp_path, keep=2).begin(number)
    together = threading.Barrier(4)

    def write(stage: int) -> None:
        together.wait()
        # What cannot be written any more is refused, or goes nowhere.
        with suppress(RunError):
            asyncio.run(pending.write_part(stage, chunked(stage_tensors(stage, 1.0))))

    writing = [threading.Thread(target=write, args=(stage,)) for stage in range(3)]
    for thread in writing:
        thread.start()
    together.wait()
    time.sleep(0.0003 * (number % 10))
    pending.abort()
    for thread in writing:
        thread.join()
    assert list(tmp_path.iterdir()) == []


def test_an_aborted_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    pending = store.begin(11)
    asyncio.run(pending.write_part(0, chunked(stage_tensors(0, 1.0))))
    pending.abort()
    pending.abort()
    assert names(tmp_path) == []


def test_an_upload_that_breaks_off_passes_its_error_on(tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"some"
        raise ConnectionResetError("provider p2 went away")

    pending = CheckpointStore(tmp_path, keep=2).begin(1)
    with pytest.raises(ConnectionResetError, match="went away"):
        asyncio.run(pending.write_part(0, broken()))


def test_an_upload_can_be_cancelled_while_it_waits(tmp_path: Path) -> None:
    async def cancel() -> None:
        started = asyncio.Event()

        async def endless() -> AsyncIterator[bytes]:
            yield b"some"
            started.set()
            await asyncio.Event().wait()

        pending = CheckpointStore(tmp_path, keep=2).begin(1)
        task = asyncio.create_task(pending.write_part(0, endless()))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        pending.abort()

    asyncio.run(cancel())
    assert names(tmp_path) == []


def damage_content(folder: Path) -> None:
    data = bytearray((folder / "part-1.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "part-1.safetensors").write_bytes(data)


def damage_length(folder: Path) -> None:
    os.truncate(folder / "part-1.safetensors", 100)


def remove_part(folder: Path) -> None:
    (folder / "part-1.safetensors").unlink()


def remove_manifest(folder: Path) -> None:
    (folder / "checkpoint.json").unlink()


def tear_manifest(folder: Path) -> None:
    os.truncate(folder / "checkpoint.json", 50)


def change_manifest(folder: Path, **changes: object) -> None:
    path = folder / "checkpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def of_the_future(folder: Path) -> None:
    change_manifest(folder, format=2)


def without_numbers(folder: Path) -> None:
    change_manifest(folder, updates="many")


def pointing_elsewhere(folder: Path) -> None:
    change_manifest(folder, parts=[{"file": "../../secret", "size": 0, "sha256": ""}])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_content, "sha256 differs"),
        (damage_length, "has 100 bytes"),
        (remove_part, "cannot read"),
        (remove_manifest, "cannot read"),
        (tear_manifest, "is damaged"),
        (of_the_future, "format 2"),
        (without_numbers, "updates is not a number"),
        (pointing_elsewhere, "is no name of a part"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, damage: object, words: str) -> None:
    damaged: list[DamagedCheckpoint] = []
    store = CheckpointStore(tmp_path, keep=3, on_damaged=damaged.append)
    save(store, 10)
    save(store, 20)
    assert callable(damage)
    damage(tmp_path / "0000000020")
    info = store.latest()
    assert info is not None and info.updates == 10
    (item,) = damaged
    assert item.folder.name == "0000000020" and words in item.reason
    with pytest.raises(RunError, match=words):
        find_checkpoint(tmp_path, 20)


def test_a_damaged_checkpoint_never_takes_the_place_of_a_good_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 10)
    shutil.copytree(tmp_path / "0000000010", tmp_path / "0000000030")
    damage_content(tmp_path / "0000000030")
    store = CheckpointStore(tmp_path, keep=1)
    info = store.latest()
    assert info is not None and info.updates == 10
    save(store, 20)
    info, damaged = newest_good(tmp_path)
    assert info is not None and info.updates == 20 and len(damaged) == 1
    save(store, 30)
    assert names(tmp_path) == ["0000000030"]
    assert newest_good(tmp_path)[1] == []


def test_reading_changes_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 10)
    store.begin(11)
    newest_good(tmp_path)
    assert find_checkpoint(tmp_path, 10).updates == 10
    assert names(tmp_path) == [".pending-11", "0000000010"]
    with pytest.raises(RunError, match=r"no checkpoint 7 in .*; there are: 10"):
        find_checkpoint(tmp_path, 7)


@contextmanager
def files_limited_to(limit_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_refused_part_is_one_sentence_and_the_saved_ones_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 10)
    pending = store.begin(20)
    with files_limited_to(1000), pytest.raises(RunError, match=r"^cannot write .*part-0.safetensors: "):
        asyncio.run(pending.write_part(0, chunked({"param:w": torch.zeros(1000)})))
    pending.abort()
    assert names(tmp_path) == ["0000000010"]
    assert newest_good(tmp_path)[1] == []


def test_a_refused_manifest_is_one_sentence_and_the_saved_ones_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 10)
    pending = store.begin(20)
    with files_limited_to(100), pytest.raises(RunError, match="cannot write"):
        pending.commit(updates=20, samples=0, epoch=0, position=0, ledger={}, state={"long": "x" * 1000})
    assert names(tmp_path) == ["0000000010"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_one_sentence_and_the_saved_ones_stay(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints", keep=1)
    save(store, 10)
    pending = store.begin(20)
    with pytest.raises(RunError, match="the disk is full; free some space"):
        asyncio.run(pending.write_part(0, chunked({"param:w": torch.zeros(30_000)})))
    with pytest.raises(RunError, match="the disk is full"):
        pending.commit(updates=20, samples=0, epoch=0, position=0, ledger={}, state={})
    info = CheckpointStore(small_disk / "checkpoints", keep=1).latest()
    assert info is not None and info.updates == 10


def test_room_is_made_of_the_oldest_and_never_of_the_newest_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=4)
    for updates in (10, 20, 30, 40):
        save(store, updates)
    part = tmp_path / "0000000040" / "part-0.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"!")

    def room(kept: int) -> None:
        """For one more, once so many are left."""
        of = lambda place: DiskRoom(100, 100 if len(names(tmp_path)) <= kept else 5)  # noqa: E731
        monkeypatch.setattr(checkpoints.DiskRoom, "of", of)

    room(3)
    again = CheckpointStore(tmp_path, keep=4)
    assert again.make_room(50) == ["0000000010"]
    room(0)
    assert again.make_room(50) == ["0000000020"]
    assert names(tmp_path) == ["0000000030", "0000000040"], "30 is the newest good one"
    with pytest.raises(DiskFullError, match="no room for a checkpoint"):
        again.begin(50, 50)


def test_a_checkpoint_leaves_the_last_of_the_disk_to_the_logs(small_disk: Path) -> None:
    pending = CheckpointStore(small_disk / "checkpoints", keep=1).begin(1)
    (small_disk / "others").write_bytes(bytes(40_000))
    with pytest.raises(DiskFullError):
        asyncio.run(pending.write_part(0, chunked({"param:w": torch.zeros(30_000)})))
    pending.abort()
    assert DiskRoom.of(small_disk).free_bytes >= 16_000


def test_a_part_with_an_unknown_entry_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    pending = store.begin(1)
    asyncio.run(pending.write_part(0, chunked({"weights": torch.zeros(1)})))
    info = pending.commit(updates=1, samples=1, epoch=0, position=0, ledger={}, state={})
    with pytest.raises(RunError, match="unknown entry 'weights'"):
        store.load(info)

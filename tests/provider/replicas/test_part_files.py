"""Parts of replicas on a provider's disk: whole or not at all, the newest ones, and only under names that are keys."""

import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ravnest.coordinator.checkpoints.part_check import StagePart
from ravnest.engine.weights.frozen_state import FrozenState
from ravnest.errors import PeerError, RunError
from ravnest.net.connection import JOIN_BYTES
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.v1.control_pb2 import JoinRequest
from ravnest.provider.machine.memory import forget_peak, peak_bytes
from ravnest.provider.replicas import files as part_files
from ravnest.provider.replicas.files import PartFiles
from tests.coordinator.checkpoints.part_states import GRAPH, a_state

TENSORS = {"param:w": torch.arange(12.0).reshape(3, 4), "buffer:n": torch.tensor([True, False])}
METADATA = {"version": "7", "applied": "[3, 4]"}


def write(files: PartFiles, replica: int, key: str = "r1-c0-s1") -> None:
    files.write(key, replica, TENSORS, METADATA)


def held(files: PartFiles) -> list[tuple[str, int]]:
    return [(part.key, part.replica) for part in files.held()]


@pytest.mark.parametrize("named", [True, False])
def test_a_part_is_read_as_it_was_written(tmp_path: Path, named: bool) -> None:
    files = PartFiles(tmp_path if named else None)
    write(files, 5)
    tensors, metadata = files.find("r1-c0-s1", 5).read()
    assert metadata == METADATA and tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


def test_a_large_state_is_recorded_without_a_copy_in_memory(tmp_path: Path) -> None:
    state = {f"param:{number}": torch.full((8 << 20,), float(number)) for number in range(4)}
    cpu = torch.device("cpu")
    forget_peak(cpu)
    before = peak_bytes(cpu)
    writer = PartFiles(tmp_path).record("k", 1, state, METADATA)
    part = writer.finish()
    assert part.size_bytes > 128 << 20
    assert peak_bytes(cpu) - before < 32 << 20


def test_a_part_is_what_the_coordinator_takes_for_a_checkpoint(tmp_path: Path) -> None:
    tensors, metadata = a_state()
    part = PartFiles(tmp_path).write("k", 1, tensors, {**metadata, "applied": "[0]"})
    assert part.path is not None
    StagePart.of(1, GRAPH).check(part.path)


def test_another_process_under_the_same_identity_finds_the_parts(tmp_path: Path) -> None:
    node = NodeIdentity.open(tmp_path / "node")
    write(PartFiles.of_node(node, None, pytest.fail), 5)
    again = PartFiles.of_node(node, None, pytest.fail)
    assert held(again) == [("r1-c0-s1", 5)]
    assert again.find("r1-c0-s1", 5).read()[1] == METADATA


def test_an_identity_in_memory_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_files.tempfile, "tempdir", str(tmp_path))
    files = PartFiles.of_node(NodeIdentity.new(), None, pytest.fail)
    write(files, 5)
    begun = files.begin("k", 6, 100)
    begun.feed(b"half of it")
    assert [*tmp_path.iterdir()] == [] and held(files) == [("r1-c0-s1", 5)]
    begun.discard()


def test_of_each_stage_the_newest_two_are_kept(tmp_path: Path) -> None:
    files = PartFiles(tmp_path)
    for replica in (3, 9, 14):
        write(files, replica)
        write(files, replica + 1, "other")
    assert held(files) == [("other", 15), ("r1-c0-s1", 14), ("other", 10), ("r1-c0-s1", 9)]
    assert len([*tmp_path.iterdir()]) == 4


def test_the_last_replica_that_all_have_stays_while_newer_ones_are_given_up(tmp_path: Path) -> None:
    files = PartFiles(tmp_path)
    write(files, 3)
    write(files, 9)
    files.forget({"r1-c0-s1"}, 9)
    for replica in (14, 20, 27):
        write(files, replica)
    assert [replica for _, replica in held(files)] == [27, 20, 9]
    files.forget({"r1-c0-s1"}, 27)
    assert [replica for _, replica in held(files)] == [27]


def test_a_part_that_is_being_collected_outlives_newer_complete_ones(tmp_path: Path) -> None:
    files = PartFiles(tmp_path)
    for replica in (5, 9):
        write(files, replica)
    files.forget((), 9, {"r1-c0-s1"}, {5})
    for replica in (14, 20, 27):
        write(files, replica)
    # The newest two, the last complete one, and the one that is collected.
    assert [replica for _, replica in held(files)] == [27, 20, 9, 5]
    files.forget((), 20, {"r1-c0-s1"}, {5})
    assert [replica for _, replica in held(files)] == [27, 20, 5]
    files.forget((), 20, {"r1-c0-s1"})
    assert [replica for _, replica in held(files)] == [27, 20]


def test_what_is_forgotten_of_one_cluster_leaves_the_others_alone(tmp_path: Path) -> None:
    """Each has its own newest that all of its stages have: of a faster one the numbers are far ahead."""
    files = PartFiles(tmp_path)
    for replica in (1000, 1100):
        write(files, replica)
    write(files, 10, "slow")
    files.forget((), 1000, {"r1-c0-s1"})
    files.forget((), 10, {"slow"})
    for replica in (1200, 1300):
        # For these, one stage after the other reports that it could not store its part.
        write(files, replica)
    assert held(files) == [("r1-c0-s1", 1300), ("r1-c0-s1", 1200), ("r1-c0-s1", 1000), ("slow", 10)]


def test_parts_of_unknown_stages_are_deleted(tmp_path: Path) -> None:
    files = PartFiles(tmp_path)
    write(files, 3)
    write(files, 3, "old")
    files.forget({"r1-c0-s1"}, 0)
    assert held(files) == [("r1-c0-s1", 3)]
    files.forget((), 0)
    assert held(files) == [] and [*tmp_path.iterdir()] == []


def test_a_reader_of_a_deleted_part_reads_it_to_its_end(tmp_path: Path) -> None:
    for files in (PartFiles(tmp_path), PartFiles(None)):
        write(files, 3)
        part = files.find("r1-c0-s1", 3)
        files.forget((), 0)
        assert part.read()[1] == METADATA


def test_at_the_start_what_is_a_week_old_or_half_written_goes(tmp_path: Path) -> None:
    files = PartFiles(tmp_path)
    for replica, key in ((1, "old"), (2, "new")):
        write(files, replica, key)
    old = files.find("old", 1).path
    assert old is not None
    os.utime(old, times=(0, time.time() - part_files.WEEK_SECONDS - 60))
    half = files.begin("new", 3, 100)
    half.feed(b"cut short")
    (tmp_path / "notes.txt").write_text("not ours")
    assert held(PartFiles(tmp_path)) == [("new", 2)]
    assert sorted(path.name[:5] for path in tmp_path.iterdir()) == ["new@2", "notes"]
    half.discard()


@pytest.mark.parametrize("key", ["", "..", ".hidden", "a/b", "../../etc/passwd", "a@1", "a\0b", "x" * 81, "ü", "a\n"])
def test_an_invalid_key_is_not_used_in_a_path(tmp_path: Path, key: str) -> None:
    files = PartFiles(tmp_path / "parts")
    with pytest.raises(PeerError, match="is not the key of a stage"):
        write(files, 1, key)
    with pytest.raises(PeerError, match="there is no part"):
        files.find(key, 1)
    assert [*tmp_path.iterdir()] == [tmp_path / "parts"] and [*(tmp_path / "parts").iterdir()] == []


@pytest.mark.parametrize("replica", [0, -1, 1 << 63])
def test_an_invalid_number_is_refused(tmp_path: Path, replica: int) -> None:
    with pytest.raises(PeerError, match="is not the number of a replica"):
        PartFiles(tmp_path).begin("k", replica, 10)


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_part_that_is_damaged_on_the_disk_is_not_used(tmp_path: Path, damage: str) -> None:
    files = PartFiles(tmp_path)
    write(files, 5)
    path = files.find("r1-c0-s1", 5).path
    assert path is not None
    data = path.read_bytes()
    path.write_bytes(data[:-1] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(PeerError, match=r"part of r1-c0-s1 of replica 5 (is damaged|cannot be used)"):
        PartFiles(tmp_path).find("r1-c0-s1", 5).read()


def test_a_full_disk_costs_the_part_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = PartFiles(tmp_path)
    write(files, 5)
    real = os.write

    def refuse(descriptor: int, data: Any) -> int:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(part_files.os, "write", refuse)
        with pytest.raises(RunError, match="No space left on device"):
            write(files, 6)
    assert held(files) == [("r1-c0-s1", 5)] and len([*tmp_path.iterdir()]) == 1
    write(files, 7)
    assert held(files)[0] == ("r1-c0-s1", 7)


def test_a_disk_that_is_nearly_full_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_files, "SPARE_BYTES", 1 << 60)
    with pytest.raises(RunError, match="does not fit on the disk"):
        write(PartFiles(tmp_path), 1)
    assert [*tmp_path.iterdir()] == []


def test_no_more_is_kept_than_the_user_lets_it(tmp_path: Path) -> None:
    size = len(b"".join(PartFiles(None).write("k", 1, TENSORS, METADATA).chunks()))
    files = PartFiles(tmp_path, 3 * size - 1)
    write(files, 1, "a")
    coming = files.begin("b", 1, size)
    with pytest.raises(RunError, match=r"does not fit the limit .* --cache"):
        write(files, 1, "c")
    coming.discard()
    write(files, 1, "c")
    assert held(files) == [("a", 1), ("c", 1)]


def test_there_are_never_more_files_than_a_process_may_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_files, "MAX_PARTS", 3)
    files = PartFiles(tmp_path)
    for key in ("a", "b", "c"):
        write(files, 1, key)
    with pytest.raises(RunError, match="does not fit the limit with the 3 parts"):
        write(files, 1, "d")


def test_without_disk_space_no_file_is_left(tmp_path: Path) -> None:
    node = NodeIdentity.open(tmp_path / "node")
    files = PartFiles.of_node(node, 0, pytest.fail)
    write(files, 1)
    assert held(files) == [("r1-c0-s1", 1)] and not (tmp_path / "node" / "parts").exists()


def test_a_folder_that_cannot_be_used_is_said_and_done_without(tmp_path: Path) -> None:
    node = NodeIdentity.open(tmp_path / "node")
    (tmp_path / "node" / "parts").write_text("in the way")
    said: list[str] = []
    files = PartFiles.of_node(node, None, said.append)
    write(files, 1)
    assert held(files) == [("r1-c0-s1", 1)] and "will not outlive this process" in said[0]


def test_other_users_of_the_machine_may_not_read_a_part(tmp_path: Path) -> None:
    files = PartFiles(tmp_path / "parts")
    write(files, 1)
    [path] = (tmp_path / "parts").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


class CutShort(FrozenState):
    """A state that ends early without an error."""

    def chunks(self) -> Iterator[bytes]:
        yield from list(super().chunks())[:-1]


def test_a_state_that_ends_early_is_not_a_part(tmp_path: Path) -> None:
    files = PartFiles(tmp_path)
    with pytest.raises(RunError, match="of its"):
        files.record_frozen("k", 1, CutShort({"w": torch.ones(100)}, {}))
    assert not files.held() and not [*tmp_path.iterdir()]


def test_the_list_of_parts_tells_the_forms_of_a_part_apart(tmp_path: Path) -> None:
    files = PartFiles(tmp_path)
    write(files, 1)
    [held] = files.held()
    assert files.find(held.key, 1).sha256.startswith(held.sha256_start.hex()) and len(held.sha256_start) == 8


def test_the_list_of_many_parts_fits_into_a_request_to_join(tmp_path: Path) -> None:
    files = PartFiles(tmp_path)
    for number in range(120):
        write(files, 1000 + number, f"{'k' * 70}-{number}")
    request = JoinRequest(parts=files.held())
    assert 10 < len(request.parts) < 120 and request.parts[0].replica == 1119
    assert request.ByteSize() <= JOIN_BYTES // 2

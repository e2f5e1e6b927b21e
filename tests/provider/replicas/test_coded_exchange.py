"""Coded parts between providers: what the holder stores, what the owner reports, and what either refuses."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ravnest.errors import PeerError, RunError
from ravnest.net.v1.control_pb2 import Deploy, Failed, Give, Hold, Replicate, Replicated
from ravnest.provider.replicas.coded_parts import ArrivingPart, encoded
from ravnest.provider.replicas.files import PartFiles, PartWriter
from tests.net.secure_ends import run
from tests.provider.replicas.part_ends import KEY, Keeper, keepers

VALUES = 200_000


def state(seed: int, distance: float = 0.0) -> dict[str, Tensor]:
    weights, moments = torch.Generator().manual_seed(1), torch.Generator().manual_seed(seed)
    moved = torch.randn(VALUES, generator=torch.Generator().manual_seed(seed))
    return {
        "param:w": torch.randn(VALUES, generator=weights) + distance * moved,
        "optim:w:exp_avg": torch.randn(VALUES, generator=moments) * 1e-4,
        "optim:w:exp_avg_sq": torch.randn(VALUES, generator=moments).square() * 1e-7,
        "optim:w:step": torch.tensor(float(seed)),
    }


def pair(owner: Keeper, holder: Keeper, link: str, coding: str = "int8") -> None:
    holder.obey(hold=Hold(key=KEY, owner=holder.awaits(owner, link)))
    owner.obey(replicate=Replicate(deployment="d1", key=KEY, holder=owner.dials(holder, link), coding=coding))


async def replicated(owner: Keeper, replica: int, tensors: Mapping[str, Tensor]) -> Replicated:
    owner.keep(replica, dict(tensors))
    told = await owner.hears()
    assert isinstance(told, Replicated) and told.replica == replica and not told.error, told
    return told


def test_differences_follow_the_first_part_and_the_owner_knows_what_the_holder_has(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            pair(owner, holder, "rep-1")
            sent = []
            for replica in (1, 2, 3):
                tensors = state(replica, 0.001 * replica)
                told = await replicated(owner, replica, tensors)
                here, there = owner.files.find(KEY, replica), holder.files.find(KEY, replica)
                assert (told.sha256, told.holder_sha256) == (here.sha256, there.sha256) and here.sha256 != there.sha256
                assert told.size_bytes == here.size_bytes == there.size_bytes
                own, held = here.read()[0], there.read()[0]
                assert all(torch.equal(own[name], tensors[name]) for name in tensors)
                assert float((held["param:w"] - tensors["param:w"]).abs().max()) < 1e-4
                assert float(held["optim:w:step"]) == replica
                sent.append(told.sent_bytes / VALUES)
            assert sent[0] < 5.6 and sent[1] < 3.2 and sent[2] < 3.2

    run(test())


def test_lossless_parts_are_equal_on_both_disks(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            pair(owner, holder, "rep-1", "lossless")
            for replica in (1, 2):
                told = await replicated(owner, replica, state(replica, 0.001 * replica))
                assert told.sha256 == told.holder_sha256 == holder.files.find(KEY, replica).sha256
                assert told.sent_bytes < told.size_bytes

    run(test())


def test_the_coding_may_change_between_two_parts_on_the_same_link(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            to_owner, to_holder = holder.awaits(owner, "rep-1"), owner.dials(holder, "rep-1")
            holder.obey(hold=Hold(key=KEY, owner=to_owner))
            for replica, coding in enumerate(("int8", "lossless", "float32", "int8", "int8"), 1):
                owner.obey(replicate=Replicate(deployment="d1", key=KEY, holder=to_holder, coding=coding))
                told = await replicated(owner, replica, state(replica, 0.001 * replica))
                assert told.holder_sha256 == holder.files.find(KEY, replica).sha256
                assert (told.holder_sha256 == told.sha256) == (coding != "int8")
                assert (told.sent_bytes == told.size_bytes) == (coding == "float32")

    run(test())


def test_a_holder_that_has_lost_the_reference_gets_the_next_part_without_one(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            pair(owner, holder, "rep-1")
            await replicated(owner, 1, state(1))
            holder.files.forget(keep=(), before=0)
            told = await replicated(owner, 2, state(2, 0.001))
            assert told.holder == "holder" and told.sent_bytes > 4 * VALUES
            assert (await replicated(owner, 3, state(3, 0.002))).sent_bytes < 3.2 * VALUES

    run(test())


def test_a_reference_that_the_holder_has_in_another_form_is_not_used(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            pair(owner, holder, "rep-1")
            await replicated(owner, 1, state(1))
            holder.files.write(KEY, 1, state(7), {"version": "7"})
            told = await replicated(owner, 2, state(2, 0.001))
            assert told.holder_sha256 == holder.files.find(KEY, 2).sha256 and told.sent_bytes > 4 * VALUES

    run(test())


def test_a_new_holder_gets_a_part_without_a_reference(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "before", "holder") as (owner, before, holder):
            pair(owner, before, "rep-1")
            await replicated(owner, 1, state(1))
            pair(owner, holder, "rep-2")
            told = await replicated(owner, 2, state(2, 0.001))
            assert told.holder == "holder" and told.holder_sha256 == holder.files.find(KEY, 2).sha256

    run(test())


def test_a_stage_begins_with_the_part_of_a_holder_by_its_own_hash(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder", "taker") as (owner, holder, taker):
            pair(owner, holder, "rep-1")
            await replicated(owner, 1, state(1))
            told = await replicated(owner, 2, state(2, 0.001))
            order = Deploy(key=KEY, part_key=KEY, part_replica=2, part_sha256=told.holder_sha256)
            order.giver.CopyFrom(taker.awaits(holder, "give"))
            taker.parts.expect(order)
            holder.obey(give=Give(key=KEY, replica=2, to=holder.dials(taker, "give")))
            tensors, _ = await taker.parts.fetch_part(order)
            held = holder.files.find(KEY, 2).read()[0]
            assert all(torch.equal(tensors[name], held[name]) for name in held)
            wrong = Deploy(key=KEY, part_key=KEY, part_replica=2, part_sha256=told.sha256)
            with pytest.raises(PeerError, match="sha256"):
                await holder.parts.fetch_part(wrong)

    run(test())


def test_an_owner_refuses_a_coding_that_it_does_not_know(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            owner.obey(replicate=Replicate(key=KEY, holder=owner.dials(holder, "rep-1"), coding="zip"))
            told = await owner.hears()
            assert isinstance(told, Failed) and told.kind == "part" and "no coding 'zip'" in told.message

    run(test())


def test_an_owner_without_room_for_coding_sends_the_part_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = PartFiles.begin

    def full(self: PartFiles, key: str, replica: int, size_bytes: int, *, listed: bool = True) -> PartWriter:
        if not listed:
            raise RunError("there is no space left")
        return begin(self, key, replica, size_bytes)

    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            pair(owner, holder, "rep-1")
            with monkeypatch.context() as patch:
                patch.setattr(PartFiles, "begin", full)
                told = await replicated(owner, 1, state(1))
            assert told.sha256 == told.holder_sha256 and told.sent_bytes == told.size_bytes

    run(test())


def test_files_for_coding_have_no_names_and_give_their_space_back(tmp_path: Path) -> None:
    files = PartFiles(tmp_path, limit_bytes=16 * 3 * VALUES)
    part = files.write(KEY, 1, state(1), {"version": "1"})
    for _ in range(10):
        coded, decoded = encoded(files, part, "int8", None)
        assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}@1@{part.sha256}"]
        assert coded.size_bytes < decoded.size_bytes == part.size_bytes
        del coded, decoded
    kept = encoded(files, part, "int8", None)
    with pytest.raises(RunError, match="does not fit the limit"):
        encoded(files, part, "int8", None)
    assert kept[1].size_bytes == part.size_bytes


def test_a_holder_refuses_more_than_a_stage_can_need_before_it_takes_space(tmp_path: Path) -> None:
    owner, holder = PartFiles(tmp_path / "owner"), PartFiles(tmp_path / "holder")
    part = owner.write(KEY, 1, {"param:w": torch.zeros(VALUES)}, {"version": "1"})
    coded, _ = encoded(owner, part, "int8", None)
    arriving = ArrivingPart(holder, KEY, 1, coded.size_bytes, max_bytes=VALUES)
    with pytest.raises(RunError, match="its stage can need"):
        for data in coded.chunks():
            arriving.feed(memoryview(data))
    arriving.discard()
    assert not [*(tmp_path / "holder").iterdir()] and not holder.held()


def test_a_damaged_coded_part_is_not_kept(tmp_path: Path) -> None:
    owner, holder = PartFiles(tmp_path / "owner"), PartFiles(tmp_path / "holder")
    coded, _ = encoded(owner, owner.write(KEY, 1, state(1), {"version": "1"}), "int8", None)
    data = b"".join(coded.chunks())
    for bad, sha256 in ((data, "0" * 64), (data[:-1], hashlib.sha256(data[:-1]).hexdigest())):
        arriving = ArrivingPart(holder, KEY, 1, len(bad), max_bytes=1 << 30)
        with pytest.raises(PeerError):
            arriving.feed(memoryview(bad))
            arriving.finish(sha256)
        arriving.discard()
    assert not holder.held()


def test_a_part_that_is_shorter_than_a_magic_number_is_stored_as_before(tmp_path: Path) -> None:
    holder = PartFiles(tmp_path)
    arriving = ArrivingPart(holder, KEY, 1, 3, max_bytes=100)
    arriving.feed(memoryview(b"abc"))
    arriving.finish(hashlib.sha256(b"abc").hexdigest())
    assert b"".join(holder.find(KEY, 1).chunks()) == b"abc"

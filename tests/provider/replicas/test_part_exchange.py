"""Exchange of replica parts between providers: parts arrive whole or are refused with a reason, and no stage
suffers."""

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ravnest.engine.weights.frozen_state import FrozenStates, StateTensors
from ravnest.errors import PeerError, RunError
from ravnest.microbatch import Marks
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.pacing.budget import StateBudget
from ravnest.net.rpc.client import dial_link
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.net.v1.control_pb2 import (
    ArtifactRef,
    Deploy,
    Failed,
    Forget,
    Give,
    Hold,
    Replicate,
    Replicated,
    UploadPart,
)
from ravnest.provider.replicas import fetch_part
from ravnest.provider.replicas import files as part_files
from ravnest.provider.replicas.links import PartLinks
from ravnest.provider.replicas.outgoing import OutgoingTransfers
from ravnest.provider.replicas.transfer import CHUNK_BYTES, send_part
from tests.coordinator.checkpoints.part_states import GRAPH
from tests.net.secure_ends import run
from tests.provider.replicas.part_ends import KEY, METADATA, Keeper, a_state, keepers, pair, until


def content(keeper: Keeper, replica: int, key: str = KEY) -> bytes:
    return b"".join(keeper.files.find(key, replica).chunks())


def test_a_replica_is_on_both_disks_when_it_is_told(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            pair(owner, holder)
            for replica, values in ((4, 10), (9, 300_000)):
                owner.keep(replica, a_state(values, float(replica)))
                told = await owner.hears()
                assert isinstance(told, Replicated)
                assert (told.key, told.replica, told.holder, told.error) == (KEY, replica, "holder", "")
                assert content(owner, replica) == content(holder, replica) and told.seconds > 0
                assert told.size_bytes == len(content(holder, replica))
                tensors, metadata = holder.files.find(KEY, replica).read()
                assert torch.equal(tensors["param:w"], a_state(values, float(replica))["param:w"])
                assert metadata == METADATA

    run(test())


def test_a_replica_has_the_state_of_its_moment_although_the_stage_goes_on_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            pair(owner, holder)
            state = a_state(300_000)
            expected = {name: tensor.clone() for name, tensor in state.items()}
            owner.keep(4, state)
            for tensor in state.values():
                tensor.zero_()
            await owner.hears()
            tensors, _ = holder.files.find(KEY, 4).read()
            assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())

    run(test())


def test_a_stages_own_state_is_frozen_and_written_while_the_stage_goes_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner") as (owner,):
            frozen, state = FrozenStates(), a_state(1 << 20, 5.0)
            owner.keep(4, StateTensors(state, frozen))
            for part in state["param:w"].split(1000):
                frozen.protect(part)
                part.zero_()
            told = await owner.hears()
            assert isinstance(told, Replicated) and not told.error
            tensors, metadata = owner.files.find(KEY, 4).read()
            assert bool((tensors["param:w"] == 5).all()) and metadata == METADATA

    run(test())


def test_a_frozen_state_that_the_disk_refuses_does_not_hold_the_stage_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner") as (owner,):
            monkeypatch.setattr(part_files, "SPARE_BYTES", 1 << 62)
            frozen, state = FrozenStates(), a_state(1 << 20)
            owner.keep(4, StateTensors(state, frozen))
            told = await owner.hears()
            assert isinstance(told, Replicated) and "does not fit on the disk" in told.error
            frozen.protect(state["param:w"])

    run(test())


def test_a_frozen_state_that_comes_when_the_replicas_have_ended_leaves_no_file(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner") as (owner,):
            await owner.parts.close()
            frozen, state = FrozenStates(), a_state(1 << 20)
            owner.keep(4, StateTensors(state, frozen))
            frozen.protect(state["param:w"])
            assert not [*owner.folder.iterdir()]

    run(test())


def test_a_state_that_comes_when_the_replicas_have_ended_leaves_no_file(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner") as (owner,):
            await owner.parts.close()
            owner.keep(4, a_state())
            await asyncio.sleep(0)
            assert not [*owner.folder.iterdir()]

    run(test())


def test_the_holder_may_hear_of_it_later_than_the_owner(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            owner.obey(replicate=Replicate(key=KEY, holder=owner.dials(holder, "rep-1")))
            refused, calls = asyncio.Event(), holder.server.caller

            def caller(*arguments: Any) -> Any:
                try:
                    return calls(*arguments)
                except PeerError:
                    refused.set()
                    raise

            holder.server.caller = caller  # type: ignore[method-assign]
            owner.keep(4, a_state())
            await refused.wait()
            holder.obey(hold=Hold(key=KEY, owner=holder.awaits(owner, "rep-1")))
            told = await owner.hears()
            assert isinstance(told, Replicated) and told.holder == "holder" and not told.error

    run(test())


def test_the_holder_may_be_the_one_that_dials(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            holder.obey(hold=Hold(key=KEY, owner=holder.dials(owner, "rep-1")))
            owner.obey(replicate=Replicate(key=KEY, holder=owner.awaits(holder, "rep-1")))
            owner.keep(4, a_state())
            told = await owner.hears()
            assert isinstance(told, Replicated) and told.holder == "holder"

    run(test())


def test_without_a_holder_the_owner_keeps_it_alone(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner") as (owner,):
            for order in (None, Replicate(key=KEY)):
                if order is not None:
                    owner.obey(replicate=order)
                owner.keep(4, a_state())
                told = await owner.hears()
                assert isinstance(told, Replicated) and (told.holder, told.error) == ("", "")
                assert content(owner, 4)

    run(test())


def test_where_the_line_is_slower_than_the_stage_the_newest_counts(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            owner.obey(replicate=Replicate(key=KEY, holder=owner.awaits(holder, "rep-1")))
            owner.keep(1, a_state())
            # It is on the disk, and waits for the holder.
            await until(lambda: bool(owner.files.held()))
            owner.keep(2, a_state())
            owner.keep(3, a_state())
            passed = await owner.hears()
            assert isinstance(passed, Replicated) and (passed.replica, passed.holder) == (2, "")
            assert "a newer replica came" in passed.error
            holder.obey(hold=Hold(key=KEY, owner=holder.dials(owner, "rep-1")))
            for replica in (1, 3):
                told = await owner.hears()
                assert isinstance(told, Replicated) and (told.replica, told.holder) == (replica, "holder")
            assert [part.replica for part in holder.files.held()] == [3, 1]

    run(test())


def test_a_part_under_way_to_a_holder_that_is_replaced_goes_to_the_next(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "gone", "holder") as (owner, gone, holder):
            owner.obey(replicate=Replicate(key=KEY, holder=owner.awaits(gone, "rep-1")))
            owner.keep(1, a_state())
            await until(lambda: bool(owner.files.held()))
            pair(owner, holder, "rep-2")
            told = await owner.hears()
            assert isinstance(told, Replicated) and (told.replica, told.holder) == (1, "holder")
            assert content(holder, 1) == content(owner, 1)

    run(test())


def test_a_connection_that_breaks_costs_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            pair(owner, holder)
            owner.keep(1, a_state(2_000_000))
            await until(lambda: bool(holder.incoming) and holder.incoming[0].bytes_received > 1 << 20)
            holder.incoming[0].abort()
            told = await owner.hears()
            assert isinstance(told, Replicated) and (told.holder, told.error) == ("holder", "")
            assert content(holder, 1) == content(owner, 1) and len(holder.incoming) == 2

    run(test())


def test_a_holder_that_is_full_says_so_and_takes_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            pair(owner, holder)
            real = part_files.PartWriter.feed

            def full(self: part_files.PartWriter, data: Any) -> None:
                if self._path is not None and self._path.parent == holder.folder:
                    raise RunError("cannot keep a part: No space left on device")
                real(self, data)

            with monkeypatch.context() as patch:
                patch.setattr(part_files.PartWriter, "feed", full)
                owner.keep(1, a_state(500_000))
                told = await owner.hears()
            assert isinstance(told, Replicated) and told.holder == ""
            assert "No space left on device" in told.error and "holder does not keep it" in told.error
            assert content(owner, 1) and [*holder.folder.iterdir()] == []
            owner.keep(2, a_state())
            told = await owner.hears()
            assert isinstance(told, Replicated) and (told.replica, told.holder) == (2, "holder")

    run(test())


def test_an_owner_that_is_full_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            pair(owner, holder)
            with monkeypatch.context() as patch:
                patch.setattr(part_files, "SPARE_BYTES", 1 << 60)
                owner.keep(1, a_state())
                told = await owner.hears()
            assert isinstance(told, Replicated) and "does not fit on the disk" in told.error and told.holder == ""
            owner.keep(2, a_state())
            assert isinstance(told := await owner.hears(), Replicated) and told.holder == "holder"

    run(test())


def test_a_node_may_hold_parts_of_several_stages(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "one", "two", "holder") as (one, two, holder):
            pair(one, holder, "rep-1", "k1")
            pair(two, holder, "rep-2", "k2")
            one.keep(4, a_state(fill=1.0), "k1")
            two.keep(4, a_state(fill=2.0), "k2")
            for owner in (one, two):
                assert isinstance(told := await owner.hears(), Replicated) and told.holder == "holder"
            assert content(holder, 4, "k1") == content(one, 4, "k1")
            assert content(holder, 4, "k2") == content(two, 4, "k2")

    run(test())


# Taking a stage.


def a_deploy(taker: Keeper, giver: Keeper | None, replica: int = 4) -> Deploy:
    order = Deploy(key=KEY, part_key=KEY, part_replica=replica)
    if giver is not None:
        order.giver.CopyFrom(taker.awaits(giver, "give-1"))
    return order


def test_a_part_is_given_to_the_provider_that_takes_the_stage(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "holder", "taker") as (holder, taker):
            holder.files.write(KEY, 4, a_state(2_000_000), METADATA)
            order = a_deploy(taker, holder)
            taker.parts.expect(order)
            holder.obey(give=Give(key=KEY, replica=4, to=holder.dials(taker, "give-1")))
            tensors, metadata = await taker.parts.fetch_part(order)
            assert torch.equal(tensors["param:w"], a_state(2_000_000)["param:w"]) and metadata == METADATA
            assert content(taker, 4) == content(holder, 4), "it is an owner now, and may be asked for it"

    run(test())


def test_the_sender_of_a_part_knows_how_much_has_arrived(tmp_path: Path) -> None:
    async def test() -> None:
        sending = OutgoingTransfers()
        reached: list[int] = []
        async with keepers(tmp_path, "holder", "taker") as (holder, taker):
            # More than may be unanswered at a time.
            part = holder.files.write(KEY, 4, a_state(5_000_000), METADATA)
            client: Any = holder.coordinator
            link = PartLinks(holder.node, client, lambda keepers: None).add(holder.dials(taker, "give-1"))
            taking = asyncio.create_task(taker.parts.fetch_part(a_deploy(taker, holder)))
            with sending.sending("part", KEY, part.size_bytes) as transfer:

                def told(received_bytes: int) -> None:
                    transfer.reached(received_bytes)
                    reached.append(sending.told()[0].done_bytes)

                await send_part(await link.connected(), part, reached=told)
            await taking
            await link.close()
        assert reached == sorted(reached) and len(reached) == part.size_bytes >> 20
        assert 0 < reached[0] <= 2 << 20 and part.size_bytes - reached[-1] < 2 << 20
        assert sending.told() == [] and not sending.moved_within(60.0)

    run(test())


def test_a_taker_whose_disk_is_full_goes_on_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "holder", "taker") as (holder, taker):
            holder.files.write(KEY, 4, a_state(), METADATA)
            monkeypatch.setattr(part_files, "SPARE_BYTES", 1 << 60)
            holder.obey(give=Give(key=KEY, replica=4, to=holder.dials(taker, "give-1")))
            _, metadata = await taker.parts.fetch_part(a_deploy(taker, holder))
            assert metadata == METADATA and "going on in memory" in taker.lines[0] and not taker.files.held()

    run(test())


def test_a_holder_that_takes_the_stage_has_the_part_already(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            pair(owner, holder)
            owner.keep(4, a_state())
            await owner.hears()
            tensors, _ = await holder.parts.fetch_part(a_deploy(holder, None))
            assert torch.equal(tensors["param:w"], a_state()["param:w"])
            with pytest.raises(PeerError, match="there is no part of 'd1-c0-s1' of replica 5 on this disk"):
                await holder.parts.fetch_part(a_deploy(holder, None, 5))

    run(test())


def test_a_giver_without_the_part_says_so_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "holder", "taker") as (holder, taker):
            holder.obey(give=Give(key=KEY, replica=4, to=holder.dials(taker, "give-1")))
            with pytest.raises(PeerError, match=r"holder did not send the part of d1-c0-s1 .*there is no part"):
                await taker.parts.fetch_part(a_deploy(taker, holder))
            failed = await holder.hears()
            assert isinstance(failed, Failed) and (failed.kind, failed.deployment) == ("part", KEY)

    run(test())


def test_a_part_that_is_damaged_at_its_giver_is_not_taken(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "holder", "taker") as (holder, taker):
            path = holder.files.write(KEY, 4, a_state(100_000), METADATA).path
            assert path is not None
            data = path.read_bytes()
            path.write_bytes(data[:-3] + b"\x01\x02\x03")
            holder.obey(give=Give(key=KEY, replica=4, to=holder.dials(taker, "give-1")))
            with pytest.raises(PeerError, match="is damaged on the disk here"):
                await taker.parts.fetch_part(a_deploy(taker, holder))
            assert isinstance(failed := await holder.hears(), Failed) and "damaged" in failed.message
            assert not taker.files.held()

    run(test())


def test_a_giver_that_does_not_come_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "holder", "taker") as (holder, taker):
            monkeypatch.setattr(fetch_part, "SOURCE_SECONDS", 0.05)
            with pytest.raises(PeerError, match=r"there is no link to holder after 0\.05 s"):
                await taker.parts.fetch_part(a_deploy(taker, holder))
            assert not taker.server.keepers, "it may not dial any more either"

    run(test())


def test_a_part_that_is_not_the_one_its_owner_kept_is_not_taken(tmp_path: Path) -> None:
    """The bytes are whole, and their sender says their hash: only the coordinator knows what the owner's was."""

    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder", "taker") as (owner, holder, taker):
            kept = owner.files.write(KEY, 4, a_state(fill=1.0), METADATA)
            holder.files.write(KEY, 4, a_state(fill=2.0), METADATA)
            order = a_deploy(taker, holder)
            order.part_sha256 = kept.sha256
            taker.parts.expect(order)
            holder.obey(give=Give(key=KEY, replica=4, to=holder.dials(taker, "give-1")))
            with pytest.raises(PeerError, match="it is not the part that its owner recorded"):
                await taker.parts.fetch_part(order)
            with pytest.raises(PeerError):
                taker.files.find(KEY, 4)
            # Nor from this machine's disk, where a damaged part may have been left.
            with pytest.raises(PeerError, match="it is not the part that its owner recorded"):
                await holder.parts.fetch_part(Deploy(part_key=KEY, part_replica=4, part_sha256=kept.sha256))
            assert await owner.parts.fetch_part(Deploy(part_key=KEY, part_replica=4, part_sha256=kept.sha256))

    run(test())


def donated(taker: Keeper, *givers: tuple[str, str, Keeper | None]) -> Deploy:
    """An order for a stage that begins with parts of several: their keys, hashes and who has them."""
    order = Deploy(key=KEY)
    for number, (key, sha256, giver) in enumerate(givers):
        source = order.donors.add(key=key, replica=4, sha256=sha256)
        if giver is not None:
            source.giver.CopyFrom(taker.awaits(giver, f"donor-{number}"))
    return order


def test_a_stage_begins_with_parts_of_several_donors_and_of_its_own_disk(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "one", "two", "taker") as (one, two, taker):
            first = one.files.write("k1", 4, a_state(500_000, 1.0), METADATA)
            second = two.files.write("k2", 4, a_state(600_000, 2.0), METADATA)
            third = taker.files.write("k3", 4, a_state(10, 3.0), METADATA)
            order = donated(taker, ("k1", first.sha256, one), ("k2", second.sha256, two), ("k3", third.sha256, None))
            taker.parts.expect(order)
            for number, giver in enumerate((one, two)):
                giver.obey(give=Give(key=f"k{number + 1}", replica=4, to=giver.dials(taker, f"donor-{number}")))
            parts = await taker.parts.fetch_all_parts(order)
            assert [float(tensors["param:w"][0]) for tensors, _ in parts] == [1.0, 2.0, 3.0]
            assert [part.key for part in taker.files.held()] == ["k3"], "it is no owner of what others gave"

    run(test())


def test_one_bad_part_of_several_is_refused_and_the_others_are_let_go(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "one", "two", "taker") as (one, two, taker):
            one.files.write("k1", 4, a_state(fill=1.0), METADATA)
            order = donated(taker, ("k1", "0" * 64, one), ("k2", "", two))
            taker.parts.expect(order)
            one.obey(give=Give(key="k1", replica=4, to=one.dials(taker, "donor-0")))
            # The other never comes, and is not waited for.
            with pytest.raises(PeerError, match=r"one did not send .*: it is not the part that its owner recorded"):
                await taker.parts.fetch_all_parts(order)

    run(test())


def test_another_replica_than_the_one_that_is_wanted_is_not_taken(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "holder", "taker") as (holder, taker):
            holder.files.write(KEY, 5, a_state(), METADATA)
            holder.obey(give=Give(key=KEY, replica=5, to=holder.dials(taker, "give-1")))
            with pytest.raises(PeerError, match="replica 4 is wanted, not 5"):
                await taker.parts.fetch_part(a_deploy(taker, holder))
            assert isinstance(failed := await holder.hears(), Failed) and "replica 4 is wanted" in failed.message

    run(test())


def test_a_giver_cannot_have_memory_taken_that_is_not_there(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "holder", "taker") as (holder, taker):
            taking = asyncio.create_task(taker.parts.fetch_part(a_deploy(taker, holder)))
            await until(lambda: bool(taker.server.keepers))
            answers, _ = await sends(holder, taker, [part_frame(size_bytes=1 << 39)], "give-1")
            assert "does not fit into the" in bytes(answers[-1].tensors["refused"].numpy().data).decode()
            with pytest.raises(PeerError, match="of memory that are free"):
                await taking

    run(test())


def test_a_part_is_uploaded_as_it_is_and_a_missing_one_is_said_to_be(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "holder") as (holder,):
            holder.files.write(KEY, 4, a_state(500_000), METADATA)
            holder.obey(upload_part=UploadPart(key=KEY, replica=4, name="replica-4"))
            await until(lambda: "replica-4" in holder.coordinator.uploads)
            assert holder.coordinator.uploads["replica-4"] == content(holder, 4)
            for replica, name, says in ((5, "replica-5", "there is no part"), (4, "unwanted", "it was not asked for")):
                holder.obey(upload_part=UploadPart(key=KEY, replica=replica, name=name))
                failed = await holder.hears()
                assert isinstance(failed, Failed)
                assert (failed.kind, failed.deployment, failed.replica) == ("part", KEY, replica)
                assert says in failed.message

    run(test())


def test_a_part_that_is_damaged_here_is_not_uploaded(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "holder") as (holder,):
            path = holder.files.write(KEY, 4, a_state(), METADATA).path
            assert path is not None
            path.write_bytes(bytes(len(path.read_bytes())))
            holder.obey(upload_part=UploadPart(key=KEY, replica=4, name="replica-4"))
            assert isinstance(failed := await holder.hears(), Failed) and "is damaged" in failed.message
            assert not holder.coordinator.uploads

    run(test())


# Forbidden frames.


def part_frame(replica: int = 4, data: bytes = b"", name: str = "data", **scalars: Any) -> Frame:
    tensors = {name: torch.frombuffer(bytearray(data), dtype=torch.uint8)} if data else {}
    return Frame(FrameKind.PART, 0, marks=Marks(replica=replica), tensors=tensors, scalars=scalars)


BEGIN = part_frame(size_bytes=8)
GOOD = hashlib.sha256(b"12345678").digest()


async def sends(
    owner: Keeper, holder: Keeper, frames: list[Frame], name: str = "rep-1"
) -> tuple[list[Frame], PeerError | None]:
    """The holder's answers to these frames of its owner, and the end of the link."""
    link = ResumableLink(holder.name)
    carrying = asyncio.create_task(link.carry(await dial_link(holder.address, holder.name, owner.node, name)))
    for frame in frames:
        await link.send(frame)
    answers: list[Frame] = []
    try:
        while not answers or not ("refused" in answers[-1].tensors or "kept" in answers[-1].scalars):
            frame = await link.receive()
            assert frame is not None
            answers.append(frame)
        return answers, None
    except PeerError as error:
        return answers, error
    finally:
        carrying.cancel()
        await asyncio.gather(carrying, return_exceptions=True)


def test_what_an_owner_sends_by_the_rules_is_kept(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            holder.obey(hold=Hold(key=KEY, owner=holder.awaits(owner, "rep-1")))
            frames = [BEGIN, part_frame(data=b"12345678", offset=0), part_frame(data=GOOD, name="sha256")]
            answers, error = await sends(owner, holder, frames)
            assert error is None and "kept" in answers[-1].scalars
            assert content(holder, 4) == b"12345678"

    run(test())


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([BEGIN, part_frame(data=b"12345678", offset=0), part_frame(data=bytes(32), name="sha256")], "arrived damaged"),
        ([BEGIN, part_frame(data=b"1234", offset=0), part_frame(data=GOOD, name="sha256")], "8 bytes after 4"),
        ([BEGIN, part_frame(data=b"123456789", offset=0)], "do not follow on byte 0 of 8"),
        ([BEGIN, part_frame(data=b"1234", offset=4)], "do not follow on byte 0 of 8"),
        ([BEGIN, part_frame(data=b"1234")], "do not follow on byte 0 of 8"),
        ([BEGIN, part_frame()], "without data"),
        ([BEGIN, part_frame(data=bytes(31), name="sha256")], "8 bytes after 0"),
        ([part_frame(size_bytes=1 << 41)], "is more than the"),
        ([part_frame(size_bytes=1 << 39)], "does not fit on the disk"),
        ([part_frame(size_bytes=0)], "did not begin with the size"),
        ([part_frame(size_bytes=-5)], "did not begin with the size"),
        ([part_frame(size_bytes=True)], "did not begin with the size"),
        ([part_frame(size_bytes=2.5)], "did not begin with the size"),
        ([part_frame(0, size_bytes=8)], "did not begin with the size"),
        ([part_frame(1 << 63, size_bytes=8)], "is not the number of a replica"),
        ([part_frame(data=b"1234", offset=0)], "did not begin with the size"),
        ([part_frame(size_bytes=1 << 20), part_frame(data=bytes(CHUNK_BYTES + 1), offset=0)], "262145 bytes as data"),
        ([Frame(FrameKind.FORWARD, 1, tensors={"h": torch.ones(2)})], "a FORWARD frame among parts"),
        ([BEGIN, Frame(FrameKind.PART, 0, marks=Marks(replica=4), tensors={"data": torch.ones(2, 2)})], "without data"),
    ],
)
def test_what_breaks_the_rules_is_refused_and_not_kept(tmp_path: Path, frames: list[Frame], says: str) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            holder.obey(hold=Hold(key=KEY, owner=holder.awaits(owner, "rep-1")))
            answers, error = await sends(owner, holder, frames)
            refused = answers[-1].tensors.get("refused") if answers else None
            text = str(error) if refused is None else bytes(refused.numpy().data).decode()
            assert says in text
            assert not holder.files.held() and [*holder.folder.iterdir()] == []

    run(test())


def test_a_refused_part_is_gone_before_its_sender_hears_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    early: list[bool] = []
    discard, send = part_files.PartWriter.discard, ResumableLink.send

    def slow_disk(writer: part_files.PartWriter) -> None:
        early.append(told.wait(0.1))
        discard(writer)

    async def noted(link: ResumableLink, frame: Frame) -> None:
        if "refused" in frame.tensors:
            told.set()
        await send(link, frame)

    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            holder.obey(hold=Hold(key=KEY, owner=holder.awaits(owner, "rep-1")))
            monkeypatch.setattr(part_files.PartWriter, "discard", slow_disk)
            monkeypatch.setattr(ResumableLink, "send", noted)
            frames = [BEGIN, part_frame(data=b"12345678", offset=0), part_frame(data=bytes(32), name="sha256")]
            answers, _ = await sends(owner, holder, frames)
            assert "refused" in answers[-1].tensors
            assert not early[0] and [*holder.folder.iterdir()] == []

    run(test())


def test_a_part_that_its_stage_cannot_need_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            graph = GRAPH.to_json().encode()
            holder.coordinator.artifacts["g"] = graph
            ref = ArtifactRef(id="g", sha256=hashlib.sha256(graph).hexdigest(), size_bytes=len(graph))
            most = (64 << 20) + 16 * 4 * 4 * 4
            holder.obey(hold=Hold(key=KEY, owner=holder.awaits(owner, "rep-1"), graph=ref))
            answers, _ = await sends(owner, holder, [part_frame(size_bytes=most + 1)])
            reason = bytes(answers[-1].tensors["refused"].numpy().data).decode()
            assert f"is more than the {most:,} its stage can need" in reason

    run(test())


def test_only_the_owner_may_send(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder", "other") as (owner, holder, other):
            holder.obey(hold=Hold(key=KEY, owner=holder.awaits(owner, "rep-1")))
            with pytest.raises(PeerError, match="may not call Link"):
                await dial_link(holder.address, "holder", other.node, "rep-1")
            # With a link of its own here it still has no business on another's.
            holder.obey(hold=Hold(key="k2", owner=holder.awaits(other, "rep-2")))
            link = ResumableLink("holder")
            with pytest.raises(PeerError, match="there is no link 'rep-1' with other here"):
                await link.carry(await dial_link(holder.address, "holder", other.node, "rep-1"))

    run(test())


def test_an_owner_that_was_replaced_is_not_listened_to_any_more(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "before", "owner", "holder") as (before, owner, holder):
            pair(before, holder, "rep-1")
            before.keep(4, a_state())
            assert isinstance(told := await before.hears(), Replicated) and told.holder == "holder"
            pair(owner, holder, "rep-2")
            owner.keep(5, a_state())
            assert isinstance(told := await owner.hears(), Replicated) and told.holder == "holder"
            await until(lambda: holder.server.keepers == {"owner"})
            with pytest.raises(PeerError, match="may not call Link"):
                await dial_link(holder.address, "holder", before.node, "rep-1")

    run(test())


def test_stages_that_are_forgotten_are_not_held_any_more(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            pair(owner, holder)
            for replica in (4, 9):
                owner.keep(replica, a_state())
                await owner.hears()
            holder.obey(forget=Forget(keep=[KEY], before=9))
            await until(lambda: [part.replica for part in holder.files.held()] == [9])
            assert holder.server.keepers == {"owner"}
            holder.obey(forget=Forget())
            await until(lambda: not holder.files.held() and not holder.server.keepers)

    run(test())


def test_an_order_that_cannot_be_is_told_and_nothing_else_happens(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "holder") as (holder,):
            orders: list[dict[str, Any]] = [
                {"hold": Hold(key="../up", owner=holder.awaits(holder, "x"))},
                {"replicate": Replicate(key="a/b", holder=holder.awaits(holder, "x"))},
                {"upload_part": UploadPart(key="../../etc/passwd", replica=1, name="x")},
            ]
            for order in orders:
                holder.obey(**order)
                assert isinstance(failed := await holder.hears(), Failed) and failed.kind == "part"
            assert not holder.server.keepers
            with pytest.raises(PeerError, match="is not the key of a stage"):
                await holder.parts.fetch_part(Deploy(part_key="../x", part_replica=1))

    run(test())


def test_when_a_stay_is_over_its_links_end_and_the_files_stay(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            pair(owner, holder)
            owner.keep(4, a_state())
            await owner.hears()
            await holder.parts.close()
            assert not holder.server.keepers and [part.replica for part in holder.files.held()] == [4]
            owner.keep(5, a_state())  # It goes nowhere, which is no reason to wait for it at the end.

    run(test())


# Not in the way of activations.


def test_a_replica_waits_for_its_turns_and_a_stage_that_waits_for_its_part_does_not(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            pair(owner, holder)
            owner.keep(4, a_state(500_000))
            await owner.hears()
            size = len(content(owner, 4))
            assert owner.budget.asked == [("replica", False, 0.0)]
            assert sum(owner.budget.turns) == size and max(owner.budget.turns) <= CHUNK_BYTES
            owner.budget.turns.clear()
            order = a_deploy(holder, owner)
            owner.obey(give=Give(key=KEY, replica=4, to=owner.dials(holder, "give-1")))
            await holder.parts.fetch_part(order)
            assert owner.budget.asked[1:] == [("part", True, 0.0)] and not owner.budget.turns

    run(test())


def test_an_order_says_what_is_urgent_and_what_the_receiver_can_take(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            holder.obey(hold=Hold(key=KEY, owner=holder.awaits(owner, "rep-1")))
            link = owner.dials(holder, "rep-1")
            owner.obey(replicate=Replicate(key=KEY, holder=link, max_bytes_per_second=50e6))
            owner.keep(4, a_state())
            await owner.hears()
            owner.obey(upload_part=UploadPart(key=KEY, replica=4, name="a", max_bytes_per_second=20e6))
            owner.obey(upload_part=UploadPart(key=KEY, replica=4, name="b", urgent=True))
            await until(lambda: owner.coordinator.uploads.keys() == {"a", "b"})
            order = a_deploy(holder, owner)
            owner.obey(give=Give(key=KEY, replica=4, to=owner.dials(holder, "give-1"), background=True))
            await holder.parts.fetch_part(order)
            assert owner.budget.asked == [
                ("replica", False, 50e6),
                ("part", False, 20e6),
                ("part", True, 0.0),
                ("part", False, 0.0),
            ]

    run(test())


def test_an_upload_that_training_comes_to_wait_for_is_hurried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            pair(owner, holder)
            owner.keep(4, a_state(500_000))
            await owner.hears()
            owner.budget.asked.clear()
            owner.budget.turns.clear()
            begun, hurried, uploads = asyncio.Event(), asyncio.Event(), list[int]()

            async def take(name: str, chunks: AsyncIterator[bytes]) -> None:
                size = 0
                async for piece in chunks:
                    size += len(piece)
                    begun.set()
                    await hurried.wait()
                uploads.append(size)

            monkeypatch.setattr(owner.coordinator, "upload", take)
            order = UploadPart(key=KEY, replica=4, name="a", max_bytes_per_second=1e6)
            owner.obey(upload_part=order)
            await begun.wait()
            order.urgent = True
            owner.obey(upload_part=order)
            await asyncio.sleep(0)
            hurried.set()
            await until(lambda: bool(uploads))
            assert uploads == [len(content(owner, 4))], "it goes on, and no second one begins"
            assert owner.budget.asked == [("part", False, 1e6)] and owner.budget.turns == [25_000]

    run(test())


def test_a_line_that_was_not_measured_is_learned_from_the_answers(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path, "owner", "holder") as (owner, holder):
            pair(owner, holder)
            budget = StateBudget()
            owner.keep(4, a_state(100_000))
            await owner.hears()
            assert "assumed" in budget.rate()[1]
            order = a_deploy(holder, owner)
            holder.parts.expect(order)
            link = PartLinks(owner.node, owner.coordinator, lambda nodes: None).add(  # type: ignore[arg-type]
                owner.dials(holder, "give-1")
            )
            fetching = asyncio.create_task(holder.parts.fetch_part(order))
            await send_part(await link.connected(), owner.files.find(KEY, 4), budget.transfer("part"))
            await fetching
            assert "learned from transfers" in budget.rate()[1]
            await link.close()

    run(test())

"""An owner of rings, driven step by step: its stage changes only when a round counts."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ravnest.averaging.settings import RingSettings
from ravnest.errors import PeerError
from ravnest.net.frames.frames import RingPlace
from ravnest.net.v1.control_pb2 import (
    Average,
    RingAbort,
    RingBegin,
    RingCatchUp,
    RingCommit,
    RingJoined,
    RingMember,
)
from tests.provider.rings.driving import Joins, begin, commit, direct_mean, join, learn, reduced, same
from tests.provider.rings.joined_rings import DEPLOYMENT, GENERATION, SECONDS, JoinedRings, Owner, run

A, B, C = "c0s0", "c1s0", "c2s0"


def joined(count: int = 2, settings: RingSettings | None = None) -> JoinedRings:
    """Clusters of one stage each, so that there is one ring."""
    return JoinedRings([()] * count, settings=settings)


def abort(owner: Owner, round: int = 1) -> None:
    owner.obey(ring_abort=RingAbort(deployment=DEPLOYMENT, round=round, ring=0, reason="given up"))


def mean(states: Mapping[str, Mapping[str, Tensor]], joins: Joins) -> dict[str, Tensor]:
    """The mean of the owners that joined."""
    return direct_mean([states[name] for name in joins], [each.samples for each in joins.values()])


def test_the_mean_is_in_the_stage_when_it_counts_and_never_before_and_once() -> None:
    async def test() -> None:
        async with joined() as swarm:
            owners = list(swarm.owners.values())
            await learn(swarm, 3, 1)
            joins = await join(owners)
            before = {owner.name: owner.state() for owner in owners}
            for owner in owners:
                begin(joins)(owner)
            await reduced(owners)
            assert all(same(owner.state(), before[owner.name]) for owner in owners)
            for owner in owners:
                # An attempt that does not exist, and another round.
                commit(owner, attempt=2)
                commit(owner, round=2)
                abort(owner, round=0)
            for owner in owners:
                begin(joins, attempt=2)(owner)
            await reduced(owners, attempt=2)
            assert all(same(owner.state(), before[owner.name]) for owner in owners)
            for owner in owners:
                commit(owner, attempt=1)
            for owner in owners:
                begin(joins, attempt=3)(owner)
            await reduced(owners, attempt=3)
            assert all(same(owner.state(), before[owner.name]) for owner in owners)
            for owner in owners:
                commit(owner, attempt=3)
                commit(owner, attempt=3)
                told = await owner.hears("ring_applied")
                assert (told.round, told.ring) == (1, 0)
            want = mean(before, joins)
            assert same(owners[0].state(), want, 1e-6) and same(owners[0].state(), owners[1].state())
            # The other orders have been handled by the time that the owners join again, and have changed nothing.
            again = await join(owners, round=2)
            assert same(owners[0].state(), want, 1e-6)
            assert {name: (j.samples, j.committed) for name, j in again.items()} == {A: (0, 1), B: (0, 1)}
            assert all(owner.said.empty() for owner in owners)

    run(test())


def test_a_commit_of_an_attempt_that_has_not_reduced_is_ignored() -> None:
    async def test() -> None:
        async with joined() as swarm:
            a, b = swarm.owners.values()
            await learn(swarm, 1, 1)
            joins = await join([a, b])
            before = a.state()
            commit(a, attempt=0)
            commit(a)
            swarm.hub.hold()
            begin(joins)(a)
            # It has not reduced, so the coordinator cannot have sent this.
            commit(a)
            begin(joins)(b)
            abort(a)
            await join([a], round=2)
            assert same(a.state(), before) and a.said.empty()

    run(test())


def test_a_piece_that_comes_before_the_begin_waits_and_holds_its_sender() -> None:
    async def test() -> None:
        async with joined() as swarm:
            a, b = swarm.owners.values()
            await learn(swarm, 2, 1)
            joins = await join([a, b])
            begin(joins)(a)
            await swarm.hub.first_sent(A)
            waiting = swarm.hub.taken[0]
            with pytest.raises(NotYetError):
                await asyncio.to_thread(waiting.result, 0.1)
            assert b.rings.progress() == [] and a.rings.progress() == [(1, 0, 1, 0)]
            begin(joins)(b)
            await reduced([a, b])
            assert waiting.result(SECONDS) is None

    run(test())


def test_a_piece_that_comes_before_the_snapshot_waits_too() -> None:
    async def test() -> None:
        async with joined() as swarm:
            a, b = swarm.owners.values()
            await learn(swarm, 2, 1)
            joins = {**await join([a])}
            samples = swarm.clusters[1].samples
            joins[B] = RingJoined(samples=samples, norm=1e9, counters=joins[A].counters)
            begin(joins)(a)
            late = await join([b])
            assert late[B].samples == samples
            begin(joins)(b)
            await reduced([a, b])

    run(test())


def test_pieces_after_an_abort_are_dropped_and_the_next_round_brings_all_that_was_learned() -> None:
    async def test() -> None:
        async with joined() as swarm:
            owners = list(swarm.owners.values())
            await learn(swarm, 2, 1)
            joins = await join(owners)
            before = {owner.name: owner.state() for owner in owners}
            swarm.hub.hold()
            for owner in owners:
                begin(joins)(owner)
            await swarm.hub.first_sent(A, B)
            for owner in owners:
                abort(owner)
            again = await join(owners, round=2)
            assert {name: j.samples for name, j in again.items()} == {name: j.samples for name, j in joins.items()}
            swarm.hub.release()
            for piece in swarm.hub.taken:
                assert await asyncio.to_thread(piece.result, SECONDS) is None
            assert [owner.rings.progress() for owner in owners] == [[], []]
            assert all(owner.said.empty() for owner in owners)
            for owner in owners:
                begin(again, round=2)(owner)
            await reduced(owners)
            for owner in owners:
                commit(owner, round=2)
                await owner.hears("ring_applied")
                assert same(owner.state(), mean(before, joins), 1e-6)

    run(test())


def test_pieces_of_the_previous_attempt_do_not_disturb_the_next() -> None:
    async def test() -> None:
        async with joined(3) as swarm:
            a, b, c = swarm.owners.values()
            await learn(swarm, 2, 1, 1)
            joins = await join([a, b, c])
            before = {owner.name: owner.state() for owner in (a, b, c)}
            swarm.hub.hold()
            for owner in (a, b, c):
                begin(joins)(owner)
            await swarm.hub.first_sent(A, B, C)
            two = {name: j for name, j in joins.items() if name != C}
            for owner in (a, b):
                begin(two, attempt=2)(owner)
            await swarm.hub.first_sent(A, B, attempt=2)
            swarm.hub.release()
            await reduced([a, b], attempt=2)
            abort(c)
            for owner in (a, b):
                commit(owner, attempt=1)
                commit(owner, attempt=2)
                await owner.hears("ring_applied")
                assert same(owner.state(), mean(before, two), 1e-6)
            await join([c], round=2)
            assert same(c.state(), before[C])

    run(test())


def test_an_owner_that_is_alone_still_has_the_momentum_of_its_rounds_to_save() -> None:
    async def test() -> None:
        async with joined(2, RingSettings(outer="nesterov", outer_rate=1.0, outer_momentum=0.5)) as swarm:
            owners = list(swarm.owners.values())
            deployed = await owners[0].rings.saved(anchored=True)
            await learn(swarm, 2, 2)
            joins = await join(owners)
            want = mean({owner.name: owner.state() for owner in owners}, joins)
            for owner in owners:
                begin(joins)(owner)
            await reduced(owners)
            for owner in owners:
                commit(owner)
                await owner.hears("ring_applied")
            found = await asyncio.to_thread(owners[0].rings.remembered)
            parameters = [name for name in deployed if name.startswith("param:")]
            assert {f"outer:{name.removeprefix('param:')}" for name in parameters} == found.keys() and found
            for name in parameters:
                moved = want[name] - deployed[name].double()
                assert torch.allclose(
                    found[f"outer:{name.removeprefix('param:')}"].double(), moved, rtol=0.0, atol=1e-6
                )
            await owners[0].rings.close(0.0)
            assert owners[0].rings.remembered() == {}

    run(test())


def test_an_owner_that_was_left_out_catches_up_and_keeps_what_it_learned() -> None:
    async def test() -> None:
        async with joined(3) as swarm:
            a, b, c = swarm.owners.values()
            await learn(swarm, 2, 1, 3)
            first = await join([a, b, c])
            deployed = await c.rings.saved(anchored=True)
            two = {name: j for name, j in first.items() if name != C}
            abort(c)
            for owner in (a, b):
                begin(two)(owner)
            await reduced([a, b])
            for owner in (a, b):
                commit(owner)
                await owner.hears("ring_applied")
            await learn(swarm, 1, 1, 1)
            second = await join([a, b, c], round=2)
            assert {name: (j.samples, j.committed) for name, j in second.items()} == {A: (8, 1), B: (8, 1), C: (32, 0)}
            before = {owner.name: owner.state() for owner in (a, b, c)}
            anchor = await a.rings.saved(anchored=True)
            order = {"deployment": DEPLOYMENT, "round": 2, "ring": 0, "committed": 1}
            # The donation may come before its receiver has been told to expect it.
            a.obey(ring_catch_up=RingCatchUp(**order, node=C, donate=True))
            c.obey(ring_catch_up=RingCatchUp(**order, node=A, donate=False))
            told = await c.hears("ring_reduced")
            assert told.caught_up and told.attempt == 0
            assert same(await c.rings.saved(anchored=True), anchor)
            for owner in (a, b, c):
                begin(second, round=2)(owner)
            await reduced([a, b, c])
            moved = {name: before[C][name] + anchor[name] - deployed[name] for name in anchor}
            assert same({name: c.state()[name] for name in moved}, moved, 1e-6)
            for owner in (a, b, c):
                commit(owner, round=2)
                await owner.hears("ring_applied")
            want = mean({**before, C: {**before[C], **moved}}, second)
            assert same(c.state(), want, 1e-6)
            assert same(a.state(), b.state()) and same(a.state(), c.state())

    run(test())


def test_a_donation_reports_its_pieces_and_ends_when_an_attempt_begins_without_its_receiver() -> None:
    async def test() -> None:
        async with joined(3) as swarm:
            a, b, c = swarm.owners.values()
            await learn(swarm, 2, 1, 3)
            joins = await join([a, b, c])
            c.obey(ring_catch_up=RingCatchUp(deployment=DEPLOYMENT, round=1, ring=0, committed=0, node=A, donate=False))
            piece = RingPlace(1, 0, chunk=0, donation=True)
            # The receiver blocks until it has been told to expect the donation.
            await asyncio.to_thread(c.rings.receiver.take, A, GENERATION, piece, torch.zeros(8, dtype=torch.uint8))
            assert c.rings.progress() == [(1, 0, 0, 1)]
            assert a.rings.receiver.is_wanted(piece), "the receiver may still catch up"
            abort(c)
            two = {name: each for name, each in joins.items() if name != C}
            for owner in (a, b):
                begin(two)(owner)
            await reduced([a, b])
            assert not a.rings.receiver.is_wanted(piece), "the attempt needs the line"

    run(test())


def test_a_donation_that_does_not_fit_or_was_not_ordered_is_refused_and_blamed() -> None:
    async def test() -> None:
        async with joined() as swarm:
            a, b = swarm.owners.values()
            await learn(swarm, 1, 1)
            await join([a, b])
            before = a.state()
            order = RingCatchUp(deployment=DEPLOYMENT, round=1, ring=0, committed=1, node=B)
            a.obey(ring_catch_up=order)
            place = RingPlace(1, 0, donation=True, last=True)
            data = torch.zeros(8, dtype=torch.uint8)
            with pytest.raises(PeerError, match="not awaited"):
                await asyncio.to_thread(a.rings.receiver.take, C, GENERATION, place, data)
            await asyncio.to_thread(a.rings.receiver.take, B, GENERATION, place, data)
            told = await a.hears("ring_failed")
            assert (told.attempt, told.blamed, told.again) == (0, B, False) and "to catch up" in told.reason
            assert same(a.state(), before)

    run(test())


def test_a_line_that_breaks_is_reported_as_worth_another_attempt_which_succeeds() -> None:
    async def test() -> None:
        async with joined(3) as swarm:
            a, b, c = swarm.owners.values()
            await learn(swarm, 2, 1, 1)
            joins = await join([a, b, c])
            before = {owner.name: owner.state() for owner in (a, b, c)}
            a.rings.receiver.on_line_broken(B, "before anything began")
            swarm.hub.hold()
            for owner in (a, b, c):
                begin(joins)(owner)
            await swarm.hub.first_sent(A, B, C)
            a.rings.receiver.on_line_broken("c9s9", "has no part in this")
            for peer in (B, C):
                a.rings.receiver.on_line_broken(peer, f"the line to {peer} broke")
                told = await a.hears("ring_failed")
                assert (told.round, told.attempt, told.blamed, told.again) == (1, 1, "", True)
                assert told.reason == f"the line to {peer} broke"
            swarm.hub.release()
            for owner in (a, b, c):
                begin(joins, attempt=2)(owner)
            await reduced([a, b, c], attempt=2)
            for owner in (a, b, c):
                commit(owner, attempt=2)
                await owner.hears("ring_applied")
                assert same(owner.state(), mean(before, joins), 1e-6)

    run(test())


class EndingLine:
    """A direct line that brings these pieces and then ends or fails."""

    def __init__(self, peer: str, pieces: list[tuple[RingPlace, Tensor]], error: PeerError | None = None) -> None:
        self.peer = peer
        self._pieces: Iterator[tuple[RingPlace, Tensor]] = iter(pieces)
        self._error = error

    def receive(self, room: Callable[[int, RingPlace, int], Tensor | None]) -> tuple[int, RingPlace, Tensor] | None:
        found = next(self._pieces, None)
        if found is None:
            if self._error is not None:
                raise self._error
            return None
        place, data = found
        where = room(GENERATION, place, data.numel())
        if where is None:
            where = data.clone()
        return GENERATION, place, where.copy_(data)


async def begun(swarm: JoinedRings) -> list[tuple[RingPlace, Tensor]]:
    """Begin with two owners; returns the pieces that the second has sent, none of which has been received."""
    a, b = swarm.owners.values()
    await learn(swarm, 2, 1)
    joins = await join([a, b])
    swarm.hub.hold()
    for owner in (a, b):
        begin(joins)(owner)
    await swarm.hub.first_sent(A, B)
    return [(place, data) for sender, _, place, data in swarm.hub.sent if sender == b.name]


def test_a_direct_line_that_ends_in_the_middle_of_an_attempt_is_reported_at_once() -> None:
    async def test() -> None:
        async with joined() as swarm:
            pieces = await begun(swarm)
            a, _ = swarm.owners.values()
            ending: Any = EndingLine(B, pieces)
            await asyncio.to_thread(a.rings.receiver.take_all, ending)
            told = await a.hears("ring_failed")
            assert (told.attempt, told.blamed, told.again) == (1, "", True) and "ended" in told.reason
            # A line that brought no piece of this attempt is not reported.
            for silent in (EndingLine(B, []), EndingLine(B, [(RingPlace(0, 0, attempt=1), pieces[0][1])])):
                line: Any = silent
                await asyncio.to_thread(a.rings.receiver.take_all, line)
            broken: Any = EndingLine(B, [], PeerError("no piece of a ring"))
            await asyncio.to_thread(a.rings.receiver.take_all, broken)
            assert (await a.hears("ring_failed")).reason == "no piece of a ring"
            assert a.said.empty()

    run(test())


def test_an_invalid_piece_is_blamed_on_its_sender() -> None:
    async def test() -> None:
        async with joined() as swarm:
            [(place, data), *_] = await begun(swarm)
            a, _ = swarm.owners.values()
            before = a.state()
            await asyncio.to_thread(a.rings.receiver.take, B, GENERATION, place, torch.full_like(data, 255))
            told = await a.hears("ring_failed")
            assert (told.attempt, told.blamed, told.again) == (1, B, False) and "not finite" in told.reason
            assert same(a.state(), before)

    run(test())


def test_a_piece_that_is_invalid_or_not_from_the_previous_owner_is_refused() -> None:
    async def test() -> None:
        async with joined() as swarm:
            [(place, data), *_] = await begun(swarm)
            a, _ = swarm.owners.values()
            for peer, generation, where, what in (
                ("stranger", GENERATION, place, data),
                (B, GENERATION - 1, place, data),
                (B, GENERATION, RingPlace(1, 7, attempt=1), data),
                (B, GENERATION, place, data.float()),
            ):
                with pytest.raises(PeerError):
                    await asyncio.to_thread(a.rings.receiver.take, peer, generation, where, what)
            assert a.rings.progress() == [(1, 0, 1, 0)] and a.said.empty()

    run(test())


def test_only_the_previous_owner_gets_memory_of_the_reduce_and_only_once_for_a_piece() -> None:
    async def test() -> None:
        async with joined() as swarm:
            await begun(swarm)
            a, b = swarm.owners.values()
            swarm.hub.release()
            # The sum of this owner's own segment comes back to it on the second hop, which is the last.
            await reduced([a, b])
            for owner in (a, b):
                abort(owner)
            joins = await join([a, b], round=2)
            swarm.hub.hold()
            for owner in (a, b):
                begin({n: RingJoined(samples=8, norm=1e9, counters=j.counters) for n, j in joins.items()}, round=2)(
                    owner
                )
            await swarm.hub.first_sent(A, B, round=2)
            place = RingPlace(2, 0, attempt=1, hop=1, segment=0, chunk=0)
            [size] = [d.numel() for _, _, p, d in swarm.hub.sent if p == replace(place, hop=0)]
            assert a.rings.receiver.room("stranger", GENERATION, place, size) is None
            room = a.rings.receiver.room(B, GENERATION, place, size)
            assert room is not None and a.rings.receiver.room(B, GENERATION, place, size) is None
            await asyncio.to_thread(a.rings.receiver.take, B, GENERATION, place, torch.zeros(size, dtype=torch.uint8))
            told = await a.hears("ring_failed")
            assert told.blamed == B and "two lines" in told.reason

    run(test())


def test_counters_become_the_largest_and_count_on_from_there() -> None:
    async def test() -> None:
        async with joined() as swarm:
            a, b = swarm.owners.values()
            await learn(swarm, 3, 1)
            swarm.hub.hold()
            for cluster in swarm.clusters:
                cluster.feed(2, seed=9, round=1)
            joins = {owner.name: (await owner.hears("round_joined")).rings[0] for owner in (a, b)}
            # The forward of the microbatch that carries the round has been counted by then.
            assert [list(j.counters) for j in joins.values()] == [[4, 4], [2, 2]]
            for cluster in swarm.clusters:
                await cluster.finished(2)
            for owner in (a, b):
                begin(joins)(owner)
            swarm.hub.release()
            await reduced([a, b])
            for owner in (a, b):
                commit(owner)
                await owner.hears("ring_applied")
                counters = [t.item() for t in owner.state().values() if not t.is_floating_point()]
                assert counters == [5, 5]

    run(test())


def test_a_ring_of_counters_alone_is_agreed_on_without_a_piece() -> None:
    async def test() -> None:
        async with JoinedRings([(), ()], parts=40) as swarm:
            only = next(plan for plan in swarm.plans if plan.tensors.values == 0)
            a, b = swarm.owners.values()
            await learn(swarm, 3, 1)
            for owner in (a, b):
                owner.obey(average=Average(deployment=DEPLOYMENT, round=1, fragment=only.fragment + 1))
            told = {owner.name: (await owner.hears("round_joined")).rings for owner in (a, b)}
            joins = {name: next(j for j in rings if j.ring == only.ring) for name, rings in told.items()}
            for index, owner in enumerate((a, b)):
                members = [RingMember(node=name, weight=0.5) for name in joins]
                order = {"deployment": DEPLOYMENT, "round": 1, "ring": only.ring, "attempt": 1}
                owner.obey(ring_begin=RingBegin(**order, members=members, counters=[3], index=index))
                assert (await owner.hears("ring_reduced")).ring == only.ring
                owner.obey(ring_commit=RingCommit(**order))
                await owner.hears("ring_applied")
            name = f"buffer:{only.tensors.counters[0].key}"
            assert [owner.state()[name].item() for owner in (a, b)] == [3, 3]

    run(test())

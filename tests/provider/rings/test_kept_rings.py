"""Rings outlive the worker of their stage, and the stage: another provider can take over with the owner's replica."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ravnest.averaging.settings import RingSettings
from ravnest.coordinator.run.orders import ring_order
from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage
from ravnest.engine.worker import StageWorker
from ravnest.net.frames.frames import Frame, RingPlace
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.v1.control_pb2 import Deploy, Neighbour, ProviderMessage
from ravnest.provider.links.stage_link import StageLink
from ravnest.provider.replicas.format import Restored
from ravnest.provider.rings.lines import RingLines, ring_generation
from ravnest.provider.rings.rings import Rings
from ravnest.spec import OptimizerSpec
from tests.provider.rings.driving import begin, commit, join, learn, reduced, same
from tests.provider.rings.joined_rings import DEPLOYMENT, GENERATION, JoinedRings, Owner, captured, run
from tests.provider.rings.wanting import Wanting

Part = tuple[int, dict[str, Tensor], dict[str, str]]
NESTEROV = RingSettings(outer="nesterov", outer_rate=0.7, outer_momentum=0.9)


def calls_of(worker: StageWorker) -> "asyncio.Queue[None]":
    """A queue with an entry for each call that the worker is asked to make from now on."""
    calls: asyncio.Queue[None] = asyncio.Queue()
    call_between_tasks = worker.call_between_tasks

    def note(call: Callable[[], None]) -> None:
        call_between_tasks(call)
        calls.put_nowait(None)

    worker.call_between_tasks = note  # type: ignore[method-assign]
    return calls


def renew(owner: Owner) -> None:
    """Give the stage another worker."""
    assert not owner.worker.runs
    owner.stage.forget()
    before = owner.worker
    owner.worker = StageWorker(owner.stage, owner.pipe, applied=before.applied, counters=before.counters)
    owner.rings.open(owner.worker, cast(Any, owner.lines))
    for work in before.take_pending_calls():
        owner.worker.call_between_tasks(work)
    owner.worker.start()


async def part_of(owner: Owner) -> Part:
    """A part of a replica of this owner's stage."""
    tensors, metadata = owner.stage.state()
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    metadata |= {"applied": json.dumps(owner.worker.applied.numbers()), "samples": str(owner.worker.counters.samples)}
    kept: asyncio.Queue[Part] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    owner.rings.complete(lambda *part: loop.call_soon_threadsafe(kept.put_nowait, part) and None, 1, copies, metadata)
    return await kept.get()


def test_a_round_that_counted_while_the_stage_had_no_worker_is_in_it_afterwards_and_rounds_go_on() -> None:
    async def test() -> None:
        async with JoinedRings([(), ()]) as swarm:
            owners = a, b = list(swarm.owners.values())
            await learn(swarm, 3, 1)
            joins = await join(owners)
            for owner in owners:
                begin(joins)(owner)
            await reduced(owners)
            await asyncio.to_thread(a.worker.stop)
            calls = calls_of(a.worker)
            for owner in owners:
                commit(owner)
            await b.hears("ring_applied")
            await calls.get()
            renew(a)
            await a.hears("ring_applied")
            assert same(a.state(), b.state())
            await learn(swarm, 1, 2)
            again = await join(owners, round=2)
            assert {name: (j.samples, j.committed) for name, j in again.items()} == {"c0s0": (8, 1), "c1s0": (16, 1)}
            for owner in owners:
                begin(again, round=2)(owner)
            await reduced(owners)
            for owner in owners:
                commit(owner, round=2)
                await owner.hears("ring_applied")
            assert same(a.state(), b.state())

    run(test())


def test_a_part_that_is_kept_while_a_round_is_on_its_way_into_the_stage_goes_with_the_new_anchor() -> None:
    async def test() -> None:
        async with JoinedRings([(), ()], settings=NESTEROV) as swarm:
            owners = a, b = list(swarm.owners.values())
            await learn(swarm, 3, 1)
            early = await part_of(a)
            assert Restored.of(*early[1:]).rings[0].committed == 0 and Restored.of(*early[1:]).rings[0].samples == 24
            joins = await join(owners)
            for owner in owners:
                begin(joins)(owner)
            await reduced(owners)
            await asyncio.to_thread(a.worker.stop)
            calls = calls_of(a.worker)
            for owner in owners:
                commit(owner)
            await b.hears("ring_applied")
            await calls.get()
            late = await part_of(a)
            renew(a)
            await a.hears("ring_applied")
            stand = Restored.of(*late[1:])
            assert (stand.rings[0].committed, stand.rings[0].samples) == (1, 0)
            assert same({name: late[1][name] for name in a.state()}, a.state(), 1e-6)
            anchor = await b.rings.saved(anchored=True)
            for name, tensor in stand.anchors.items():
                assert torch.equal(tensor, anchor[f"param:{name}"])
            for name, tensor in stand.outer.items():
                assert torch.equal(tensor, anchor[f"outer:{name}"])
            assert stand.anchors and stand.outer

    run(test())


def taken_over(swarm: JoinedRings, lost: Owner, part: Part) -> Owner:
    """Another machine begins with the part, under the name of the lost owner."""
    graph = captured().graph
    _, tensors, metadata = part
    restored = Restored.of(tensors, metadata)
    weights = {spec.key: tensors[f"param:{spec.key}"].clone() for spec in graph.parameters}
    weights |= {spec.key: tensors[f"buffer:{spec.key}"].clone() for spec in graph.states}
    weights |= {spec.key: captured().weights[spec.key].clone() for spec in graph.constants}
    stage = Stage(graph, weights, StageSettings(optimizer=OptimizerSpec("SGD", {"lr": 0.1}).to_json(), in_flight=2))
    stage.restore(restored.optimizer, metadata)
    order = Deploy(
        deployment=DEPLOYMENT,
        generation=GENERATION + 3,
        ring_generation=GENERATION,
        rings=[ring_order(plan) for plan in swarm.plans],
        averaging_json=NESTEROV.to_json(),
    )
    said: asyncio.Queue[ProviderMessage] = asyncio.Queue()
    rings = Rings(order, stage, lost.name, asyncio.get_running_loop(), said.put_nowait, restored)
    rings.on_failure = lost.pipe.failures.append
    lost.pipe.rings = rings
    worker = StageWorker(stage, lost.pipe, applied=restored.applied)
    owner = Owner(lost.name, stage, worker, rings, lost.pipe, lost.lines, said)
    swarm.owners[lost.name] = owner
    swarm.hub.owners[lost.name] = rings
    cluster = next(c for c in swarm.clusters if lost in c.owners)
    cluster.owners = [owner]
    rings.open(worker, cast(Any, lost.lines))
    worker.start()
    return owner


def test_a_provider_that_takes_a_stage_over_contributes_all_learned_since_the_anchor() -> None:
    async def test() -> None:
        async with JoinedRings([(), ()], settings=NESTEROV) as swarm:
            a, b = swarm.owners.values()
            await learn(swarm, 3, 1)
            part = await part_of(a)
            await asyncio.to_thread(a.worker.stop)
            await a.rings.close(0.0)
            c = taken_over(swarm, a, part)
            await learn(swarm, 1, 1)
            # Its generation is a later one than that of the other cluster: pieces come through all the same.
            owners = [c, b]
            joins = await join(owners)
            assert {name: (j.samples, j.committed) for name, j in joins.items()} == {"c0s0": (32, 0), "c1s0": (16, 0)}
            for owner in owners:
                begin(joins)(owner)
            await reduced(owners)
            for owner in owners:
                commit(owner)
                await owner.hears("ring_applied")
            assert same(c.state(), b.state())
            assert same(await c.rings.saved(anchored=True), await b.rings.saved(anchored=True))

    run(test())


def test_other_owners_get_lines_of_their_own_and_the_lines_to_those_that_stay_are_left_alone() -> None:
    async def test() -> None:
        broken: list[str] = []
        linked: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        lines = RingLines(
            [Neighbour(node="b", link="ab"), Neighbour(node="c", link="ac"), Neighbour(node="d", link="ad")],
            *(1, NodeIdentity.new(), cast(Any, None), Wanting(broken.append)),
        )
        lines.open()

        def end_to(node_id: str) -> StageLink:
            return next(end for end in lines.ends if end.node_id == node_id)

        def watch(node_id: str) -> None:
            async def send(frame: Frame) -> None:
                linked.put_nowait((node_id, frame.piece))

            end_to(node_id).link.send = send  # type: ignore[method-assign]

        stays = end_to("b")
        watch("b")
        lines.change(
            [
                Neighbour(node="b", link="ab", address="elsewhere"),
                Neighbour(node="d", link="ad-2"),
                Neighbour(node="e", link="ae"),
            ]
        )
        assert end_to("b") is stays and sorted(broken) == ["c", "d"]
        assert sorted((end.node_id, end.name) for end in lines.ends) == [("b", "ab"), ("d", "ad-2"), ("e", "ae")]
        watch("e")
        data = torch.ones(4, dtype=torch.uint8)
        # A piece for an owner that is gone is dropped without blocking or blaming anyone.
        lines.put("c", RingPlace(1, 0), data)
        assert not lines.is_direct("c")
        for node_id in ("b", "e"):
            lines.put(node_id, RingPlace(2, 0), data)
        assert {(await linked.get())[0] for _ in range(2)} == {"b", "e"}
        await lines.close(0.0)

    run(test())


def test_the_generation_of_rings_is_that_of_the_whole_deployment() -> None:
    assert ring_generation(Deploy(generation=7, ring_generation=3)) == 3
    assert ring_generation(Deploy(generation=7)) == 7

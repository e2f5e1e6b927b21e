"""A cluster that has lost a stage: the others go on with theirs, another machine with a part of the lost one's."""

import asyncio
import json

import pytest
import torch

from ravnest.engine.inbox.applied import REMEMBERED
from ravnest.errors import GraphError, PeerError
from ravnest.net.v1.control_pb2 import ArtifactRef, Deploy
from ravnest.provider.replicas.format import Restored
from tests.provider.stage.stages import Line, Machine, a_line, run


async def break_with_some_in_flight(line: Line) -> None:
    """The leaf gets no targets any more, and then is gone."""
    for number in (4, 5):
        line.root.give(number, 1)
    while line.root.hosted.report()[0].forwards < 5:
        await asyncio.sleep(0.001)
    await line.leaf.hosted.close()


def test_a_lost_leaf_is_made_again_and_the_run_is_bit_for_bit_the_undisturbed_one() -> None:
    async def test() -> None:
        plain = await a_line()
        await plain.train(range(6), 1)
        line = await a_line()
        await line.train(range(4), 1, replica=(3, 4))
        [part] = line.leaf.parts
        [own] = line.root.parts
        assert part[0] == own[0] == 4
        await break_with_some_in_flight(line)
        before = line.root.hosted.report()[0]
        taker = Machine("c", 1)
        await line.root.keep(line.root.order(2, "c", keep=True))
        await taker.take(taker.order(2, "a", only_constants=True, part_key="k", part_replica=4), part)
        for machine in (line.root, taker):
            ready = machine.hosted.ready()
            told = (ready.deployment, ready.generation, ready.version, list(ready.applied))
            assert told == ("d1", 2, 4, [0, 1, 2, 3])
        again = Line(line.root, taker)
        again.connect(2)
        await again.train(range(4, 6), 2)
        for one, other in ((plain.root, line.root), (plain.leaf, taker)):
            have, want = other.state(), one.state()
            assert have.keys() == want.keys()
            assert all(torch.equal(have[name], tensor) for name, tensor in want.items())
        report = line.root.hosted.report()[0]
        assert (report.updates, sum(report.staleness_counts), report.backwards) == (6, 6, 6)
        assert report.bytes_sent > before.bytes_sent > 0 and report.seconds > before.seconds
        assert report.busy_seconds > before.busy_seconds and line.root.hosted.samples == 48
        assert [loss.microbatch for loss in taker.hosted.report()[0].losses] == [4, 5]
        await plain.close()
        await again.close()

    run(test())


def test_stages_that_are_apart_each_apply_what_they_lack() -> None:
    async def test() -> None:
        line = await a_line()
        await line.train(range(4), 1, replica=(1, 2))
        [part] = line.leaf.parts
        await break_with_some_in_flight(line)
        taker = Machine("c", 1)
        await line.root.keep(line.root.order(2, "c", keep=True))
        await taker.take(taker.order(2, "a", only_constants=True, part_key="k", part_replica=2), part)
        assert list(taker.hosted.ready().applied) == [0, 1] and taker.hosted.ready().version == 2
        again = Line(line.root, taker)
        again.connect(2)
        await again.train(range(2, 6), 2)
        for machine in (line.root, taker):
            ready = machine.hosted.ready()
            assert (ready.version, list(ready.applied)) == (6, list(range(6)))
            counters = {int(t) for name, t in machine.state().items() if name.endswith("num_batches_tracked")}
            assert counters == {6}
        assert [loss.microbatch for loss in taker.hosted.report()[0].losses] == [2, 3, 4, 5]
        await again.close()

    run(test())


def test_a_stage_whose_neighbour_is_gone_can_be_kept_and_what_it_had_to_tell_is_told() -> None:
    async def test() -> None:
        line = await a_line()
        await line.train(range(2), 1)
        # It ends in order, as far as the other can tell: that is a failure of the link, which does not end the stage.
        await line.root.hosted.close()
        failure = await line.leaf.hosted.generation.failure
        assert failure.kind == "link"
        kept = Machine("b", 1)
        kept.hosted, kept.client = line.leaf.hosted, line.leaf.client
        await kept.keep(kept.order(2, "c", keep=True))
        assert not kept.hosted.generation.failure.done() and kept.hosted.neighbours == {"c"}
        await kept.hosted.wait_for_news()
        report = kept.hosted.report()[0]
        assert [loss.microbatch for loss in report.losses] == [0, 1] and report.updates == 2
        root = Machine("c", 0)
        await root.take(root.order(2, "b"))
        again = Line(root, kept)
        again.connect(2)
        with pytest.raises(PeerError, match="a frame of generation 1 came, this stage is of 2"):
            kept.give(2, 1)
        await again.train(range(2, 4), 2)
        assert kept.hosted.report()[0].updates == 4
        await again.close()

    run(test())


def test_a_second_loss_while_the_first_is_being_repaired_is_repaired_too() -> None:
    async def test() -> None:
        line = await a_line()
        await line.train(range(2), 1)
        await line.leaf.hosted.close()
        first = asyncio.create_task(line.root.keep(line.root.order(2, "c", keep=True)))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await line.root.keep(line.root.order(3, "d", keep=True))
        # Not opened: the next loss came before it was.
        await line.root.keep(line.root.order(4, "e", keep=True))
        leaf = Machine("e", 1)
        await leaf.take(leaf.order(4, "a"))
        again = Line(line.root, leaf)
        again.connect(4)
        await again.train(range(2, 4), 4)
        assert line.root.hosted.ready().version == 4
        await again.close()

    run(test())


def test_only_the_stage_that_is_here_and_well_is_kept() -> None:
    async def test() -> None:
        line = await a_line()
        await line.train(range(1), 1)
        for change, why in (
            ({"deployment": "d2"}, "which is not here"),
            ({"stage": 1}, "which is not here"),
            ({"stages": 3}, "which is not here"),
            ({"graph": ArtifactRef(id="graph", sha256="0" * 64)}, "another graph"),
        ):
            order = line.root.order(2, "c", keep=True)
            order.MergeFrom(Deploy(**change))  # type: ignore[arg-type]
            with pytest.raises(PeerError, match=why):
                await line.root.keep(order)
        # It has not been disturbed by that.
        await line.train(range(1, 3), 1)
        parameters = line.leaf.hosted.stage.state_tensors()
        parameters[next(name for name in parameters if name.startswith("param:"))].data.fill_(float("nan"))
        for machine in (line.root, line.leaf):
            machine.give(3, 1)
        failure = await line.leaf.hosted.generation.failure
        assert failure.kind == "not_finite"
        with pytest.raises(PeerError, match="has failed and cannot be kept: the loss of microbatch 3"):
            await line.leaf.keep(line.leaf.order(2, "c", keep=True))
        await line.close()

    run(test())


def test_a_part_that_does_not_fit_is_refused_by_name() -> None:
    async def test() -> None:
        line = await a_line()
        await line.train(range(2), 1, replica=(1, 2))
        [(replica, tensors, metadata)] = line.leaf.parts
        await line.close()
        name = next(name for name in tensors if name.startswith("param:"))
        for broken, why in (
            ({n: t for n, t in tensors.items() if n != name}, "lack 'param:"),
            ({**tensors, name: torch.zeros(3)}, "do not have the shape"),
        ):
            taker = Machine("c", 1)
            with pytest.raises(GraphError, match=why):
                await taker.take(taker.order(2, "a", only_constants=True, part_key="k"), (replica, broken, metadata))

    run(test())


@pytest.mark.parametrize(
    "text", ['{"1": 2}', "[-1]", "[1.5]", '["a"]', "[true]", "7", "[", json.dumps([0] * (REMEMBERED + 1))]
)
def test_what_a_part_says_of_microbatches_is_checked(text: str) -> None:
    with pytest.raises(GraphError, match="cannot be read"):
        Restored.of({}, {"applied": text})
    with pytest.raises(GraphError, match="cannot be read"):
        Restored.of({}, {"rings": json.dumps({"0": text})})

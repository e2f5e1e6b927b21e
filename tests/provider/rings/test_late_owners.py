"""An owner that hears late that a round counts, or whose difference is far longer than the others': what it has learned
counts once, or is dropped with an event, and in the end all clusters have the same parameters."""

import asyncio
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from ravnest.averaging.deadlines import Deadline
from ravnest.averaging.settings import RingSettings
from ravnest.net.v1.control_pb2 import CoordinatorMessage, ProviderMessage
from ravnest.spec import OptimizerSpec
from tests.provider.rings.averaged_swarm import AveragedSwarm, check
from tests.provider.rings.driving import direct_mean, learn
from tests.provider.rings.joined_rings import run

A, B = "c0s0", "c1s0"
SOON = Deadline(usual_seconds=0.05, min_seconds=0.2)


async def late_round(swarm: AveragedSwarm) -> None:
    """A round that counts, without B hearing of it in time."""

    def of_the_commit(node: str, message: CoordinatorMessage) -> bool:
        return node == B and message.WhichOneof("body") == "ring_commit"

    swarm.keep_back = of_the_commit
    usual, swarm.deadlines.reducing = swarm.deadlines.reducing, SOON
    await swarm.average_now(complete=False)
    swarm.deadlines.reducing = usual
    swarm.keep_back = lambda node, message: False


def hears_of_it(swarm: AveragedSwarm) -> None:
    for node, message in swarm.kept:
        swarm.owners[node].rings.obey(message)


def moved(state: Mapping[str, Tensor], was: Mapping[str, Tensor], to: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The progress since `was`, on top of `to`."""
    return {name: tensor + (to[name] - was[name]) for name, tensor in state.items()}


def have_same_state(swarm: AveragedSwarm) -> bool:
    first, *others = [cluster.state() for cluster in swarm.clusters]
    return all(torch.equal(first[name], other[name]) for other in others for name in first)


@pytest.mark.parametrize("when", ["before the next snapshot", "after the next snapshot", "after learning more"])
@pytest.mark.parametrize("outer", ["mean", "nesterov"])
def test_one_that_hears_late_that_a_round_counts_contributes_what_it_learned_once(when: str, outer: str) -> None:
    async def test() -> None:
        settings = RingSettings(outer=outer, outer_rate=1.0, outer_momentum=0.0 if outer == "nesterov" else None)
        async with AveragedSwarm([(), ()], settings=settings) as swarm:
            await learn(swarm, 2, 1, seed=1)
            first = [cluster.state() for cluster in swarm.clusters]
            mean = direct_mean(first, [16, 8])
            await late_round(swarm)
            assert swarm.told("late") == [B]
            assert swarm.kinds()[-1] == "round", "it counts all the same"
            check(swarm.clusters[0].state(), mean)
            check(swarm.clusters[1].state(), first[1])
            await learn(swarm, 1, 2, seed=2)
            second = [cluster.state() for cluster in swarm.clusters]
            if when == "before the next snapshot":
                hears_of_it(swarm)
            swarm.order_snapshots()
            if when == "after learning more":
                # B has taken its snapshot by then and trains on after it.
                await learn(swarm, 0, 1, seed=3)
            third = swarm.clusters[1].state()
            if when != "before the next snapshot":
                hears_of_it(swarm)
            await swarm.over()
            want = direct_mean([second[0], moved(second[1], first[1], mean)], [8, 16])
            check(swarm.clusters[0].state(), want)
            since = moved(third, second[1], want) if when == "after learning more" else want
            check(swarm.clusters[1].state(), since)
            assert have_same_state(swarm) == (when != "after learning more")
            # It claims only the samples since the mean, and has nothing to catch up with.
            assert not {"bounded", "dropped", "behind", "left_out"} & set(swarm.kinds())

    run(test())


def test_a_coordinator_that_is_started_again_ends_the_round_under_way_and_nothing_is_lost_by_it() -> None:
    async def test() -> None:
        async with AveragedSwarm([(), ()]) as swarm:
            await learn(swarm, 2, 1, seed=1)
            await swarm.average_now()
            await learn(swarm, 1, 2, seed=2)
            second = [cluster.state() for cluster in swarm.clusters]
            # Both have the mean, and neither hears what becomes of it.
            swarm.keep_back = lambda node, message: message.WhichOneof("body") == "ring_commit"
            swarm.order_snapshots()
            while len(swarm.kept) < 2:
                await asyncio.sleep(0.01)
            swarm.keep_back = lambda node, message: False
            swarm.another_coordinator()
            assert swarm.rounds.begun == 2
            await swarm.average_now()
            want = direct_mean(second, [8, 16])
            for cluster in swarm.clusters:
                check(cluster.state(), want)
            assert not {"dropped", "behind", "left_out"} & set(swarm.kinds())

    run(test())


def test_one_that_has_not_heard_that_a_round_counts_when_its_coordinator_ends_counts_once() -> None:
    async def test() -> None:
        async with AveragedSwarm([(), ()]) as swarm:
            await learn(swarm, 2, 1, seed=1)
            first = [cluster.state() for cluster in swarm.clusters]
            mean = direct_mean(first, [16, 8])
            await late_round(swarm)
            swarm.another_coordinator()
            check(swarm.clusters[0].state(), mean)
            check(swarm.clusters[1].state(), first[1])
            await learn(swarm, 1, 0, seed=2)
            second = swarm.clusters[0].state()
            await swarm.average_now()
            assert have_same_state(swarm)
            # The mean of the round before contains what B had learned, so it does not count in this one again.
            check(swarm.clusters[1].state(), second)
            assert "dropped" in swarm.kinds()

    run(test())


def test_moments_follow_a_round_that_was_heard_of_late() -> None:
    async def test() -> None:
        adam = OptimizerSpec("Adam", {"lr": 0.01})
        async with AveragedSwarm([(), ()], settings=RingSettings(optimizer_state=True), optimizer=adam) as swarm:
            await learn(swarm, 2, 1, seed=1)
            first = [cluster.state() for cluster in swarm.clusters]
            mean = direct_mean(first, [16, 8])
            await late_round(swarm)
            await learn(swarm, 1, 2, seed=2)
            second = [cluster.state() for cluster in swarm.clusters]
            swarm.order_snapshots()
            hears_of_it(swarm)
            await swarm.over()
            want = direct_mean([second[0], moved(second[1], first[1], mean)], [8, 16])
            steps = {name for name in want if name.endswith(":step")}
            for cluster in swarm.clusters:
                state = {name: tensor for name, tensor in cluster.state().items() if name not in steps}
                check(state, {name: tensor for name, tensor in want.items() if name not in steps})
                assert all((t >= 0).all() for n, t in state.items() if n.endswith("exp_avg_sq"))

    run(test())


def test_one_that_is_late_at_the_end_agrees_after_a_round_that_has_nothing_to_average() -> None:
    async def test() -> None:
        async with AveragedSwarm([(), ()]) as swarm:
            await learn(swarm, 2, 1, seed=1)
            await late_round(swarm)
            assert not have_same_state(swarm)
            hears_of_it(swarm)
            await swarm.average_now(complete=True)
            assert swarm.kinds()[-1] == "round_skipped" and have_same_state(swarm)

    run(test())


def test_one_that_was_disconnected_when_a_round_ended_joins_the_next_one() -> None:
    async def test() -> None:
        async with AveragedSwarm([(), (), ()]) as swarm:
            await learn(swarm, 1, 1, 1, seed=1)
            heard = swarm.rounds.heard

            def until_reduced(node: str, message: ProviderMessage) -> None:
                # C has the mean and is gone before the coordinator hears of it, which costs an attempt.
                if node == "c2s0" and message.WhichOneof("body") == "ring_reduced":
                    swarm.rounds.gone(node, "its line broke")
                else:
                    heard(node, message)

            swarm.rounds.heard = until_reduced  # type: ignore[method-assign]
            await swarm.average_now(complete=False)
            swarm.rounds.heard = heard  # type: ignore[method-assign]
            assert swarm.told("left_out") == ["c2s0"]
            async with asyncio.timeout(5.0):
                await swarm.average_now()
            assert have_same_state(swarm)

    run(test())


async def run_away(swarm: AveragedSwarm, node: str) -> None:
    """Move the parameters of this owner far beyond what a cluster can learn in a round."""
    stage, done = swarm.owners[node].stage, asyncio.Event()
    loop = asyncio.get_running_loop()

    def shift() -> None:
        stage.shift({n: torch.full_like(t, 1e4) for n, t in stage.state_tensors().items() if n.startswith("param:")})
        loop.call_soon_threadsafe(done.set)

    swarm.owners[node].worker.call_between_tasks(shift)
    await done.wait()


@pytest.mark.parametrize("clusters", [2, 3])
def test_one_that_is_far_beyond_the_others_for_three_rounds_goes_on_from_their_mean(clusters: int) -> None:
    async def test() -> None:
        async with AveragedSwarm([()] * clusters, outlier=10.0) as swarm:
            await learn(swarm, *[1] * clusters, seed=1)
            await swarm.average_now()
            await run_away(swarm, A)
            for number in (2, 3):
                await learn(swarm, *[1] * clusters, seed=number)
                before = swarm.clusters[0].state()
                await swarm.average_now(complete=False)
                if number == 2 or clusters == 2:
                    # In the third, one of three catches up with the others before it is judged.
                    check(swarm.clusters[0].state(), before)
                assert swarm.kinds().count("left_out") == number - 1
            await learn(swarm, *[1] * clusters, seed=4)
            others = [cluster.state() for cluster in swarm.clusters[1:]]
            # Two clusters have averaged nothing since the first round; of three, the other two have.
            await swarm.average_now()
            assert swarm.told("dropped") == [A] and swarm.told("left_out") == [A, A]
            assert have_same_state(swarm)
            floats = {n for n, t in others[0].items() if t.is_floating_point()}
            want = direct_mean(others, [1] * len(others))
            check({n: swarm.clusters[0].state()[n] for n in floats}, {n: want[n] for n in floats})
            # From there on it counts like the others.
            await learn(swarm, *[1] * clusters, seed=5)
            want = direct_mean([cluster.state() for cluster in swarm.clusters], [1] * clusters)
            await swarm.average_now()
            check(swarm.clusters[0].state(), want)
            assert swarm.kinds().count("left_out") == 2 and swarm.kinds().count("dropped") == 1

    run(test())

"""Clusters that cut the model anywhere hold the weighted mean after a round: real stages and rings, and the
coordinator's real rounds, in one process."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ravnest.averaging.settings import RingSettings
from ravnest.spec import OptimizerSpec
from tests.provider.rings.averaged_swarm import AveragedSwarm, check
from tests.provider.rings.driving import direct_mean
from tests.provider.rings.joined_rings import places, run

CUTS = st.lists(st.sets(st.sampled_from(places())).map(lambda found: tuple(sorted(found))), min_size=2, max_size=4)
COUNTS = st.lists(st.integers(0, 3), min_size=4, max_size=4).filter(lambda counts: sum(counts[:2]) > 0)


async def blocking(swarm: AveragedSwarm, counts: Sequence[int], rounds: int = 2) -> None:
    """Every cluster trains on this many microbatches, then all average; repeated `rounds` times."""
    for number in range(rounds):
        since = [cluster.samples for cluster in swarm.clusters]
        for c, (cluster, count) in enumerate(zip(swarm.clusters, counts, strict=True)):
            cluster.feed(count, seed=10 * number + c)
            await cluster.finished(count)
        before = [cluster.state() for cluster in swarm.clusters]
        await swarm.average_now()
        samples = [cluster.samples - was for cluster, was in zip(swarm.clusters, since, strict=True)]
        want = direct_mean(before, samples)
        after = [cluster.state() for cluster in swarm.clusters]
        for state in after:
            check(state, want)
            # Equal to the bit.
            assert all(torch.equal(state[name], after[0][name]) for name in state)


async def background(swarm: AveragedSwarm, counts: Sequence[int]) -> None:
    """The round comes with a microbatch, and all clusters train on before they hear that it begins."""
    for c, (cluster, count) in enumerate(zip(swarm.clusters, counts, strict=True)):
        cluster.feed(count, seed=c)
    samples = [cluster.samples for cluster in swarm.clusters]
    swarm.hold()
    number = swarm.announce()
    for c, cluster in enumerate(swarm.clusters):
        cluster.feed(1 + c % 2, seed=50 + c, round=number)
    for c, (cluster, count) in enumerate(zip(swarm.clusters, counts, strict=True)):
        await cluster.finished(count + 1 + c % 2)
    snapshots = [cluster.snapshot(number) for cluster in swarm.clusters]
    before = [cluster.state() for cluster in swarm.clusters]
    swarm.release()
    await swarm.over()
    want = direct_mean(snapshots, samples)
    for cluster, snapshot, was in zip(swarm.clusters, snapshots, before, strict=True):
        # The mean, plus what was learned and counted since the snapshot.
        check(cluster.state(), {name: want[name] + (was[name] - snapshot[name]) for name in was})
    # A round with nothing in flight gives all clusters the same parameters.
    before = [cluster.state() for cluster in swarm.clusters]
    await swarm.average_now()
    want = direct_mean(before, [cluster.samples - was for cluster, was in zip(swarm.clusters, samples, strict=True)])
    for cluster in swarm.clusters:
        check({n: t for n, t in cluster.state().items() if n.startswith("param:")}, _parameters(want))


def _parameters(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith("param:")}


@settings(max_examples=15)
@given(CUTS, COUNTS, st.sampled_from([1, 3]))
def test_after_a_round_with_nothing_in_flight_all_hold_the_weighted_mean(
    cuts: list[tuple[int, ...]], counts: list[int], parts: int
) -> None:
    async def test() -> None:
        async with AveragedSwarm(cuts, parts=parts) as swarm:
            await blocking(swarm, counts[: len(cuts)])

    run(test())


@settings(max_examples=15)
@given(CUTS, COUNTS, st.sampled_from([1, 3]))
def test_after_a_round_in_the_background_all_hold_the_weighted_mean_and_what_they_learned_since(
    cuts: list[tuple[int, ...]], counts: list[int], parts: int
) -> None:
    async def test() -> None:
        async with AveragedSwarm(cuts, parts=parts) as swarm:
            await background(swarm, counts[: len(cuts)])

    run(test())


@pytest.mark.parametrize("optimizer", [OptimizerSpec("Adam", {"lr": 0.01}), OptimizerSpec("SGD", {"lr": 0.1})])
def test_moments_are_averaged_with_the_parameters_where_that_is_asked_for(optimizer: OptimizerSpec) -> None:
    async def test() -> None:
        cuts = [(places()[0],), (places()[-1],), ()]
        asked = RingSettings(optimizer_state=True)
        async with AveragedSwarm(cuts, optimizer=optimizer, settings=asked) as swarm:
            for c, cluster in enumerate(swarm.clusters):
                cluster.feed(1 + c, seed=c)
                await cluster.finished(1 + c)
            before = [cluster.state() for cluster in swarm.clusters]
            await swarm.average_now()
            want = direct_mean(before, [cluster.samples for cluster in swarm.clusters])
            for cluster, was in zip(swarm.clusters, before, strict=True):
                # The number of steps of an optimizer is not averaged.
                own = {name: tensor for name, tensor in was.items() if name.endswith(":step")}
                check(cluster.state(), {**want, **own})

    run(test())

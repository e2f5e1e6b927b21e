"""A coordinator that was killed and started again goes on with the stages as they are; with simulated providers."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from ravnest import Pipeline
from ravnest.coordinator.plan.prepared_job import PreparedJob
from ravnest.net.v1.control_pb2 import CoordinatorMessage, RingStanding
from tests.e2e.jobs import a_job, every_updates
from tests.swarms.scripted import Play, Run

Scene = Callable[[Run], Awaitable[None]]


def resumed_stages(run: Run) -> list[int]:
    """How many stages go on, by resume."""
    return [event["stages"] for event in run.events("resumed_swarm") if event["source"] == "stages"]


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_or_done_twice_whenever_it_was_killed(
    play: Play,
    prepared: PreparedJob,
    seed: int,
    accumulate: int,
) -> None:
    pipeline = Pipeline(in_flight=4, accumulate=accumulate)
    of = replace(prepared, job=a_job(pipeline=pipeline, checkpoint=every_updates(1000)))
    chance = random.Random(seed)
    noted, killed = sorted(chance.sample(range(4, 36), 2))

    async def scene(run: Run) -> None:
        run.remember()
        for name in "abc":
            run.swarm.join(name)
        await run.deploy(3)
        run.at[noted] = run.note
        await run.feed(killed)
        before = [run.swarm.providers[node].held for node in run.stages()]
        await run.begin_again(3)
        assert resumed_stages(run) == [3]
        after = [run.swarm.providers[node].held for node in run.stages()]
        assert [each and each.state for each in after] == [each and each.state for each in before]
        # And once more, with what is in flight by then.
        run.note()
        await run.feed(44)
        await run.begin_again(3)
        await run.train(60)
        run.check(60)

    play(scene, seed, of)


@pytest.mark.parametrize("seed", range(4))
def test_each_cluster_counts_what_it_has_applied(play: Play, prepared: PreparedJob, seed: int) -> None:
    async def scene(run: Run) -> None:
        run.swarm.in_order = False
        run.remember()
        for name in "abcd":
            run.swarm.join(name)
        await run.deploy(4, 2)
        run.at[10] = run.note
        await run.feed(31)
        await run.begin_again(4, 2)
        assert len(run.deployment.clusters.whole) == 2
        # Where rounds stand is not known before all that was applied has been counted.
        assert run.dispatcher.claims
        await run.train(60)
        run.check(60)
        assert not run.dispatcher.claims
        applied = [
            [set(run.swarm.providers[node].held.state.applied) for node in cluster.nodes]  # type: ignore[union-attr]
            for cluster in run.deployment.clusters.all
        ]
        assert all(stages[0] == stages[1] for stages in applied)
        assert applied[0][0] | applied[1][0] == set(range(60)) and not applied[0][0] & applied[1][0]

    play(scene, seed, prepared)


def test_what_was_changing_is_not_taken_over(play: Play, prepared: PreparedJob) -> None:
    async def scene(run: Run) -> None:
        run.remember()
        for name in "abcd":
            run.swarm.join(name)
        await run.deploy(3)
        run.note()
        # The one that takes the stage never does.
        run.swarm.providers["d"].obeys = lambda message: not message.HasField("deploy")
        await run.feed(20)
        run.swarm.kill(run.stages()[1])
        await run.event("failover_begun")
        run.swarm.providers["d"].obeys = lambda message: True
        await run.begin_again(3)
        [why] = [event["reason"] for event in run.emitted if event["kind"] == "not_taken_over"]
        assert "the run was being redeployed" in why
        await run.train(50)
        run.check(50)

    play(scene, 1, prepared)


def test_an_owner_that_reports_an_impossible_round_costs_the_resume_and_nothing_else(
    play: Play, prepared: PreparedJob
) -> None:
    async def scene(run: Run) -> None:
        run.swarm.in_order = False
        run.remember()
        for name in "abcd":
            run.swarm.join(name)
        await run.deploy(4, 2)
        await run.feed(10)
        run.note()
        run.swarm.providers[run.stages()[0]].standings = [RingStanding(ring=0, committed=0, round=10**6)]
        await run.begin_again(4, 2)
        [refused] = run.events("not_taken_over")
        assert "round 1000000" in refused["reason"]
        # Nothing of the resume that was undone stops rounds, replicas or checkpoints of the new deployment.
        assert not run.dispatcher.claims
        await run.train(40)
        run.check(40)

    play(scene, 3, prepared)


@pytest.mark.usefixtures("often")
def test_without_one_of_them_it_goes_on_as_it_lay_from_what_was_kept(play: Play, prepared: PreparedJob) -> None:
    async def scene(run: Run) -> None:
        run.remember()
        for name in "abcd":
            run.swarm.join(name)
        await run.deploy(3)
        await run.feed(20)
        run.note()
        root, gone, leaf = run.stages()
        await run.replicas()
        run.swarm.kill(gone)
        await run.begin_again(3)
        [why] = [event["reason"] for event in run.emitted if event["kind"] == "not_taken_over"]
        assert f"{gone} does not hold stage 1 any more, and there is no other provider" in why
        assert run.stages() == [root, "d" if gone != "d" else "a", leaf], "the others hold what they held"
        await run.train(50)
        assert run.swarm.violations == []

    play(scene, 2, prepared)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("seed", range(3))
def test_a_cluster_that_lacks_a_stage_gets_it_while_the_others_go_on(
    play: Play,
    prepared: PreparedJob,
    seed: int,
) -> None:
    async def scene(run: Run) -> None:
        run.swarm.in_order = False
        run.remember()
        for name in "abcde":
            run.swarm.join(name)
        await run.deploy(4, 2)
        await run.feed(30)
        run.note()
        whole, broken = run.deployment.clusters.all
        kept, gone = broken.nodes[seed % 2], broken.nodes[1 - seed % 2]
        [spare] = set("abcde") - {*whole.nodes, *broken.nodes}
        run.swarm.kill(gone)
        await run.begin_again(4, 2)
        assert resumed_stages(run) == [3]
        await run.feed(45)
        await run.event("failover")
        await run.train(60)
        [begun] = [event for event in run.emitted if event["kind"] == "failover_begun"]
        assert (begun["lost"], begun["taker"], begun["source"]) == (gone, spare, "rings")
        assert "failover" in run.kinds() and "cluster_lost" not in run.kinds()
        now = {node for cluster in run.deployment.clusters.whole for node in cluster.nodes}
        assert now == {*whole.nodes, kept, spare}
        assert run.swarm.violations == []
        assert run.ledger.counts()["fed"] == run.ledger.counts()["completed"] == 60

    play(scene, seed, prepared)


def test_a_provider_that_cannot_go_on_with_its_stage_does_not_hold_the_run_up(
    play: Play,
    prepared: PreparedJob,
) -> None:
    async def scene(run: Run) -> None:
        run.remember()
        for name in "abc":
            run.swarm.join(name)
        await run.deploy(3)
        await run.feed(20)
        run.note()
        liar = run.swarm.providers[run.stages()[1]]

        def forgets(message: CoordinatorMessage) -> bool:
            if message.deploy.keep:
                liar.held = None
            return True

        liar.obeys = forgets
        await run.begin_again(3)
        [why] = [event["reason"] for event in run.emitted if event["kind"] == "not_taken_over"]
        assert f"{liar.node_id} is gone" in why
        await run.train(50)
        assert run.swarm.violations == []
        assert run.ledger.counts()["fed"] == run.ledger.counts()["completed"] == 50

    play(scene, 3, prepared)

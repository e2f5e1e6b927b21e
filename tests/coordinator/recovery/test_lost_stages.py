"""Losses at every moment of a run, with a real coordinator and simulated providers."""

import asyncio
import random
from dataclasses import replace
from functools import partial

import pytest

from ravnest import Pipeline
from ravnest.coordinator.feed.feeder import EvalBatch, EvalEnd
from ravnest.coordinator.plan.prepared_job import PreparedJob
from ravnest.coordinator.recovery import membership_changes as changing
from ravnest.errors import TrainingError
from ravnest.net.frames.frames import Frame
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Failed, Leave
from ravnest.planner.recovery.worth_it import Judgement
from tests.e2e.jobs import a_job, every_updates
from tests.swarms.scripted import TIMEOUTS, Play, Provider, Run, State, within


@pytest.fixture(scope="module")
def accumulating(prepared: PreparedJob) -> PreparedJob:
    """Four microbatches make an update."""
    return replace(prepared, job=a_job(pipeline=Pipeline(in_flight=4, accumulate=4), checkpoint=every_updates(10)))


def test_an_undisturbed_run_is_whole(play: Play) -> None:
    async def scene(run: Run) -> None:
        for name in "abc":
            run.swarm.join(name)
        await run.deploy(3)
        await run.train(50)
        run.check(50)

    play(scene)


def test_a_standby_takes_a_lost_stage(play: Play) -> None:
    async def scene(run: Run) -> None:
        for name in "abcd":
            run.swarm.join(name)
        await run.deploy(3)
        run.at[20] = lambda: run.swarm.kill(run.stages()[1])
        await run.train(50)
        run.check(50)
        assert "failover" in run.kinds()

    play(scene)


@pytest.mark.usefixtures("often")
def test_two_neighbours_that_are_lost_at_once_cost_no_update_that_is_not_made_again(play: Play) -> None:
    """The next stage holds the parts of the one before: of that one nobody has anything but the checkpoint."""

    async def scene(run: Run) -> None:
        for name in "abcde":
            run.swarm.join(name)
        await run.deploy(3)
        await run.feed(20)
        await run.replicas()
        # Standbys keep no parts of these.
        for name in "de":
            run.swarm.providers[name].parts.clear()
        for name in run.stages()[:2]:
            run.swarm.kill(name)
        await run.train(50)
        run.check(50)

    play(scene)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_whoever_is_lost_while_microbatches_are_fed_again_is_replaced_too(play: Play, stage: int) -> None:
    async def scene(run: Run) -> None:
        for name in "abcdef":
            run.swarm.join(name)
        await run.deploy(3)
        cluster = run.deployment.clusters.all[0]

        def lose_another() -> None:
            if cluster.is_forming and cluster.sent:
                run.swarm.on_feed = lambda: None
                run.swarm.kill(cluster.nodes[stage])

        await run.feed(20)
        run.swarm.on_feed = lose_another
        run.swarm.kill(run.stages()[1])
        await run.train(50)
        run.check(50)

    play(scene)


def test_whoever_is_lost_right_after_the_run_was_deployed_is_replaced(play: Play) -> None:
    async def scene(run: Run) -> None:
        for name in "abcd":
            run.swarm.join(name)
        run.swarm.on_tell = lambda node, kind: kind == "forget" and run.swarm.kill("b")
        await run.deploy(3)
        await run.train(20)
        run.check(20)

    play(scene)


@pytest.mark.usefixtures("often")
def test_who_leaves_gives_its_part_to_whoever_takes_its_stage(play: Play) -> None:
    async def scene(run: Run) -> None:
        for name in "abc":
            run.swarm.join(name)
        await run.deploy(3)
        await run.feed(20)
        await run.replicas()
        run.swarm.join("d")
        run.swarm.providers[run.stages()[1]].say(leave=Leave(reason="bye"))
        await run.train(50)
        run.check(50)
        assert "handed_over" in run.kinds()

    play(scene)


def test_a_provider_that_wants_to_leave_before_there_is_anything_to_leave_is_let_go(play: Play) -> None:
    async def scene(run: Run) -> None:
        run.swarm.join("a")
        deploying = asyncio.create_task(run.deploy(3))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        run.swarm.providers["a"].say(leave=Leave(reason="bye"))
        for name in "bcd":
            run.swarm.join(name)
        await deploying
        await run.train(20)
        run.check(20)
        assert not run.swarm.providers["a"].alive

    play(scene)


def test_a_run_that_goes_back_while_the_data_is_being_read_goes_on(play: Play) -> None:
    """Nothing was saved and nobody stands by: all is done again, by those who are left."""

    async def scene(run: Run) -> None:
        for name in "abc":
            run.swarm.join(name)
        await run.deploy(3)
        await run.feed(20)
        run.swarm.kill("b")
        await run.event("reformed")
        await run.train(50)
        run.check(50)

    play(scene)


def test_an_evaluation_sees_the_weights_after_all_that_was_fed_again(play: Play) -> None:
    async def scene(run: Run) -> None:
        for name in "abcd":
            run.swarm.join(name)
        await run.deploy(3)
        lost = False

        def lose_the_leaf() -> None:
            nonlocal lost
            cluster = run.deployment.clusters.all[0]
            if cluster.evaluating and not lost:
                lost = True
                run.swarm.kill(cluster.nodes[2])

        run.swarm.on_feed = lose_the_leaf
        await run.train(30, evaluate=3)
        run.check(30)
        assert lost and {count for _, count in run.swarm.evaluated} == {30}

    play(scene)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_whoever_is_lost_while_the_end_is_saved_is_replaced_and_that_is_saved(play: Play, stage: int) -> None:
    async def scene(run: Run) -> None:
        for name in "abcd":
            run.swarm.join(name)
        await run.deploy(3)
        await run.feed(20)
        victim = run.stages()[stage]
        run.swarm.on_tell = lambda node, kind: kind == "save" and run.swarm.kill(victim)
        await run.train(20)
        run.check(20)
        assert run.saved is not None and run.saved.updates == 20

    play(scene)


def test_a_machine_that_is_worth_it_is_used_and_nothing_is_lost_by_that(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changing, "worth_it", lambda *plans: Judgement(True, 1.0, "it is"))

    async def scene(run: Run) -> None:
        run.swarm.join("a")
        await run.deploy(None, None)
        await run.feed(20)
        # In two clusters, each has some of them.
        run.swarm.in_order = False
        run.swarm.join("b")
        while "reformed" not in run.kinds():
            await run.feed(run.place.microbatches + 1)
            await asyncio.sleep(0)
        total = run.place.microbatches + 20
        await run.train(total, evaluate=2)
        run.check(total)
        assert run.swarm.evaluated

    play(scene)


def test_one_that_is_back_before_it_was_missed_takes_its_own_stage_and_no_other(play: Play) -> None:
    async def scene(run: Run) -> None:
        for name in "abc":
            run.swarm.join(name)
        await run.deploy(3)
        await run.feed(20)
        run.swarm.kill("c")
        await run.event("lost")
        # Nobody knows yet that it was away.
        run.swarm.kill("a")
        run.swarm.join("a")
        run.swarm.join("c")
        await run.train(40)
        run.check(40)

    play(scene)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_at_whatever_moment_nothing_is_lost_and_nothing_hangs(play: Play, seed: int) -> None:
    """Losses, failures, leaves and returns, drawn from a seed: at least two machines are there at any time."""
    play(partial(disturbed_run, seed), seed)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("seed", range(8))
def test_so_it_is_where_several_microbatches_make_an_update(play: Play, accumulating: PreparedJob, seed: int) -> None:
    play(partial(disturbed_run, seed), seed, accumulating)


async def disturbed_run(seed: int, run: Run) -> None:
    draw, hop = random.Random(seed), run.swarm.hop
    moments = sorted(draw.randrange(1000) for _ in range(6))

    async def disturbed() -> None:
        moments[:] = [moment - 1 for moment in moments]
        while moments and moments[0] <= 0:
            moments.pop(0)
            asyncio.get_running_loop().call_soon(disturb, run, draw)
        await hop()

    for name in "abcd":
        run.swarm.join(name)
    run.swarm.hop = disturbed  # type: ignore[method-assign]
    await run.deploy(3)
    await run.train(100, evaluate=2)
    run.check(100)


def disturb(run: Run, draw: random.Random) -> None:
    providers = run.swarm.providers
    alive = [provider for provider in providers.values() if provider.alive]
    gone = [provider for provider in providers.values() if not provider.alive]
    what = draw.choice(["kill", "kill", "leave", "fail", "link", "return"])
    if what == "kill" and len(alive) > 2:
        draw.choice(alive).kill()
    elif what == "leave" and len(alive) > 3:
        draw.choice(alive).say(leave=Leave(reason="somebody wants to play"))
    elif what in ("fail", "link"):
        provider = draw.choice(alive)
        if provider.held is not None:
            order = provider.held.order
            kind = "link" if what == "link" else "error"
            failed = Failed(
                deployment=order.deployment, kind=kind, message="made up", microbatch=-1, generation=order.generation
            )
            provider.say(failed=failed)
    elif gone:
        provider = draw.choice(gone)
        run.swarm.join(provider.node_id, provider.parts)


def test_a_microbatch_that_no_stage_can_take_ends_the_run_and_says_so(play: Play) -> None:
    async def scene(run: Run) -> None:
        for name in "abcd":
            fail_with(run.swarm.join(name), 10)
        await run.deploy(3)
        with pytest.raises(TrainingError, match=r"index out of range; microbatch 10 fails wherever it is tried"):
            await run.train(50)

    play(scene)


def fail_with(provider: Provider, microbatch: int) -> None:
    def passes(frame: Frame) -> bool:
        if frame.microbatch == microbatch and provider.held is not None and frame.marks.train:
            order = provider.held.order
            failed = Failed(deployment=order.deployment, kind="error", message="index out of range")
            failed.microbatch, failed.generation = microbatch, order.generation
            provider.say(failed=failed)
            return False
        return True

    provider.passes = passes


@pytest.mark.parametrize("others", ["cd", "c"])
def test_a_machine_that_can_build_no_stage_is_done_without(play: Play, others: str) -> None:
    async def scene(run: Run) -> None:
        for name in "ab" + others:
            run.swarm.join(name)
        build_nothing(run.swarm.providers["b"])
        await run.deploy(3)
        await run.train(20)
        run.check(20)
        assert "b" not in run.stages() and run.kinds().count("stage_failed") <= 3

    play(scene)


def test_a_stage_that_nobody_can_build_ends_a_run_that_nobody_can_join(play: Play) -> None:
    async def scene(run: Run) -> None:
        run.swarm.most = 2
        for name in "ab":
            build_nothing(run.swarm.join(name))
        with pytest.raises(TrainingError, match="a failed: no such operator"):
            await run.deploy(2)

    play(scene)


def build_nothing(provider: Provider) -> None:
    def obeys(message: CoordinatorMessage) -> bool:
        if message.HasField("deploy"):
            order = message.deploy
            failed = Failed(deployment=order.deployment, kind="deploy", message="no such operator", microbatch=-1)
            failed.generation = order.generation
            provider.say(failed=failed)
            return False
        return True

    provider.obeys = obeys


@pytest.mark.usefixtures("often")
def test_a_holder_that_gives_another_part_is_found_out_and_the_part_comes_from_elsewhere(play: Play) -> None:
    """The next stage has the part as well as the one that lies: of two, the one without a stage is asked first."""

    async def scene(run: Run) -> None:
        for name in "abcd":
            run.swarm.join(name)
        await run.deploy(3)
        await run.feed(20)
        await run.replicas()
        liar = run.swarm.providers["d"]
        liar.parts = {key: State(99) for key in liar.parts}
        lied = dict(liar.parts)
        assert lied
        run.swarm.kill(next(node for node, stage in run.deployment.stage_of.items() if kept_for(run, "d", stage)))
        await run.train(50)
        run.check(50)
        assert "part_missing" in run.kinds()

    play(scene)


def kept_for(run: Run, holder: str, stage: int) -> bool:
    formation = run.deployment
    return formation.replicas.holder(formation.clusters.all[0], stage) == holder


class Damaged(dict[tuple[str, int], State]):
    """Parts on a disk that gives back something else than was written to it."""

    def __getitem__(self, key: tuple[str, int]) -> State:
        super().__getitem__(key)
        return State(99)


@pytest.mark.usefixtures("often")
def test_nobody_begins_with_a_bad_part_and_the_next_who_has_it_is_asked(play: Play) -> None:
    async def scene(run: Run) -> None:
        for name in "abc":
            run.swarm.join(name)
        await run.deploy(3)
        await run.feed(20)
        await run.replicas()
        # Nobody stands by: the run is formed anew, and what comes for that is checked.
        liar = run.swarm.providers["a"]
        liar.parts = Damaged(liar.parts)
        run.swarm.kill("c")
        await run.train(50)
        run.check(50)
        assert "part_missing" in run.kinds()
        [reformed] = run.events("reformed")
        assert reformed["source"] == "replica"

    play(scene)


@pytest.mark.usefixtures("often")
def test_a_run_that_had_to_shrink_is_again_as_large_as_was_asked_once_enough_are_there(play: Play) -> None:
    async def scene(run: Run) -> None:
        for name in "abc":
            run.swarm.join(name)
        await run.deploy(3)
        await run.feed(20)
        await run.replicas()
        run.swarm.kill(run.stages()[1])
        await run.event("reformed")
        assert len(run.stages()) == 2
        run.swarm.join("d")
        await within(run.train(60))
        run.check(60)
        assert len(run.stages()) == 3 and run.kinds().count("reformed") == 2

    play(scene)


@pytest.mark.usefixtures("often")
def test_only_the_links_of_now_are_relayed_however_often_a_cluster_was_formed(play: Play) -> None:
    async def scene(run: Run) -> None:
        for name in "abcd":
            run.swarm.join(name)
        await run.deploy(3)
        await run.feed(10)
        most = len(run.swarm.links)
        for fed in range(20, 120, 10):
            victim = run.stages()[fed // 10 % 3]
            run.swarm.kill(victim)
            await run.feed(fed)
            run.swarm.join(victim)
        await run.train(120)
        run.check(120)
        # Between the stages, to the holders, and for parts that were last given.
        assert run.kinds().count("failover") >= 5 and len(run.swarm.links) <= most + 3
        generation = run.deployment.clusters.all[0].generation
        between = [name for name in run.swarm.links if "replica" not in name]
        assert all(name.split("-")[1] == str(generation) for name in between)

    play(scene)


def test_what_a_lost_cluster_left_is_not_fed_to_a_run_that_has_gone_back_behind_it(play: Play) -> None:
    async def scene(run: Run) -> None:
        run.swarm.in_order = False
        for name in "ab":
            run.swarm.join(name)
        await run.deploy(2, 2)
        await run.feed(20)
        # Nothing of it comes back.
        for name in "ab":
            run.swarm.providers[name].passes = lambda frame: False
        for number in range(21, 26):
            feeding = asyncio.create_task(run.feed(number))
            await asyncio.wait({feeding}, timeout=0.05)
            if not feeding.done():
                break
        run.swarm.kill("a")
        await run.event("cluster_lost")
        run.swarm.kill("b")
        await run.event("waiting")
        run.swarm.join("c")
        run.swarm.in_order = True
        await feeding
        await run.train(50)
        run.check(50)

    play(scene)


@pytest.mark.usefixtures("often")
def test_a_provider_that_never_reports_its_stage_ready_is_given_up(play: Play) -> None:
    """It stays connected, takes the first stage that is lost, and never says that the stage is ready."""

    async def scene(run: Run) -> None:
        for name in "abcd":
            run.swarm.join(name)
        await run.deploy(3)
        await run.feed(20)
        for name in "d":
            run.swarm.providers[name].obeys = lambda message: not message.HasField("deploy")
        run.swarm.kill("b")
        run.swarm.join("e")
        await run.train(50)
        run.check(50)
        assert "d" in [event["provider"] for event in run.events("lost")]

    play(scene, timeouts=replace(TIMEOUTS, stage_ready_seconds=0.3))


def test_who_is_left_of_a_lost_cluster_takes_a_stage_of_another(play: Play) -> None:
    async def scene(run: Run) -> None:
        run.swarm.in_order = False
        for name in "abcd":
            run.swarm.join(name)
        await run.deploy(4, 2)
        await run.feed(20)
        kept, lost = run.deployment.clusters.all
        left = lost.nodes[1]
        run.swarm.kill(lost.nodes[0])
        await run.event("cluster_lost")
        run.swarm.kill(kept.nodes[1])
        await run.event("failover")
        await run.train(60)
        run.check(60)
        assert kept.nodes[1] == left
        # It averages in the place of the one whose stage it has, and not with itself.
        assert all(len(set(ring.owners)) == len(ring.owners) == 1 for ring in run.deployment.plan.rings)

    play(scene)


def test_a_run_is_formed_anew_between_two_updates(play: Play, accumulating: PreparedJob) -> None:
    """What has been done of an update is in no weights before its last microbatch."""

    async def scene(run: Run) -> None:
        for name in "abc":
            run.swarm.join(name)
        await run.deploy(3)
        run.swarm.kill("c")
        await run.event("reformed")
        run.emitted.clear()
        await run.feed(42)
        run.swarm.join("d")
        for fed in range(43, 1000):
            await run.feed(fed)
            await asyncio.sleep(0.01)
            if "reformed" in run.kinds():
                break
        total = -(-run.place.microbatches // 4) * 4 + 8
        await run.train(total, evaluate=2)
        run.check(total)
        assert len(run.stages()) == 3

    play(scene, 0, accumulating)


def test_an_evaluation_in_the_middle_of_an_update_does_not_wait_for_its_end(
    play: Play, accumulating: PreparedJob
) -> None:
    """Nor does it wait for a deployment that is due at the end of that update."""

    async def scene(run: Run) -> None:
        for name in "abc":
            run.swarm.join(name)
        await run.deploy(3)
        run.swarm.kill("c")
        await run.event("reformed")
        run.emitted.clear()
        await run.feed(42)
        run.swarm.join("d")
        await run.until(lambda: bool(run.dispatcher.paused))
        await within(run.coordinator.take(EvalBatch(-1, run.prepared.captured.sample, 8)))
        await within(run.coordinator.take(EvalEnd()))
        await run.train(60)
        run.check(60)
        assert "evaluated" in run.kinds() and "reformed" in run.kinds()

    # No fresh replica comes.
    play(scene, 0, accumulating, replace(TIMEOUTS, fresh_replica_seconds=0.3))


def lose_owner_and_holders(run: Run, number: int, stage: int) -> str:
    """Kills whoever has a part of this stage of a cluster's newest replica; who had the stage."""
    formation = run.deployment
    cluster = formation.clusters.all[number]
    replica = formation.replicas.newest(cluster)
    assert replica is not None
    owner = cluster.nodes[stage]
    others = replica.nodes[stage] - {owner}
    for node in (owner, *sorted(others)):
        run.swarm.kill(node)
    return owner


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_nobody_has_kept_comes_from_the_owners_of_its_rings_in_another_cluster(
    play: Play, stage: int
) -> None:
    async def scene(run: Run) -> None:
        run.swarm.in_order = False
        for name in "abcdefgh":
            run.swarm.join(name)
        await run.deploy(4, 2)
        await run.feed(40)
        await run.replicas(2)
        run.emitted.clear()
        owner = lose_owner_and_holders(run, 0, stage)
        await run.event("failover")
        await run.train(80)
        run.check(80)
        [begun] = [e for e in run.emitted if e["kind"] == "failover_begun" and e["lost"] == owner]
        assert begun["source"] == "rings" and "owners of its rings in cluster 1" in begun["reason"]
        # What was fed before the replica is neither in the other cluster, as nothing was averaged, nor kept.
        assert begun["updates_lost"] > 0
        assert "cluster_lost" not in run.kinds() and "checkpoint" not in run.kinds()[:-1]

    play(scene)


@pytest.mark.usefixtures("often")
def test_where_no_other_cluster_has_it_either_it_comes_from_the_checkpoint(play: Play) -> None:
    async def scene(run: Run) -> None:
        run.swarm.in_order = False
        for name in "abcdefgh":
            run.swarm.join(name)
        await run.deploy(4, 2)
        await run.feed(40)
        await run.replicas(2)
        await run.checkpointer.now()
        run.emitted.clear()
        for provider in run.swarm.providers.values():
            # Whoever is to take the stage has nothing of it, and whoever is asked to give it does not.
            provider.parts.clear()
            provider.holder = ""
            provider.obeys = lambda message: message.WhichOneof("body") not in ("give", "replicate")
        lose_owner_and_holders(run, 0, 1)
        await run.event("failover")
        await run.train(80)
        run.check(80)
        begun = [e["source"] for e in run.emitted if e["kind"] == "failover_begun"]
        assert begun == ["rings", "checkpoint"]

    play(scene)

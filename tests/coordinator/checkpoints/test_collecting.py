"""A checkpoint of a cluster is a replica that the coordinator collects while training goes on; simulated providers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ravnest import Pipeline
from ravnest.coordinator.plan.prepared_job import PreparedJob
from ravnest.coordinator.run.timeouts import Timeouts
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Failed, UploadPart
from tests.e2e.jobs import a_job, every_updates
from tests.swarms.scripted import TIMEOUTS, Play, Provider, Run


@pytest.fixture
def often_saved(prepared: PreparedJob) -> PreparedJob:
    return replace(prepared, job=a_job(pipeline=Pipeline(in_flight=4), checkpoint=every_updates(10)))


def told(run: Run) -> dict[str, list[str]]:
    """From now on, who is told to save its stage, and who to upload a part."""
    found: dict[str, list[str]] = {"save": [], "upload_part": []}

    def note(node_id: str, kind: str) -> None:
        if kind in found:
            found[kind].append(node_id)

    run.swarm.on_tell = note
    return found


def asked_for_parts(
    run: Run, names: str, obeys: Callable[[UploadPart], bool] = lambda order: True
) -> dict[str, list[bool]]:
    """From now on, by the name of each part that these providers are asked for, whether each order was urgent. They
    carry out those for which `obeys` is true."""
    found: dict[str, list[bool]] = {}

    def note(message: CoordinatorMessage) -> bool:
        if not message.HasField("upload_part"):
            return True
        found.setdefault(message.upload_part.name, []).append(message.upload_part.urgent)
        return obeys(message.upload_part)

    for name in names:
        run.swarm.providers[name].obeys = note
    return found


def uploads_nothing(provider: Provider, then: Callable[[], Any] = lambda: None) -> None:
    """It does not upload parts; `then` is called when it is first asked to."""
    asked: list[str] = []

    def obeys(message: CoordinatorMessage) -> bool:
        if message.HasField("upload_part"):
            asked.append(message.upload_part.name)
            if len(asked) == 1:
                then()
            return False
        return True

    provider.obeys = obeys


async def deployed(run: Run, names: str, providers: int) -> None:
    for name in names:
        run.swarm.join(name)
    await run.deploy(providers)


def saved(run: Run) -> list[int]:
    return [event["updates"] for event in run.events("checkpoint")]


def test_a_checkpoint_is_collected_from_replicas_and_no_stage_is_told_to_save(
    play: Play, often_saved: PreparedJob
) -> None:
    async def scene(run: Run) -> None:
        await deployed(run, "abc", 3)
        asked, parts = told(run), asked_for_parts(run, "abc")
        await run.feed(35)
        await run.until(lambda: len(saved(run)) >= 3)
        # A collection may have just begun.
        await run.until(lambda: len(parts) == 3 * len(run.events("collecting")))
        assert asked["save"] == []
        assert all(orders in ([False], [True], [False, True]) for orders in parts.values())
        assert all(before < after <= before + 10 for before, after in zip([0, *saved(run)], saved(run), strict=False))
        await run.train(38)
        run.check(38)
        # The last one, with nothing in flight, is uploaded by the stages.
        assert sorted(asked["save"]) == ["a", "b", "c"] and saved(run)[-1] == 38

    play(scene, of=often_saved)


def test_a_single_provider_uploads_its_state(play: Play, often_saved: PreparedJob) -> None:
    async def scene(run: Run) -> None:
        await deployed(run, "a", 1)
        await run.train(25)
        run.check(25)
        assert len(saved(run)) >= 3 and saved(run)[-1] == 25 and run.events("collecting") == []

    play(scene, of=often_saved)


def test_a_part_comes_from_its_holder_when_its_owner_is_lost_while_it_is_collected(
    play: Play, often_saved: PreparedJob
) -> None:
    async def scene(run: Run) -> None:
        await deployed(run, "abcd", 3)
        owner = run.stages()[1]
        # It is asked for a part, and is lost then; so is the collection of each part that it holds.
        uploads_nothing(run.swarm.providers[owner], lambda: run.swarm.kill(owner))
        await run.feed(40)
        await run.until(lambda: len(saved(run)) >= 3)
        await run.train(45)
        run.check(45)
        assert "failover" in run.kinds() or "reformed" in run.kinds()
        first, *_ = run.events("collecting")
        assert saved(run)[0] == first["updates"], "the collection went on with the other provider"

    play(scene, of=often_saved)


def test_a_provider_that_sends_nothing_is_passed_over_and_keeps_its_stage(play: Play, often_saved: PreparedJob) -> None:
    timeouts: Timeouts = replace(TIMEOUTS, part_silence_seconds=0.5)

    async def scene(run: Run) -> None:
        await deployed(run, "ab", 2)
        uploads_nothing(run.swarm.providers["a"])
        await run.feed(35)
        await run.until(lambda: len(saved(run)) >= 3)
        assert "a" in {event["provider"] for event in run.events("part_missing")}
        assert sorted(run.stages()) == ["a", "b"]
        await run.train(36)
        run.check(36)

    play(scene, of=often_saved, timeouts=timeouts)


def test_parts_that_training_has_come_to_wait_for_are_asked_for_urgently(play: Play, often_saved: PreparedJob) -> None:
    async def scene(run: Run) -> None:
        await deployed(run, "ab", 2)
        asked = asked_for_parts(run, "a", obeys=lambda order: order.urgent)
        # Its line is so slow that in the background nothing arrives.
        await run.feed(45)
        await run.until(lambda: len(saved(run)) >= 2)
        await run.train(46)
        run.check(46)
        assert [False, True] in asked.values() and run.events("part_missing") == []

    play(scene, of=often_saved)


def test_a_late_refusal_of_an_earlier_part_does_not_cost_a_provider_the_new_one(
    play: Play, often_saved: PreparedJob
) -> None:
    async def scene(run: Run) -> None:
        await deployed(run, "ab", 2)
        refusing = run.swarm.providers["a"]
        keys: list[str] = []

        def refuse(order: UploadPart) -> bool:
            keys.append(order.key)
            late = Failed(deployment=order.key, kind="part", message="late", microbatch=-1, replica=order.replica - 1)
            refusing.say(failed=late)
            return True

        asked_for_parts(run, "a", refuse)
        await run.feed(35)
        await run.until(lambda: len(saved(run)) >= 3)
        assert keys and run.events("part_missing") == []
        await run.train(36)
        run.check(36)

    play(scene, of=often_saved)


def test_a_part_that_is_not_what_its_owner_recorded_does_not_become_a_checkpoint(
    play: Play, often_saved: PreparedJob
) -> None:
    async def scene(run: Run) -> None:
        await deployed(run, "ab", 2)
        liar = run.swarm.providers["a"]

        def forges(message: CoordinatorMessage) -> bool:
            if message.HasField("upload_part"):
                key = message.upload_part.key, message.upload_part.replica
                liar.parts[key] = replace(liar.parts[key], base=liar.parts[key].base + 1)
            return True

        liar.obeys = forges
        await run.feed(35)
        await run.until(lambda: len(saved(run)) >= 3)
        refused = run.events("upload_refused")
        assert refused and all("another sha256" in event["reason"] for event in refused)
        await run.train(36)
        run.check(36)

    play(scene, of=often_saved)


def test_training_that_waits_for_a_replica_that_fails_is_saved_by_its_stages(
    play: Play, often_saved: PreparedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(run: Run) -> None:
        await deployed(run, "ab", 2)
        # Its own parts find no holder from now on, so no replica is ever complete.
        run.swarm.providers["a"].holder = "nobody"
        run.swarm.providers["a"].obeys = lambda message: not message.HasField("replicate")
        await run.train(45)
        run.check(45)
        assert "replica_failed" in run.kinds() and run.events("collecting") == []
        assert all(after - before <= 11 for before, after in zip([0, *saved(run)], saved(run), strict=False))

    play(scene, of=often_saved)

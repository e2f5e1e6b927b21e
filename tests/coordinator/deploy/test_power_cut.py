"""After a power cut everywhere the run goes on from the providers' disks; with simulated providers."""

from dataclasses import replace

import pytest

from ravnest.coordinator.replicas.surviving import AnnouncedReplica
from tests.swarms.scripted import TIMEOUTS, Play, Run, State

LONG = replace(TIMEOUTS, return_limit_seconds=20.0)
SHORT = replace(TIMEOUTS, return_limit_seconds=0.3)
pytestmark = pytest.mark.usefixtures("often")


async def trained_until_the_power_fails(run: Run) -> dict[str, dict[tuple[str, int], State]]:
    """Two providers, of which each has its own parts and those of the other; what is on their disks then."""
    run.remember()
    for name in "ab":
        run.swarm.join(name)
    await run.deploy(2)
    await run.feed(20)
    await run.replicas()
    state, cluster = run.swarm.state, run.deployment.clusters.all[0]
    assert state is not None

    def is_recorded() -> bool:
        """The manifest is written in the background."""
        newest, replicas = run.deployment.replicas.newest(cluster), run.deployment.replicas
        recorded = [AnnouncedReplica.from_json(text).number for text in state.complete_replicas()]
        return newest is not None and recorded == [newest.number] and replicas.pending(cluster) is None

    await run.until(is_recorded)
    await run.coordinator.close()
    for name in "ab":
        run.swarm.kill(name)
    return {name: run.swarm.providers[name].parts for name in "ab"}


def of_owner_alone(run: Run, name: str, disk: dict[tuple[str, int], State]) -> dict[tuple[str, int], State]:
    """As if nobody else had held its parts."""
    return {key: state for key, state in disk.items() if run.swarm.providers[name].held.order.key == key[0]}  # type: ignore[union-attr]


def test_the_run_goes_on_from_the_newest_replica_on_the_disks(play: Play) -> None:
    async def scene(run: Run) -> None:
        disks = await trained_until_the_power_fails(run)
        newest = max(number for disk in disks.values() for _, number in disk)
        run.swarm.providers.clear()
        for name, disk in disks.items():
            run.swarm.join(name, disk)
        await run.begin_again_with_those(2)
        [back] = run.events("resumed_swarm")
        assert back["source"] == "replica" and back["updates"] == newest
        assert run.events("waiting_for_replica") == []
        await run.train(40)
        run.check(40)
        assert run.events("checkpoint")[0]["updates"] < 40, "what was on the disks alone is saved soon"

    play(scene)


def test_a_provider_that_comes_later_than_the_coordinator_is_waited_for(play: Play) -> None:
    async def scene(run: Run) -> None:
        disks = await trained_until_the_power_fails(run)
        own = {name: of_owner_alone(run, name, disk) for name, disk in disks.items()}
        run.swarm.providers.clear()
        run.swarm.join("a", own["a"])

        def joins_now(reason: str) -> None:
            run.swarm.join("b", own["b"])

        run.on_event["waiting_for_replica"] = joins_now
        await run.begin_again_with_those(None)
        [waiting] = run.events("waiting_for_replica")
        assert "waiting up to 20 s for b, who have stages of the state after" in waiting["reason"]
        assert "otherwise the run begins again and loses" in waiting["reason"]
        [back] = run.events("resumed_swarm")
        assert back["source"] == "replica" and back["updates"] == waiting["updates"]
        await run.train(40)
        run.check(40)

    play(scene, timeouts=LONG)


def test_what_is_lost_when_a_provider_never_comes_is_what_was_told(play: Play) -> None:
    async def scene(run: Run) -> None:
        disks = await trained_until_the_power_fails(run)
        own = of_owner_alone(run, "a", disks["a"])
        run.swarm.providers.clear()
        run.swarm.join("a", own)
        await run.begin_again_with_those(None)
        [waiting] = run.events("waiting_for_replica")
        assert f"the run begins again and loses {waiting['updates']} updates" in waiting["reason"]
        [back] = run.events("resumed_swarm")
        assert (back["source"], back["updates"]) == ("checkpoint", 0)
        await run.train(30)
        run.check(30)

    play(scene, timeouts=SHORT)


class Damaged(dict[tuple[str, int], State]):
    """Parts on a disk that gives back something else than was written to it."""

    def __getitem__(self, key: tuple[str, int]) -> State:
        super().__getitem__(key)
        return State(99)


def test_disks_that_give_back_something_else_are_not_believed(play: Play) -> None:
    async def scene(run: Run) -> None:
        disks = await trained_until_the_power_fails(run)
        run.swarm.providers.clear()
        newest = max(number for disk in disks.values() for _, number in disk)
        for name, everything in disks.items():
            # Of the newest, the coordinator knows the hashes.
            disk = {key: state for key, state in everything.items() if key[1] == newest}
            run.swarm.join(name).parts = Damaged(disk)
            run.swarm.providers[name].member.parts = dict.fromkeys(disk, "")
        await run.begin_again_with_those(2)
        assert run.events("not_regained") and run.events("resumed_swarm")[-1]["source"] == "checkpoint"
        await run.train(30)
        run.check(30)

    play(scene, timeouts=SHORT)

"""Machines of a real swarm come, vanish, are stopped and leave while it trains, its coordinator too; it goes on."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ravnest.monitor.events import Event
from tests.e2e.command import Running
from tests.e2e.disturbing import Watched
from tests.e2e.jobs import a_job_file
from tests.swarms.machines import Swarm, ended_well

pytestmark = pytest.mark.timeout(400)

# An epoch that ends when the test has seen enough.
ENDLESS = """
class Endless:
    def __iter__(self):
        number = 0
        while number < 20 or not (HERE / "enough").exists():
            yield batches[number % len(batches)]
            number += 1
"""


def an_endless_job(folder: Path) -> Watched:
    """Saved by nobody before it ends, unless the run is formed anew."""
    a_job_file(
        folder,
        before=ENDLESS,
        data="Endless()",
        eval_data="batches",
        pipeline="ravnest.Pipeline(in_flight=2)",
        checkpoint="ravnest.Checkpoint(every_updates=1_000_000, every_seconds=None)",
    )
    return Watched(folder / "run")


def finished(machines: Swarm, serving: Running, providers: list[Running]) -> dict[str, Any]:
    """Lets the run come to its end; its summary, in which everything adds up."""
    (machines.folder / "enough").touch()
    said = serving.to_the_end()
    assert serving.process.returncode == 0, said
    assert "Traceback" not in said, said
    for provider in providers:
        assert "ended: the run has finished" in ended_well(provider)
    summary: dict[str, Any] = json.loads((machines.folder / "run/summary.json").read_text())
    assert summary["status"] == "finished"
    ledger = summary["ledger"]
    assert (ledger["fed"], ledger["lost"], ledger["applied_twice"]) == (ledger["completed"], 0, 0)
    assert all(fault["recovered_seconds"] is not None for fault in summary["faults"])
    return summary


def taken(run: Watched, lost: str, taker: str) -> Event:
    begun = run.wait("failover_begun", lost=lost, taker=taker)
    assert (begun["source"], begun["updates_lost"]) == ("replica", 0)
    return run.wait("failover", takers=[taker])


def test_who_joins_while_it_trains_stands_by_and_takes_the_place_of_the_killed_and_the_stopped(
    machines: Swarm,
) -> None:
    run = an_endless_job(machines.folder)
    serving, invite = machines.serve("--providers", "2", "--clusters", "1")
    there = {name: machines.join(invite, name) for name in ("anna", "ben")}
    run.wait("first_update")
    there["carla"] = machines.join(invite, "carla")
    run.wait("standby", provider="carla")
    run.seen("replica")
    root, leaf = run.stages()

    there.pop(root).signal(signal.SIGKILL)
    run.wait("lost", provider=root)
    taken(run, root, "carla")

    # It comes back, with what it has on its disk, and is ready for the next.
    there[root] = machines.join(invite, root)
    run.wait("joined", provider=root)
    run.wait("standby", provider=root)

    stopped = there[leaf]
    stopped.signal(signal.SIGSTOP)
    assert "nothing received for" in run.wait("suspected", provider=leaf)["reason"]
    assert "it blocks its cluster, and a standby is ready" in run.wait("lost", provider=leaf)["reason"]
    taken(run, leaf, root)
    assert run.stages() == ["carla", root]
    stopped.signal(signal.SIGCONT)
    run.wait("joined", provider=leaf)
    run.wait("standby", provider=leaf)
    assert stopped.process.poll() is None

    summary = finished(machines, serving, list(there.values()))
    assert [fault["provider"] for fault in summary["faults"]] == [root, leaf]
    assert "joined 127.0.0.2" in stopped.said and "taken for lost" not in stopped.said.splitlines()[-1]


def test_who_is_asked_to_leave_hands_its_stage_over_first_and_goes_at_once_when_asked_again(machines: Swarm) -> None:
    run = an_endless_job(machines.folder)
    serving, invite = machines.serve("--providers", "2", "--clusters", "1")
    there = {name: machines.join(invite, name) for name in ("anna", "ben", "carla")}
    run.seen("standby")
    run.wait("replica")
    root, leaf = run.stages()
    [standby] = there.keys() - {root, leaf}

    leaving = there.pop(root)
    leaving.signal(signal.SIGINT)
    assert run.wait("leaving", provider=root)["reason"] == "signal SIGINT"
    taken(run, root, standby)
    # Not before: the other may have fetched it from there.
    run.wait("handed_over", provider=root)
    said = ended_well(leaving)
    assert "handing the stage over to another provider; press Ctrl-C again to leave at once" in said
    assert "ended: it asked to leave, and nothing is lost" in said
    assert "lost" not in [event["kind"] for event in run.events if event.get("provider") == leaf]

    # Nobody stands by: who does not wait is missed, and the other does everything.
    hurried = there.pop(leaf)
    hurried.signal(signal.SIGINT)
    run.wait("leaving", provider=leaf)
    hurried.signal(signal.SIGINT)
    assert "leaving the swarm: signal SIGINT" in ended_well(hurried)
    run.wait("reformed", clusters=1)
    assert run.stages() == [standby]
    assert [event["provider"] for event in run.events if event["kind"] == "handed_over"] == [root]

    summary = finished(machines, serving, list(there.values()))
    assert [stage["provider"] for stage in summary["clusters"][0]["stages"]] == [standby]
    assert root not in [fault["provider"] for fault in summary["faults"]], "nothing was lost by it"


def test_stages_whose_link_is_relayed_go_on_when_their_coordinator_was_killed(machines: Swarm) -> None:
    """The relay is gone with it."""
    run = an_endless_job(machines.folder)
    serving, invite = machines.serve("--providers", "2", "--clusters", "1")
    providers = [machines.join(invite, name, "--outbound-only") for name in ("anna", "ben")]
    run.wait("first_update")
    run.wait("replica")
    while (before := summary_of(machines)["updates"]) < 20:
        time.sleep(0.1)
    routes = [link["route"] for stage in summary_of(machines)["clusters"][0]["stages"] for link in stage["links"]]
    assert routes and set(routes) == {"relayed"}, routes
    holders = run.stages()
    serving.signal(signal.SIGKILL)
    serving.to_the_end()
    again, _ = machines.serve("--resume", port=None)
    back = run.wait("resumed_swarm")
    assert (back["source"], back["stages"]) == ("stages", 2) and back["updates"] >= before, back
    run.wait("first_update")
    assert run.stages() == holders
    summary = finished(machines, again, providers)
    assert summary["ledger"]["lost"] == 0 and summary["ledger"]["applied_twice"] == 0


def test_a_swarm_that_has_grown_goes_on_as_it_is_when_its_coordinator_was_killed(machines: Swarm) -> None:
    run = an_endless_job(machines.folder)
    serving, invite = machines.serve("--clusters", "1")
    # So slow that the run is better off with whoever comes.
    providers = {"anna": machines.join(invite, "anna", "--pretend-slower", "50")}
    run.wait("first_update")
    assert run.stages() == ["anna"]
    providers["ben"] = machines.join(invite, "ben")
    planned = run.wait("joined_plan")
    assert planned["providers"] == ["ben"] and planned["used"] is True, planned
    run.wait("reformed")
    holders = run.stages()
    assert "ben" in holders
    run.wait("replica")
    # How it stands is noted every two seconds, with the summary.
    while (before := summary_of(machines)["updates"]) < 20:
        time.sleep(0.1)
    serving.signal(signal.SIGKILL)
    serving.to_the_end()
    again, fresh = machines.serve("--resume", port=None)
    assert fresh.address == invite.address
    back = run.wait("resumed_swarm")
    assert back["source"] == "stages" and back["updates"] >= before, back
    run.wait("first_update")
    assert run.stages() == holders
    assert not list((machines.folder / "run/checkpoints").glob("0*")), "nothing had to be saved for it"

    # Somebody who held a stage is gone as well: what was kept of it is with the one who is left.
    run.wait("replica")
    again.signal(signal.SIGKILL)
    providers.pop("ben").signal(signal.SIGKILL)
    again.to_the_end()
    last, _ = machines.serve("--resume", "--providers", "1", port=None)
    back = run.wait("resumed_swarm")
    assert back["source"] == "replica", back
    run.wait("first_update")
    assert run.wait("checkpoint")["updates"] > back["updates"], "what had been kept is saved soon"
    assert run.stages() == ["anna"]
    summary = finished(machines, last, list(providers.values()))
    assert summary["samples"] == 8 * summary["ledger"]["completed"]


def summary_of(machines: Swarm) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((machines.folder / "run/summary.json").read_text())
    return found

"""All machines of a real swarm lose their power at once; the run comes back from the providers' disks."""

import json
import signal
import time

import pytest

from tests.e2e.command import ravnest
from tests.e2e.disturbing import Watched
from tests.e2e.jobs import a_job_file
from tests.swarms.machines import Swarm, ended_well

pytestmark = pytest.mark.timeout(400)

ENDLESS = """
class Endless:
    def __iter__(self):
        number = 0
        while number < 20 or not (HERE / "enough").exists():
            yield batches[number % len(batches)]
            number += 1
"""


def test_a_power_cut_everywhere_loses_what_was_told_and_the_coordinator_waits_for_the_providers(
    machines: Swarm,
) -> None:
    a_job_file(
        machines.folder,
        before=ENDLESS,
        data="Endless()",
        pipeline="ravnest.Pipeline(in_flight=2)",
        checkpoint="ravnest.Checkpoint(every_updates=1_000_000, every_seconds=None)",
    )
    run = Watched(machines.folder / "run")
    summary_path = machines.folder / "run/summary.json"
    names = ["anna", "ben", "carla"]
    serving, invite = machines.serve("--providers", "3", "--clusters", "1")
    providers = [machines.join(invite, name) for name in names]
    run.wait("first_update")
    run.wait("replica")
    while (told := json.loads(summary_path.read_text())["state"])["replica"] is None:
        time.sleep(0.1)
    for running in (serving, *providers):
        running.signal(signal.SIGKILL)
        running.to_the_end()
    told = json.loads(summary_path.read_text())["state"]
    assert told["checkpoint"] is None and told["replica"]["updates"] > 0
    shown = ravnest("status", "run", folder=machines.folder, warm=True).stdout
    assert "there is no checkpoint yet; the providers hold a state that is " in shown, shown

    # One provider is enough for the model. It does not have all parts of the state.
    again, _ = machines.serve("--resume", "--providers", "1", "--clusters", "1", port=None)
    providers = [machines.join(invite, names[0])]
    waiting = run.wait("waiting_for_replica")
    assert waiting["updates"] >= told["replica"]["updates"]
    assert "otherwise the run begins again and loses" in waiting["reason"]
    providers += [machines.join(invite, name) for name in names[1:]]
    back = run.wait("resumed_swarm")
    assert back["source"] == "replica" and back["updates"] >= waiting["updates"], back
    run.wait("first_update")
    assert run.wait("checkpoint")["updates"] > back["updates"]
    (machines.folder / "enough").touch()
    ended_well(again)
    for provider in providers:
        ended_well(provider)
    summary = json.loads(summary_path.read_text())
    ledger = summary["ledger"]
    assert (summary["status"], ledger["lost"], ledger["applied_twice"]) == ("finished", 0, 0)
    assert summary["state"]["checkpoint"]["updates"] == summary["updates"]

"""Several `ravnest join` on one machine share its cores."""

import json
import re
import signal
from pathlib import Path

import pytest

from ravnest.cores import usable_cores
from ravnest.net.identity.swarm_invite import SwarmInvite
from tests.e2e.command import Running, ravnest
from tests.e2e.jobs import a_job_file
from tests.swarms.machines import Swarm, ended_well

pytestmark = pytest.mark.timeout(300)


def provider(machines: Swarm, invite: SwarmInvite, name: str, *options: str) -> Running:
    """A provider as a user starts it: a cold process without a number of threads. Providers share cores through the
    temporary folder, so this one does not see the providers of other tests."""
    words = ("join", invite.line, "--name", name, "--listen", "127.0.0.1:0", *options)
    return Running(*words, folder=machines.folder, OMP_NUM_THREADS="", TMPDIR=str(machines.folder))


def test_three_providers_on_one_machine_take_a_share_each_and_say_so(machines: Swarm, tmp_path: Path) -> None:
    a_job_file(tmp_path, epochs="3")
    serving, invite = machines.serve("--providers", "3", "--clusters", "1")
    with (
        provider(machines, invite, "a") as a,
        provider(machines, invite, "b") as b,
        provider(machines, invite, "c") as c,
    ):
        said = [ended_well(each) for each in (a, b, c)]
    ended_well(serving)
    cores = usable_cores()
    shares = []
    for text in said:
        told = re.findall(
            r"^computing with (\d+) of \d+ cores?(?:, which (\d) providers on this machine share)?$", text, re.M
        )
        assert told and told[-1][1] == "3", text
        shares.append(int(told[-1][0]))
        # The provider measured its speed with its share of the cores.
        assert re.search(r"^this machine: cpu, \d+ cores?, ", text, re.M), text
    assert sum(shares) <= max(3, cores)
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    joined = [event for event in events if event["kind"] == "joined"]
    assert len(joined) == 3 and all(event["flops_per_second"] > 0 for event in joined)


@pytest.mark.skipif(usable_cores() < 2, reason="one core cannot be shared")
def test_a_provider_that_leaves_gives_its_cores_back_to_the_other(machines: Swarm, tmp_path: Path) -> None:
    a_job_file(tmp_path)
    _, invite = machines.serve("--providers", "9")
    with provider(machines, invite, "a") as a:
        a.until("joined ")
        alone = re.search(r"^computing with (\d+) of \d+ cores$", a.said, re.M)
        assert alone is not None, a.said
        if alone[1] == "1":
            pytest.skip("torch counts one core here, which cannot be shared")
        with provider(machines, invite, "b") as b:
            b.until("joined ")
            a.until("which 2 providers on this machine share\n")
            b.signal(signal.SIGINT)
            b.to_the_end()
        # Only what the provider says from here on counts.
        a.said = ""
        a.until(f"{alone[0]}\n")


def test_the_number_of_cores_that_a_user_gives_holds(machines: Swarm, tmp_path: Path) -> None:
    a_job_file(tmp_path)
    _, invite = machines.serve("--providers", "9")
    with provider(machines, invite, "a", "--cores", "1") as a:
        a.until("joined ")
        assert f"computing with 1 of {usable_cores()} core" in a.said and ", as requested\n" in a.said
        assert "this machine: cpu, 1 core, " in a.said


@pytest.mark.parametrize("cores", ["0", "-1", "two", "1.5", str(usable_cores() + 1)])
def test_an_impossible_number_of_cores_is_refused_with_one_sentence(cores: str, tmp_path: Path) -> None:
    refused = ravnest("join", "-", f"--cores={cores}", folder=tmp_path, warm=True)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert f"'{cores}' is not a number of cores: give a whole number from 1 to {usable_cores()}" in refused.stderr

"""A coordinator that is started again is found where it was, unless it is told to be elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ravnest.coordinator.access.swarm_store import Seen
from ravnest.coordinator.launch.serve import ServedSwarm
from ravnest.errors import PlanError, RunError
from ravnest.monitor.display import QuietDisplay
from ravnest.monitor.run_directory import RunDirectory

HostPort = tuple[str, int]


class Heard(QuietDisplay):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


@contextmanager
def served(
    run: Path,
    listen: HostPort | None,
    advertise: HostPort | None = None,
    providers: int | None = None,
    clusters: int | None = None,
) -> Iterator[tuple[ServedSwarm, list[str]]]:
    heard = Heard()
    with (
        RunDirectory.open(run, job_name="job", resume=False) as folder,
        ServedSwarm(folder, listen, advertise, providers, clusters, heard) as swarm,
    ):
        yield swarm, [text for text in heard.messages if "is an address of this machine alone" not in text]


def test_it_listens_where_it_did_and_waits_for_as_many(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with served(run, ("127.0.0.1", 0), providers=3) as (swarm, messages):
        first, state = swarm.invite, swarm.state
        assert messages == []
        state.planned(["anna", "ben"])
        state.connected([Seen("anna", "127.0.0.1:1", "cpu", 1), Seen("ben", "127.0.0.1:2", "cpu", 1)], 1.0)
    with served(run, None) as (again, messages):
        assert (again.invite.address, again.invite.fingerprint) == (first.address, first.fingerprint)
        assert messages == ["knows anna and ben from before: waiting for them to come back"]
        assert again.providers == 2
    with served(run, None, providers=1) as (again, _):
        assert again.providers == 1


def test_it_makes_as_many_clusters_as_were_asked_for(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with served(run, ("127.0.0.1", 0)) as (swarm, _):
        assert swarm.clusters is None
    with served(run, None, providers=4, clusters=2) as (swarm, _):
        assert swarm.clusters == 2
    with served(run, None) as (again, _):
        assert again.clusters == 2
    with (
        pytest.raises(PlanError, match=r"2 clusters cannot be made of 1 provider, .* or --clusters 1 or fewer"),
        served(run, None, providers=1),
    ):
        pass
    with served(run, None, providers=3, clusters=3) as (again, _):
        assert again.clusters == 3


def test_what_was_said_of_the_router_holds_on_as_long_as_the_port_does(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with served(run, ("127.0.0.1", 0), ("example.org", 7700)) as (swarm, _):
        assert swarm.invite.address == "example.org:7700"
        listening = swarm.state.listening()
        assert listening is not None
    for listen in (None, ("127.0.0.1", listening.port)):
        with served(run, listen) as (again, messages):
            assert again.invite.address == "example.org:7700" and messages == []
    with served(run, None, ("example.net", 0)) as (again, messages):
        assert again.invite.address == f"example.net:{listening.port}"
        [warning] = messages
        assert f"was at example.org:7700 and is at example.net:{listening.port} now" in warning
    with served(run, ("127.0.0.2", 0)) as (again, messages):
        assert again.invite.address.startswith("127.0.0.2:") and len(messages) == 1


def test_a_run_that_was_never_served_has_no_place_to_be_served_at(tmp_path: Path) -> None:
    with (
        pytest.raises(RunError, match="was never served; say where to listen with --listen HOST:PORT"),
        served(tmp_path / "run", None),
    ):
        pass

"""Strangers take connections and prove nothing: the run goes on, and who is honest still gets in."""

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from grpc import aio

from ravnest.net.door.budgets import budgets_for
from ravnest.net.door.descriptors import raise_descriptor_limit
from ravnest.net.door.open_connections import OpenConnections
from ravnest.net.identity import certificates
from ravnest.net.identity.identity import COORDINATOR_HOST, node_common_name
from ravnest.net.identity.swarm_invite import SwarmInvite
from ravnest.net.identity.tls import open_secure_channel
from ravnest.net.rpc import call_server as calls
from ravnest.net.rpc.call_server import LINK_KEY, MAX_STREAMS
from tests.adversary.floods import FloodProcess, Place, Trickle, flooding, shake_hands
from tests.e2e.command import Running
from tests.e2e.jobs import a_job_file
from tests.known_speed import speed_is_known
from tests.swarms.in_process import RawStream, attacked, run

CONNECTIONS = 1400
DESCRIPTORS = 1024


def with_few_descriptors(command: Sequence[str]) -> list[str]:
    return ["bash", "-c", f'ulimit -n {DESCRIPTORS} && exec "$@"', "bash", *command]


class Narrow:
    """A served run and its providers, each of which may have 1,024 files open."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def serve(self, *words: str) -> tuple[Running, SwarmInvite]:
        running = self._start("serve", "job.py", "--listen", "127.0.0.2:0", "--run", "run", *words)
        assert running.process.stdout is not None
        line = running.process.stdout.readline().decode()
        return running, SwarmInvite.parse(line.removeprefix("invite: ravnest join "))

    def join(self, invite: SwarmInvite, name: str) -> Running:
        return self._start("join", invite.line, "--name", name, "--listen", "127.0.0.1:0")

    def _start(self, *words: str) -> Running:
        running = Running(*words, folder=self._folder, on=with_few_descriptors)
        running.patience_seconds = 150.0
        return self._stack.enter_context(running)


@pytest.fixture
def narrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Narrow]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    speed_is_known(tmp_path / "cache")
    with ExitStack() as stack:
        yield Narrow(tmp_path, stack)


@pytest.mark.timeout(300)
def test_silent_connections_to_a_coordinator_and_a_provider_end_nothing_and_keep_nobody_out(
    narrow: Narrow, tmp_path: Path
) -> None:
    a_job_file(tmp_path, epochs="40")
    serving, invite = narrow.serve("--providers", "3", "--clusters", "1")
    anna, ben = narrow.join(invite, "anna"), narrow.join(invite, "ben")
    ben.until("joined ")
    listening = re.search(r"lending cpu at ([\d.]+):(\d+)", anna.until("joined "))
    assert listening is not None
    place: Place = (listening[1], int(listening[2]))
    budgets = budgets_for(DESCRIPTORS)
    here, there = FloodProcess((invite.host, invite.port), CONNECTIONS), FloodProcess(place, CONNECTIONS)
    with here, there:
        # One more comes now; with it all are there, and the whole run is in the flood.
        carla = narrow.join(invite, "carla")
        carla.until("joined ")
        said = serving.to_the_end()
        assert serving.process.returncode == 0, said
        for provider in (anna, ben, carla):
            heard = provider.to_the_end()
            assert provider.process.returncode == 0 and "Traceback" not in heard, heard
    for flood in (here, there):
        assert flood.refused > CONNECTIONS - budgets.incoming
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "finished" and summary["ledger"]["completed"] == 320
    assert summary["faults"] == []
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    told = [event for event in events if event["kind"] == "turned_away"]
    assert told and {event["address"] for event in told} == {"127.0.0.1"}
    assert re.fullmatch(r"\d+ connections from 127.0.0.1 turned away: more than \d+ connections .*", told[0]["reason"])
    # However many they are: the log is not theirs to fill.
    assert len(told) <= 10
    assert "connections from 127.0.0.1 turned away" in anna.said


def test_greetings_that_trickle_are_cut_off_at_the_budget_of_their_address() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            budget = budgets_for(raise_descriptor_limit()).waiting_per_address
            connections = OpenConnections("127.0.0.1", swarm.port)
            with flooding(("127.0.0.1", swarm.port), 3 * budget, Trickle()) as flood:
                honest = await swarm.join("honest")
                await swarm.until(lambda: bool(swarm.told.turned))
                assert flood.refused > 0 and len(connections.look()) <= 2 * budget
                await swarm.still_works(honest)
                await swarm.join("another")
            [(address, count, reason), *_] = swarm.told.turned
            assert address == "127.0.0.1" and count >= 16
            assert f"more than {budget} connections waited to prove their identity" in reason

    run(test())


def test_who_has_proved_who_it_is_stays_however_long_and_however_many_come_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hasty = replace(budgets_for(DESCRIPTORS), silent_seconds=0.05, proving_seconds=0.3, invited_seconds=0.3)
    monkeypatch.setattr(calls, "budgets_for", lambda _: hasty)

    async def test() -> None:
        async with attacked() as swarm:
            with flooding(("127.0.0.1", swarm.port), 100) as flood:
                nodes = [await swarm.join(name) for name in ("anna", "ben", "carla")]
                while flood.refused < 100:
                    await asyncio.sleep(0.05)
                await asyncio.sleep(3 * hasty.proving_seconds)
                for node in nodes:
                    await swarm.still_works(node)
            assert [node.control.link.connections for node in nodes] == [1, 1, 1]
            assert swarm.told.down == []

    run(test())


def test_handshakes_with_a_certificate_of_another_authority_over_and_over_keep_nobody_out(tmp_path: Path) -> None:
    key = certificates.new_key()
    name = x509.Name([])
    own = certificates.leaf_certificate(
        key.public_key(), node_common_name("anna"), name, key, certificates.CLOCK_SKEW, 1e9
    )
    file = tmp_path / "mallory.pem"
    file.touch(mode=0o600)
    file.write_bytes(certificates.key_pem(key) + certificates.certificate_pem(own))

    async def test() -> None:
        async with attacked() as swarm:
            place = ("127.0.0.1", swarm.port)

            async def again_and_again() -> None:
                for _ in range(60):
                    await asyncio.to_thread(shake_hands, place, str(file))

            attackers = [asyncio.create_task(again_and_again()) for _ in range(4)]
            honest = await swarm.join("honest")
            await swarm.still_works(honest)
            await asyncio.gather(*attackers)
            await swarm.still_works(honest)
            assert swarm.swarm.members.node_ids() == ["honest"]
            # Nothing of them is left.
            assert len(OpenConnections("127.0.0.1", swarm.port).look()) <= 2

    run(test())


def test_a_node_that_opens_streams_without_an_end_gets_no_more_than_its_share() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            mallory, honest = await swarm.admit("mallory"), await swarm.join("honest")
            channels = [open_secure_channel(swarm.address, mallory.node.tls_keys(), COORDINATOR_HOST) for _ in range(2)]
            opened = []
            for number in range(MAX_STREAMS):
                call: RawStream = channels[number % 2].stream_stream("/ravnest.v1.Coordinator/Fetch")(
                    metadata=((LINK_KEY, mallory.session),)
                )
                await call.initial_metadata()
                opened.append(call)
            over: RawStream = channels[0].stream_stream("/ravnest.v1.Coordinator/Fetch")(
                metadata=((LINK_KEY, mallory.session),)
            )
            with pytest.raises(aio.AioRpcError) as refused:
                await over.read()
            assert refused.value.details() == f"mallory has {MAX_STREAMS} streams open here, and may have no more"
            await swarm.still_works(honest)
            for call in opened:
                call.cancel()
            for channel in channels:
                await channel.close()

    run(test())

"""A coordinator that is started again knows who was there, who held what, and where it listened."""

import argparse
import asyncio
import json
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ravnest.cli import status
from ravnest.coordinator.access.invites import TokenStore
from ravnest.coordinator.access.store import SCHEMA_VERSION, Store
from ravnest.coordinator.access.swarm_store import KnownMember, Listening, Position, Seen, SwarmState, known_from_before
from ravnest.coordinator.swarm.changes import Changes
from ravnest.coordinator.swarm.members import LentMachine, Member
from ravnest.coordinator.swarm.membership_log import remember
from ravnest.errors import RunError
from ravnest.monitor.run_directory import RunDirectory
from ravnest.planner.problem import NO_LIMIT, Line
from ravnest.planner.reliability import Attendance

NOW = 1_800_000_000.0
ANNA = Seen("anna", "192.168.1.31:7701", "cuda:0", 8 << 30)
BEN = Seen("ben", "[2001:db8::1]:7701", "cpu", 4 << 30)


def test_what_is_known_survives_a_coordinator_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    state = SwarmState(path)
    assert (state.members(), state.plan(), state.position(), state.listening()) == ([], [], None, None)
    state.connected([BEN, ANNA], NOW)
    state.planned(["anna", "ben"])
    state.reached(Position(fed=12, completed=9, updates=9, samples=72, at=NOW))
    state.listens(Listening("0.0.0.0", 7700, True))
    # Nothing is closed: a process that is killed closes nothing either.
    again = SwarmState(path)
    assert [m.connected for m in again.members()] == [True, True]
    again.clear_connected()
    assert again.members() == [
        KnownMember("anna", ANNA.address, "cuda:0", 8 << 30, NOW, False, False, 0),
        KnownMember("ben", BEN.address, "cpu", 4 << 30, NOW, False, False, 1),
    ]
    assert again.plan() == ["anna", "ben"]
    assert again.position() == Position(12, 9, 9, 72, NOW)
    assert again.listening() == Listening("0.0.0.0", 7700, True)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
    state.close()
    again.close()


def test_lines_that_were_measured_within_the_hour_need_not_be_again(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    state = SwarmState(path)
    assert state.lines(NOW) == {}
    state.measured({("anna", "ben"): Line(1e6, 0.02), ("ben", "anna"): Line(NO_LIMIT, 0.0)}, NOW)
    state.measured({("anna", "ben"): Line(2e6, 0.01), ("anna", "carla"): Line(5e5, 0.1)}, NOW + 1800)
    state.close()
    again = SwarmState(path)
    fresh = {("anna", "ben"): Line(2e6, 0.01), ("anna", "carla"): Line(5e5, 0.1)}
    assert again.lines(NOW + 1801) == {**fresh, ("ben", "anna"): Line(NO_LIMIT, 0.0)}
    assert again.lines(NOW + 3601) == fresh and again.lines(NOW + 6000) == {}
    # A clock that was set back: nobody knows how old they are.
    assert again.lines(NOW - 1) == {}
    again.close()


def test_how_the_stages_are_held_is_known_and_whether_that_was_changing(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    state = SwarmState(path)
    assert state.standing() is None
    state.changes()
    assert state.standing() is None
    state.stands("one")
    state.stands("another")
    assert state.standing() == ("another", False)
    state.changes()
    again = SwarmState(path)
    assert again.standing() == ("another", True)
    again.stands("a third")
    assert again.standing() == ("a third", False)
    state.close()
    again.close()


def test_who_leaves_was_seen_last_when_it_left_and_who_returns_may_be_elsewhere(tmp_path: Path) -> None:
    state = SwarmState(tmp_path / "store.sqlite")
    state.connected([ANNA, BEN], NOW)
    state.connected([ANNA], NOW + 5)
    state.connected([ANNA], NOW + 10)
    state.planned(["anna"])
    assert [(m.node_id, m.connected, m.seen_at) for m in state.members()] == [
        ("anna", True, NOW + 10),
        ("ben", False, NOW + 5),
    ]
    state.connected([Seen("ben", "10.0.0.9:1", "cuda:1", 1)], NOW + 20)
    ben = state.members()[1]
    assert (ben.address, ben.device, ben.connected, ben.stage) == ("10.0.0.9:1", "cuda:1", True, None)
    state.close()


def test_a_node_that_was_thrown_out_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    tokens, state = TokenStore(path), SwarmState(path)
    token = tokens.create(NOW)
    for name in ("anna", "ben", "carla"):
        tokens.redeem(token.id, name, name, NOW)
    state.connected([ANNA, BEN, Seen("carla", "", "cpu", 1)], NOW)
    assert known_from_before(state.members()) == (
        "knows anna, ben and carla from before: waiting for them to come back"
    )
    tokens.kick("anna", NOW)
    assert known_from_before(state.members()) == "knows ben and carla from before: waiting for them to come back"
    tokens.kick("ben", NOW)
    assert known_from_before(state.members()) == "knows carla from before: waiting for it to come back"
    tokens.kick("carla", NOW)
    assert known_from_before(state.members()) == "" == known_from_before([])
    state.connected([Seen(f"p{number}", "", "cpu", 1) for number in range(20)], NOW)
    assert known_from_before(state.members()).startswith("knows p0, p1, p10, p11, p12, p13, p14 and 13 others from")
    tokens.close()
    state.close()


def test_what_two_connections_write_is_there_for_other_processes(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    tokens = TokenStore(path)
    state = SwarmState(path)

    def seen_elsewhere() -> tuple[int, int]:
        program = (
            "import sqlite3, sys\n"
            "store = sqlite3.connect(sys.argv[1])\n"
            "for table in ('tokens', 'members'):\n"
            "    print(store.execute(f'SELECT COUNT(*) FROM {table}').fetchone()[0])\n"
            "store.close()\n"
        )
        done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
        found = done.stdout.split()
        return int(found[0]), int(found[1])

    # A process that thinks it is the last to close the store removes its journal: whoever still writes there is lost.
    for number in range(1, 4):
        tokens.create(NOW)
        state.connected([Seen(f"p{count}", "", "cpu", 1) for count in range(number)], NOW)
        assert seen_elsewhere() == (number, number)
    tokens.close()
    state.close()


def test_a_store_of_a_newer_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    Store(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    before = path.read_bytes()
    for opening in (Store, TokenStore, SwarmState):
        with pytest.raises(
            RunError, match=r"was written by a newer Ravnest \(its schema is 7, this .*; update Ravnest"
        ):
            opening(path)
    assert path.read_bytes() == before


def test_who_is_connected_is_kept_at_each_change_and_while_nothing_changes(tmp_path: Path) -> None:
    class FedMicrobatch(SwarmState):
        """Tells when it has been written to."""

        def connected(self, present: Any, now: float) -> None:
            super().connected(present, now)
            loop.call_soon_threadsafe(written.set)

    class FakeMembers:
        """Those whom the test has put there."""

        def __init__(self) -> None:
            self.there: list[Member] = []
            self.changes = Changes()

        def connected(self) -> list[Member]:
            return self.there

        def attendances(self) -> dict[str, Attendance]:
            return {member.node_id: Attendance(stays=1) for member in self.there}

    class FakeSwarm:
        members = FakeMembers()

    async def test() -> None:
        nonlocal loop, written
        loop, written = asyncio.get_running_loop(), asyncio.Event()
        swarm: Any = FakeSwarm()
        state = FedMicrobatch(tmp_path / "store.sqlite")
        keeping = asyncio.create_task(remember(swarm, state, interval_seconds=0.01))
        swarm.members.there = [Member("anna", ANNA.address, LentMachine("cuda:0", 1))]
        swarm.members.changes.notify()
        await written.wait()
        first = state.members()[0]
        assert first.connected
        while not state.attendances():
            written.clear()
            await written.wait()
        assert state.attendances() == {"anna": Attendance(stays=1)}
        while state.members()[0].seen_at == first.seen_at:
            written.clear()
            await written.wait()
        swarm.members.there = []
        swarm.members.changes.notify()
        while state.members()[0].connected:
            written.clear()
            await written.wait()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        state.close()

    loop: asyncio.AbstractEventLoop
    written: asyncio.Event
    asyncio.run(asyncio.wait_for(test(), 20))


def test_status_shows_the_members_of_a_run_that_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory.open(tmp_path / "run", job_name="job", resume=False)
    state = SwarmState(run.store_path)
    state.connected([BEN], time.time() - 200)
    state.connected([ANNA], time.time())
    state.planned(["ben", "anna"])

    def shown(*words: str) -> str:
        parser = argparse.ArgumentParser()
        status.add_parser(parser.add_subparsers())
        args = parser.parse_args(["status", str(run.path), *words])
        assert args.run(args) == 0
        return capsys.readouterr().out

    lines = [line.split() for line in shown().splitlines()]
    assert ["anna", "connected", "cuda:0", "8", "GiB", ANNA.address, "1"] in lines
    assert any(line[:3] == ["ben", "last", "seen"] and line[-2:] == [BEN.address, "0"] for line in lines), lines
    assert [m["connected"] for m in json.loads(shown("--json"))["members"]] == [False, True]
    # A coordinator that was killed holds its run no more: nobody can be connected to it.
    run.close()
    assert "connected" not in shown() and "anna" in shown()
    assert [m["connected"] for m in json.loads(shown("--json"))["members"]] == [False, False]
    state.close()

"""What a swarm saw of a provider's presence outlives stays, runs, and the coordinator."""

from pathlib import Path

from ravnest.coordinator.access.swarm_store import SwarmState
from ravnest.coordinator.swarm.members import LentMachine, Member, Members
from ravnest.coordinator.swarm.presence import Presence
from ravnest.planner.reliability import Attendance


def test_connected_time_counts_while_a_provider_is_there() -> None:
    presence = Presence()
    presence.begin("first", 100.0)
    assert presence.attendance(130.0) == Attendance(stays=1, connected_seconds=30.0)
    presence.note_loss(150.0)
    assert presence.attendance(500.0) == Attendance(stays=1, connected_seconds=50.0, losses=1)
    presence.begin("second", 600.0)
    presence.note_departure(610.0)
    assert presence.attendance(700.0) == Attendance(stays=2, connected_seconds=60.0, losses=1, departures=1)


def test_a_stay_that_is_told_of_twice_counts_once() -> None:
    presence = Presence()
    presence.begin("first", 0.0)
    presence.begin("first", 10.0)
    assert presence.attendance(20.0) == Attendance(stays=1, connected_seconds=20.0)


def test_a_provider_that_is_back_before_its_loss_is_told_goes_on_with_the_stay_that_it_began() -> None:
    presence = Presence()
    presence.begin("first", 0.0)
    presence.begin("second", 10.0)
    presence.note_loss(11.0, is_back=True)
    assert presence.attendance(20.0) == Attendance(stays=2, connected_seconds=20.0, losses=1)


def test_another_run_of_the_swarm_knows_what_was_seen_before() -> None:
    members = Members()
    members.put(Member("anna", "", LentMachine("cpu", 1)))
    members.records["anna"].presence.note_loss(0.0)
    members.records["anna"].is_lost = True
    members.begin_run()
    assert not members.records["anna"].is_lost and "anna" in members
    assert members.attendances()["anna"].losses == 1


def test_a_coordinator_that_is_started_again_trusts_each_provider_as_the_one_before(tmp_path: Path) -> None:
    before, after = Members(), Members()
    for _ in range(3):
        before.records["anna"].presence.note_loss(0.0)
    before.records["ben"].presence.begin("stay", 0.0)
    # Nothing is closed: a process that is killed closes nothing either.
    SwarmState(tmp_path / "store.sqlite").attended(before.attendances())
    again = SwarmState(tmp_path / "store.sqlite")
    after.restore_presence(again.attendances())
    again.close()
    for name in ("anna", "ben", "carla"):
        assert after.reliability(name).value == before.reliability(name).value
    assert after.reliability("anna").value < after.reliability("ben").value

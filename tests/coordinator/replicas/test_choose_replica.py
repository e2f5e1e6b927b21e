"""Which replica becomes the next checkpoint, and who uploads its parts."""

from ravnest import Checkpoint
from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.replicas.choose_replica import KnownReplica, UploadLine, choose_replica, choose_senders


def at(updates: int) -> DataPosition:
    return DataPosition(updates=updates, microbatches=updates)


def known(updates: int, age_seconds: float = 1.0) -> KnownReplica:
    return KnownReplica(updates, at(updates), age_seconds)


BY_UPDATES = Checkpoint(every_seconds=None, every_updates=20)
BY_SECONDS = Checkpoint(every_seconds=60.0)


def test_a_replica_is_made_with_the_microbatch_that_is_due_when_there_is_none() -> None:
    choice, reason = choose_replica(40, at(40), 20, BY_UPDATES, None, None)
    assert (choice.number, choice.place, choice.is_new) == (40, at(40), True)
    assert reason == "a replica is made after 40 updates"


def test_a_complete_replica_is_collected_if_at_most_a_quarter_of_the_interval_is_missing() -> None:
    choice, reason = choose_replica(40, at(40), 20, BY_UPDATES, known(35), None)
    assert (choice.number, choice.is_new) == (35, False)
    assert reason == "the newest replica is collected: it lacks 5 updates and is 1.0 s old"
    assert choose_replica(40, at(40), 20, BY_UPDATES, known(34), None)[0].is_new
    assert choose_replica(40, at(40), 20, BY_SECONDS, known(22, 15.0), None)[0].number == 22
    assert choose_replica(40, at(40), 20, BY_SECONDS, known(39, 15.1), None)[0].is_new


def test_a_replica_that_is_being_made_is_not_overtaken_by_another() -> None:
    choice, _ = choose_replica(40, at(40), 20, BY_UPDATES, known(22), known(30))
    assert (choice.number, choice.is_new) == (30, False)


def test_what_the_newest_checkpoint_has_is_not_collected_again() -> None:
    assert choose_replica(40, at(40), 36, BY_UPDATES, known(36), known(36))[0].is_new


def test_each_part_is_asked_of_whoever_would_have_sent_it_first() -> None:
    lines = {"anna": UploadLine(1e6), "ben": UploadLine(4e6), "carla": UploadLine(2e6)}
    parts = {0: (8_000_000, ("anna", "ben")), 1: (8_000_000, ("ben", "carla")), 2: (1_000_000, ("carla",))}
    found, reason = choose_senders(parts, lines)
    # The line of ben takes the first of the two large parts, and for the second it would be as slow as that of carla.
    assert found == {0: ("ben", "anna"), 1: ("ben", "carla"), 2: ("carla",)}
    assert reason.startswith("stage 0 from ben (2.0 s at its line's rate), stage 1 from ben (4.0 s")
    busy = {**lines, "ben": UploadLine(4e6, sending_bytes=100_000_000)}
    assert choose_senders(parts, busy)[0] == {0: ("anna", "ben"), 1: ("carla", "ben"), 2: ("carla",)}


def test_a_line_that_nobody_measured_is_one_within_a_machine() -> None:
    assert choose_senders({0: (10, ("a", "b"))}, {"a": UploadLine(1e6), "b": UploadLine(None)})[0] == {0: ("b", "a")}
    assert choose_senders({0: (10, ())}, {}) == ({0: ()}, "")

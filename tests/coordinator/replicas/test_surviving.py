"""What a coordinator that is started again takes up of what its providers have kept."""

import pytest

from ravnest.coordinator.feed.ledger import DataPosition, Ledger
from ravnest.coordinator.replicas.surviving import AnnouncedReplica, RecordedPart, find_surviving_replica
from ravnest.coordinator.swarm.members import LentMachine, Member
from ravnest.errors import RunError


def announced(number: int, key: str = "f-0", stages: int = 2) -> AnnouncedReplica:
    return AnnouncedReplica(
        key, number, DataPosition(updates=number, microbatches=number, samples=8 * number), tuple(range(stages))
    )


def member(name: str, *parts: tuple[str, int]) -> Member:
    return Member(name, "", LentMachine("cpu", 1), parts=dict.fromkeys(parts, ""))


def test_the_newest_of_which_all_parts_are_there_is_found() -> None:
    there = [member("a", ("f-0-0", 5), ("f-0-0", 9)), member("b", ("f-0-1", 5), ("f-0-1", 7))]
    found = find_surviving_replica([announced(5), announced(7), announced(9)], there, updates=2)
    assert found is not None and found.announced.number == 5
    assert found.replica.nodes == (frozenset("a"), frozenset("b")) and found.replica.hashes == ("", "")


def test_a_part_that_was_fetched_in_its_rounded_form_is_expected_in_that_form() -> None:
    parts = RecordedPart("a" * 64, 10, ("p", "q"), "b" * 64), RecordedPart("c" * 64, 10, ("p",))
    one = AnnouncedReplica("f-0", 5, announced(5).place, (0, 4), parts, 1.0)
    assert AnnouncedReplica.from_json(one.to_json()) == one
    there = [member("taker"), member("broken"), member("owner")]
    for each, start in zip(there, ("b" * 16, "d" * 16, "a" * 16), strict=True):
        each.parts = {("f-0-0", 5): start, ("f-0-1", 5): "c" * 16}
    found = find_surviving_replica([one], there, updates=2)
    assert found is not None
    assert found.replica.nodes == (frozenset({"taker", "owner"}), frozenset({"taker", "broken", "owner"}))
    assert [found.replica.sha256(0, node) for node in ("taker", "owner")] == ["b" * 64, "a" * 64]


def test_a_checkpoint_that_is_as_new_is_taken_instead() -> None:
    there = [member("a", ("f-0-0", 5), ("f-0-1", 5))]
    assert find_surviving_replica([announced(5)], there, updates=5) is None
    assert find_surviving_replica([announced(5)], there, updates=4) is not None


def test_parts_of_another_formation_do_not_count() -> None:
    there = [member("a", ("f-0-0", 5), ("g-0-1", 5))]
    assert find_surviving_replica([announced(5), announced(5, "g-0")], there, updates=0) is None


def test_an_announcement_is_read_as_it_was_written() -> None:
    one = announced(3)
    assert AnnouncedReplica.from_json(one.to_json()) == one


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"key": "a", "number": 1, "place": {"no": 1}, "starts": []}'])
def test_a_damaged_store_is_told(text: str) -> None:
    with pytest.raises(RunError):
        AnnouncedReplica.from_json(text)


def test_a_ledger_that_goes_back_counts_what_is_fed_again_and_adds_up_at_the_end() -> None:
    from ravnest.coordinator.feed.ledger import LedgerEntry

    ledger = Ledger()
    for number in range(6):
        ledger.feed(
            LedgerEntry(number, 8, DataPosition(microbatches=number + 1, updates=number + 1, samples=8 * (number + 1)))
        )
    for number in range(4):
        ledger.complete(number)
    back = DataPosition(microbatches=2, updates=2, samples=16)
    assert ledger.go_back(back) == 4
    assert (ledger.applied, ledger.samples, ledger.outstanding) == (back, 16, 0)
    for number in range(2, 8):
        ledger.feed(
            LedgerEntry(number, 8, DataPosition(microbatches=number + 1, updates=number + 1, samples=8 * (number + 1)))
        )
        ledger.complete(number)
    assert ledger.counts() == {"fed": 8, "completed": 8, "replayed": 4, "lost": 0, "applied_twice": 0}
    assert ledger.applied.microbatches == 8

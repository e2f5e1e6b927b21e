"""Every microbatch is accounted for, and a resumed run starts where the weights are."""

from dataclasses import replace

import pytest

from ravnest.coordinator.feed.ledger import DataPosition, Ledger, LedgerEntry


def entry(number: int, *, completes: bool = True, epoch: int = 0) -> LedgerEntry:
    after = DataPosition(epoch, number + 1, number + 1, updates=number + 1, samples=8 * (number + 1))
    return LedgerEntry(number, 8, after, completes)


def test_what_is_fed_is_outstanding_until_it_is_completed() -> None:
    ledger = Ledger()
    for number in range(3):
        ledger.feed(entry(number))
    assert ledger.outstanding == 3
    assert ledger.complete(0) is not None
    assert ledger.counts() == {"fed": 3, "completed": 1, "replayed": 0, "lost": 2, "applied_twice": 0}
    assert (ledger.samples, ledger.updates) == (8, 1)


def test_a_microbatch_that_is_done_twice_is_counted_and_changes_nothing() -> None:
    ledger = Ledger()
    ledger.feed(entry(0))
    ledger.complete(0)
    assert ledger.complete(0) is None
    assert ledger.complete(7) is None
    assert (ledger.completed, ledger.samples, ledger.applied_twice) == (1, 8, 2)


def test_feeding_a_microbatch_twice_is_our_own_mistake() -> None:
    ledger = Ledger()
    ledger.feed(entry(0))
    with pytest.raises(AssertionError, match="fed once"):
        ledger.feed(entry(0))


def test_gradients_that_are_only_summed_do_not_move_the_place_to_resume_from() -> None:
    ledger = Ledger()
    ledger.feed(entry(0))
    ledger.complete(0)
    place = ledger.applied
    ledger.feed(entry(1, completes=False))
    ledger.complete(1)
    assert ledger.completed == 2
    assert ledger.applied == place and ledger.updates == 1


def test_an_epochs_end_is_reached_when_its_last_microbatch_is_applied_and_not_when_it_is_fed() -> None:
    ledger = Ledger()
    ledger.feed(entry(0))
    end = replace(entry(0).after, epoch=1, position=0)
    ledger.end_epoch(end)
    assert ledger.applied == DataPosition()
    ledger.complete(0)
    assert ledger.applied == end
    ledger.feed(entry(1, epoch=1))
    ledger.complete(1)
    assert ledger.applied == entry(1, epoch=1).after


def test_a_resumed_ledger_goes_on_counting() -> None:
    start = DataPosition(epoch=2, position=3, microbatches=23, updates=11, samples=184)
    ledger = Ledger(start)
    assert (ledger.fed, ledger.completed, ledger.updates, ledger.samples) == (23, 23, 11, 184)
    assert ledger.applied == start
    assert ledger.counts()["lost"] == 0


def test_clusters_complete_in_any_order_and_the_place_is_behind_the_first_that_is_under_way() -> None:
    ledger = Ledger()
    for number in range(4):
        ledger.feed(entry(number))
    ledger.complete(2)
    ledger.complete(1)
    assert ledger.applied == DataPosition() and ledger.completed == 2
    ledger.complete(0)
    assert ledger.applied == entry(2).after, "the third had been completed before"
    ledger.complete(3)
    assert ledger.applied == entry(3).after and ledger.outstanding == 0


def test_what_is_fed_again_is_counted_and_completed_once() -> None:
    ledger = Ledger()
    for number in range(3):
        ledger.feed(entry(number))
    ledger.replay([1, 2])
    for number in range(3):
        assert ledger.complete(number) is not None
    assert ledger.counts() == {"fed": 3, "completed": 3, "replayed": 2, "lost": 0, "applied_twice": 0}
    with pytest.raises(AssertionError, match="in flight"):
        ledger.replay([1])

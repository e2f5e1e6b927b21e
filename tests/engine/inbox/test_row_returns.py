"""Rows that come back: which microbatches an update completes, and what a replay leaves to apply."""

import json

import torch

from ravnest.engine.inbox.applied import Applied
from ravnest.engine.inbox.row_returns import RowReturns
from ravnest.engine.messages import Message
from ravnest.provider.replicas.format import Restored


def _begun(rows: RowReturns, *numbers: int) -> None:
    for number in numbers:
        rows.begin(Message(number, {"rows": object()}), {"rows": torch.Size([2, 3])})


def test_a_microbatch_is_applied_once_an_update_has_its_rows_too() -> None:
    rows, applied = RowReturns(), Applied()
    _begun(rows, 0, 1)
    assert rows.not_in({1}).keys() == {0}
    assert rows.passed(0) == {"rows": torch.Size([2, 3])}
    rows.applied([0], applied)
    assert 0 not in applied and applied.has_own(0) and applied.numbers() == []
    rows.take(0)
    rows.passed(1)
    rows.applied([1], applied)
    assert applied.numbers() == [0] and applied.without_rows == {1}
    assert [message.microbatch for message in rows.pop_taken()] == [0] and rows.pop_taken() == []


def test_rows_that_come_back_in_time_are_part_of_the_same_update() -> None:
    rows, applied = RowReturns(), Applied()
    _begun(rows, 5)
    rows.passed(5)
    assert rows.take(5).values == {}, "the values are not kept"
    rows.applied([5], applied)
    assert applied.numbers() == [5] and not applied.without_rows


def test_rows_wait_for_the_next_update_as_long_as_there_is_one() -> None:
    rows, applied = RowReturns(), Applied()
    _begun(rows, 0, 1)
    rows.passed(0)
    rows.take(0)
    assert not rows.are_last, "the leaf has yet to pass over the next microbatch"
    rows.passed(1)
    rows.held = Message(1, {})
    assert not rows.are_last, "its update is yet to come"
    rows.held = None
    assert rows.are_last and rows.lacking(applied) == [0]
    applied.add([0])
    assert rows.lacking(applied) == [], "a replay of what was applied needs no update"


def test_a_replica_says_which_microbatches_lack_their_rows() -> None:
    found = Restored.of({}, {"applied": json.dumps([0, 1]), "without_rows": json.dumps([2, 3])})
    assert found.applied.numbers() == [0, 1] and found.applied.without_rows == {2, 3}
    assert found.applied.has_own(3) and 3 not in found.applied
    found.applied.add([2])
    assert 2 in found.applied and found.applied.without_rows == {3}

"""The record of applied microbatches: which are remembered, and for which it cannot tell."""

from hypothesis import given
from hypothesis import strategies as st

from ravnest.engine.inbox.applied import REMEMBERED, Applied


def test_the_newest_are_remembered_and_older_ones_are_unknown() -> None:
    found = Applied(range(10, 10 + REMEMBERED + 5))
    assert found.numbers() == list(range(15, 15 + REMEMBERED))
    assert 14 not in found and not found.is_known(14) and not found.is_known(3)
    assert 15 in found and found.is_known(15)
    assert found.is_known(10**9) and 10**9 not in found


def test_a_full_record_knows_nothing_of_older_ones() -> None:
    full = Applied(range(100, 100 + REMEMBERED))
    assert not full.is_known(99) and full.is_known(100)
    fewer = Applied(range(101, 100 + REMEMBERED))
    assert fewer.is_known(99) and 99 not in fewer


@given(st.lists(st.integers(0, 200)), st.integers(1, 20))
def test_known_answers_are_right(numbers: list[int], remembered: int) -> None:
    found = Applied(remembered=remembered)
    found.add(numbers)
    copy = Applied(found.numbers(), remembered)
    for number in range(201):
        for each in (found, copy):
            if each.is_known(number):
                assert (number in each) == (number in numbers)
    assert found.numbers() == sorted(set(numbers))[-remembered:]

"""What a member may put into a round."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.averaging.guards import TypicalContribution, bounded, clip_outliers, typical_contribution


def scales(norms: list[float], samples: list[int] | None = None, outlier: float | None = 10.0) -> list[float]:
    return [verdict.scale for verdict in clip_outliers(norms, samples or [1] * len(norms), outlier)]


def test_members_much_alike_are_left_alone() -> None:
    assert scales([1.0, 3.0, 0.2, 9.0]) == [1.0] * 4


def test_a_difference_far_beyond_the_others_is_clipped_and_wildly_beyond_left_out() -> None:
    verdicts = clip_outliers([1.0, 1.0, 50.0], [1, 1, 1], 10.0)
    assert [v.scale for v in verdicts] == [1.0, 1.0, pytest.approx(0.2)]
    assert "clipped to 10" in verdicts[2].reason
    verdicts = clip_outliers([1.0, 1.0, 101.0], [1, 1, 1], 10.0)
    assert [v.left_out for v in verdicts] == [False, False, True]
    assert "101" in verdicts[2].reason and "left out" in verdicts[2].reason


def test_who_did_more_samples_may_have_come_further_and_who_did_fewer_is_not_held_to_less() -> None:
    assert scales([1.0, 1.0, 50.0], [10, 10, 100]) == [1.0] * 3
    assert scales([1.0, 1.0, 9.0], [100, 100, 1]) == [1.0] * 3


def test_nobody_is_judged_without_others_that_did_something() -> None:
    assert scales([1e9]) == [1.0]
    assert scales([1e9, 0.0, 0.0]) == [1.0] * 3
    assert scales([1e9, 1.0], [1, 0]) == [1.0, 1.0]
    assert scales([1.0, 1.0, 1e9], [1, 1, 0]) == [1.0] * 3


def test_of_two_nobody_is_judged_before_anything_is_known_of_them() -> None:
    assert scales([1.0, 1e-9]) == [1.0, 1.0]
    assert scales([1.0, 1e9]) == [1.0, 1.0]
    assert "nothing is known of earlier rounds" in clip_outliers([1.0, 1e9], [1, 1], 10.0)[1].reason


def test_of_two_one_is_compared_with_what_was_usual_where_the_other_claims_less_than_that() -> None:
    before = TypicalContribution(1.0, 1)
    verdicts = clip_outliers([2.0, 1e-9], [1, 1], 10.0, before)
    assert [v.scale for v in verdicts] == [1.0, 1.0] and "the usual norm in the last round is 1" in verdicts[0].reason
    verdicts = clip_outliers([50.0, 1e-9], [1, 1], 10.0, before)
    assert [v.scale for v in verdicts] == [pytest.approx(0.2), 1.0]
    verdicts = clip_outliers([2.0, 1000.0], [1, 1], 10.0, before)
    assert [v.left_out for v in verdicts] == [False, True] and "the other's is 2" in verdicts[1].reason


def test_of_two_none_moves_alone_what_is_usual() -> None:
    assert typical_contribution([3.0, 1e-9], [5, 5]) == TypicalContribution(3.0, 5)
    before = TypicalContribution(1.0, 5)
    assert typical_contribution([1.0, 9.0], [5, 5], before) == before
    assert typical_contribution([2.0, 1e-9], [5, 5], before) == before
    assert typical_contribution([3.0, 4.0], [5, 5], before) == TypicalContribution(3.0, 5)
    assert typical_contribution([0.1, 0.2], [5, 5], before) == TypicalContribution(0.2, 5)
    assert typical_contribution([4.0, 7.0], [0, 5], before) == TypicalContribution(7.0, 5)
    assert typical_contribution([4.0, 0.0], [0, 5], before) is None


@given(
    honest=st.lists(st.floats(1.0, 10.0), min_size=2, max_size=7),
    place=st.integers(0, 7),
    claim=st.floats(0.0, 1e30),
    samples=st.integers(1, 10**6),
    weight=st.integers(0, 10**6),
    before=st.none() | st.builds(TypicalContribution, st.floats(1e-9, 1e9), st.integers(1, 10**6)),
)
def test_one_liar_among_three_or_more_harms_nobody_honest_and_is_held_to_their_length(
    honest: list[float], place: int, claim: float, samples: int, weight: int, before: TypicalContribution | None
) -> None:
    place %= len(honest) + 1
    norms = [*honest[:place], claim, *honest[place:]]
    claimed = [samples] * len(norms)
    claimed[place] = weight
    verdicts = clip_outliers(norms, claimed, 10.0, before)
    assert all(verdict.scale == 1.0 for index, verdict in enumerate(verdicts) if index != place)
    if weight:
        counted = claim * verdicts[place].scale
        assert counted <= 10.0 * max(honest) * max(1.0, weight / samples) * (1 + 1e-9)


def test_it_can_be_switched_off() -> None:
    assert scales([1.0, 1.0, 1e9], outlier=None) == [1.0] * 3


@given(st.lists(st.tuples(st.floats(0, 1e30), st.integers(0, 10**6)), min_size=1, max_size=8), st.floats(1.0, 1e3))
def test_whatever_the_norms_somebody_is_left_and_nobody_stands_beyond_the_limit(
    members: list[tuple[float, int]], outlier: float
) -> None:
    norms, samples = [norm for norm, _ in members], [count for _, count in members]
    verdicts = clip_outliers(norms, samples, outlier)
    assert all(0.0 <= verdict.scale <= 1.0 and verdict.reason for verdict in verdicts)
    smallest = min(range(len(norms)), key=lambda i: norms[i])
    assert verdicts[smallest].scale == 1.0


def test_a_claimed_weight_is_bounded_by_the_ledger() -> None:
    assert bounded(5, 7) == (5, None)
    weight, reason = bounded(900, 7)
    assert weight == 7 and reason is not None and "900" in reason and "7" in reason
    weight, reason = bounded(-1, 7)
    assert weight == 0 and reason is not None

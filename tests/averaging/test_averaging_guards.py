"""Limits on a member's share in a round."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.averaging.guards import TypicalContribution, bounded, clip_outliers, typical_contribution


def scales(norms: list[float], samples: list[int] | None = None, outlier: float | None = 10.0) -> list[float]:
    return [clipping.scale for clipping in clip_outliers(norms, samples or [1] * len(norms), outlier)]


def test_members_with_similar_differences_are_not_clipped() -> None:
    assert scales([1.0, 3.0, 0.2, 9.0]) == [1.0] * 4


def test_a_difference_far_beyond_the_others_is_clipped_and_wildly_beyond_left_out() -> None:
    clippings = clip_outliers([1.0, 1.0, 50.0], [1, 1, 1], 10.0)
    assert [v.scale for v in clippings] == [1.0, 1.0, pytest.approx(0.2)]
    assert "clipped to 10" in clippings[2].reason
    clippings = clip_outliers([1.0, 1.0, 101.0], [1, 1, 1], 10.0)
    assert [v.is_left_out for v in clippings] == [False, False, True]
    assert "101" in clippings[2].reason and "left out" in clippings[2].reason


def test_a_member_with_more_samples_may_have_a_longer_difference_and_one_with_fewer_is_not_held_to_less() -> None:
    assert scales([1.0, 1.0, 50.0], [10, 10, 100]) == [1.0] * 3
    assert scales([1.0, 1.0, 9.0], [100, 100, 1]) == [1.0] * 3


def test_a_member_is_not_judged_without_active_others() -> None:
    assert scales([1e9]) == [1.0]
    assert scales([1e9, 0.0, 0.0]) == [1.0] * 3
    assert scales([1e9, 1.0], [1, 0]) == [1.0, 1.0]
    assert scales([1.0, 1.0, 1e9], [1, 1, 0]) == [1.0] * 3


def test_two_members_are_not_judged_in_their_first_round() -> None:
    assert scales([1.0, 1e-9]) == [1.0, 1.0]
    assert scales([1.0, 1e9]) == [1.0, 1.0]
    assert "nothing is known of earlier rounds" in clip_outliers([1.0, 1e9], [1, 1], 10.0)[1].reason


def test_one_of_two_is_compared_with_the_usual_norm_if_the_other_claims_less() -> None:
    before = TypicalContribution(1.0, 1)
    clippings = clip_outliers([2.0, 1e-9], [1, 1], 10.0, before)
    assert [v.scale for v in clippings] == [1.0, 1.0] and "the usual norm in the last round is 1" in clippings[0].reason
    clippings = clip_outliers([50.0, 1e-9], [1, 1], 10.0, before)
    assert [v.scale for v in clippings] == [pytest.approx(0.2), 1.0]
    clippings = clip_outliers([2.0, 1000.0], [1, 1], 10.0, before)
    assert [v.is_left_out for v in clippings] == [False, True] and "the other's is 2" in clippings[1].reason


def test_one_of_two_cannot_move_the_typical_contribution_alone() -> None:
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
def test_one_liar_among_three_or_more_harms_no_honest_member_and_is_held_to_their_length(
    honest: list[float], place: int, claim: float, samples: int, weight: int, before: TypicalContribution | None
) -> None:
    place %= len(honest) + 1
    norms = [*honest[:place], claim, *honest[place:]]
    claimed = [samples] * len(norms)
    claimed[place] = weight
    clippings = clip_outliers(norms, claimed, 10.0, before)
    assert all(clipping.scale == 1.0 for index, clipping in enumerate(clippings) if index != place)
    if weight:
        counted = claim * clippings[place].scale
        assert counted <= 10.0 * max(honest) * max(1.0, weight / samples) * (1 + 1e-9)


def test_it_can_be_switched_off() -> None:
    assert scales([1.0, 1.0, 1e9], outlier=None) == [1.0] * 3


@given(st.lists(st.tuples(st.floats(0, 1e30), st.integers(0, 10**6)), min_size=1, max_size=8), st.floats(1.0, 1e3))
def test_every_decision_has_a_reason_and_the_shortest_difference_is_never_clipped(
    members: list[tuple[float, int]], outlier: float
) -> None:
    norms, samples = [norm for norm, _ in members], [count for _, count in members]
    clippings = clip_outliers(norms, samples, outlier)
    assert all(0.0 <= clipping.scale <= 1.0 and clipping.reason for clipping in clippings)
    smallest = min(range(len(norms)), key=lambda i: norms[i])
    assert clippings[smallest].scale == 1.0


def test_a_claimed_weight_is_bounded_by_the_ledger() -> None:
    assert bounded(5, 7) == (5, None)
    weight, reason = bounded(900, 7)
    assert weight == 7 and reason is not None and "900" in reason and "7" in reason
    weight, reason = bounded(-1, 7)
    assert weight == 0 and reason is not None

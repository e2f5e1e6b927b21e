"""The coordinator's decisions in a round: who takes part, with which weight, and whether the round commits."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ravnest.averaging.guards import TypicalContribution
from ravnest.averaging.participants import OUTLYING_ROUNDS, RingHistory
from ravnest.averaging.reduce_attempt import MAX_EXTENSIONS, SILENT_SECONDS
from ravnest.averaging.ring_reduce import Piece
from ravnest.averaging.ring_round import RingRound, RoundSettings
from ravnest.averaging.round_messages import Abort, Action, Begin, CatchUp, Commit, Join, Notice
from ravnest.codecs.codec import CODECS
from tests.averaging.ring_swarm import RingSwarm

OWNERS = ("a", "b", "c")


def a_round(owners: Sequence[str] = OWNERS, max_attempts: int = 5, **history: Any) -> RingRound:
    settings = RoundSettings(
        join_seconds=10.0, catch_up_seconds=20.0, reduce_seconds=20.0, outlier=10.0, max_attempts=max_attempts
    )
    return RingRound(dict.fromkeys(owners, 100), RingHistory(**{"committed": 7, **history}), settings, now=1000.0)


def join(samples: int = 100, norm: float = 1.0, committed: int = 7, **changes: Any) -> Join:
    return Join(samples, norm, changes.pop("finite", True), committed, **changes)


def all_join(ring: RingRound, *joins: Join) -> list[Action]:
    actions: list[Action] = []
    for node, said in zip(OWNERS, joins or [join()] * 3, strict=True):
        actions += ring.joined(node, said, 1001.0)
    return actions


def only(kind: type, actions: list[Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def notices(actions: list[Action]) -> list[tuple[str, str | None]]:
    return [(notice.kind, notice.node) for notice in only(Notice, actions)]


def begun(ring: RingRound, *joins: Join) -> Begin:
    [begin] = only(Begin, all_join(ring, *joins))
    assert isinstance(begin, Begin)
    return begin


def test_it_begins_when_all_have_joined_with_weights_by_samples() -> None:
    ring = a_round()
    begin = begun(ring, join(50, 1.0, counters=(4, 9)), join(100, 2.0, counters=(5, 2)), join(0, 0.0, counters=(1, 1)))
    assert [(m.node, m.weight, m.norm) for m in begin.members] == [
        ("a", pytest.approx(1 / 3), 1.0),
        ("b", pytest.approx(2 / 3), 2.0),
        ("c", 0.0, 0.0),
    ]
    assert begin.attempt == 1 and begin.counters == (5, 9)
    assert ring.join_took is not None and ring.join_took.seconds == 1.0 and ring.join_took.cut_off == 0


def test_it_commits_when_all_reduced_to_the_same_and_nothing_changes_afterwards() -> None:
    ring = a_round()
    begun(ring)
    assert ring.reduced("a", 1, 77, 1003.0) == [] == ring.reduced("c", 1, 77, 1004.0)
    assert ring.reduced("b", 1, 77, 1005.0) == [Commit(1, OWNERS)]
    assert ring.outcome == "committed" and ring.deadline is None
    assert ring.reduce_took is not None and ring.reduce_took.seconds == 4.0
    assert ring.gone("a", "late", 1006.0) == []
    assert ring.failed("b", 1, "a", "late", 1006.0) == []
    assert ring.reduced("b", 1, 78, 1006.0) == []
    assert ring.tick(1e9) == []
    assert ring.joined("a", join(), 1006.0) == []
    assert ring.caught_up("a", 1006.0) == []
    assert ring.outcome == "committed"


def test_an_owner_that_does_not_join_in_time_is_left_out() -> None:
    ring = a_round()
    assert ring.joined("a", join(), 1001.0) == [] == ring.joined("b", join(), 1002.0)
    assert ring.tick(1009.0) == []
    assert ring.deadline == 1010.0
    actions = ring.tick(1010.0)
    assert notices(actions) == [("left_out", "c")]
    [begin] = only(Begin, actions)
    assert [(m.node, m.weight) for m in begin.members] == [("a", 0.5), ("b", 0.5)]
    assert ring.join_took is not None and ring.join_took.cut_off == 1 and ring.join_took.seconds == 2.0
    # When it joins after all, it is told that it has no part in this round.
    assert only(Abort, ring.joined("c", join(), 1011.0))[0].nodes == ("c",)
    assert ring.attempt == 1


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (join(finite=False), "not finite"),
        (join(norm=math.inf), "not finite"),
        (join(norm=math.nan), "not finite"),
        (join(norm=-1.0), "not finite"),
        (join(refusal="out of memory"), "out of memory"),
        (join(committed=9), "round 9"),
    ],
)
def test_one_that_cannot_take_part_is_left_out_and_named(said: Join, reason: str) -> None:
    ring = a_round()
    actions = all_join(ring, join(), said, join())
    assert notices(actions) == [("left_out", "b")]
    assert only(Abort, actions)[0].nodes == ("b",) and reason in only(Abort, actions)[0].reason
    assert [m.node for m in only(Begin, actions)[0].members] == ["a", "c"]


def test_a_weight_beyond_the_ledger_is_bounded_and_named() -> None:
    actions = all_join(a_round(), join(), join(10**9), join())
    assert notices(actions) == [("bounded", "b")]
    assert [m.weight for m in only(Begin, actions)[0].members] == [pytest.approx(1 / 3)] * 3


def test_an_outlier_is_clipped_or_left_out_and_named() -> None:
    actions = all_join(a_round(), join(), join(), join(norm=20.0))
    assert notices(actions) == [("clipped", "c")]
    assert [m.norm for m in only(Begin, actions)[0].members] == [1.0, 1.0, 10.0]
    assert [m.weight for m in only(Begin, actions)[0].members] == [pytest.approx(1 / 3)] * 3
    actions = all_join(a_round(), join(), join(), join(norm=2000.0))
    assert notices(actions) == [("left_out", "c")]
    assert [m.node for m in only(Begin, actions)[0].members] == ["a", "b"]
    assert only(Abort, actions)[0].nodes == ("c",)


def test_one_that_is_an_outlier_again_and_again_takes_the_mean_of_the_others_instead() -> None:
    joins = (join(norm=500.0), join(norm=1.0), join(norm=2.0))
    for before in range(OUTLYING_ROUNDS - 1):
        ring = a_round(outlying={"a": before, "b": 9})
        actions = all_join(ring, *joins)
        assert notices(actions) == [("left_out", "a")] and ring.outliers == {"a"}
    ring = a_round(outlying={"a": OUTLYING_ROUNDS - 1})
    actions = all_join(ring, *joins)
    [notice] = only(Notice, actions)
    assert (notice.kind, notice.node) == ("dropped", "a")
    assert "its norm is 500" in notice.reason and "2 times before" in notice.reason
    [begin] = only(Begin, actions)
    assert [(m.node, m.weight, m.norm) for m in begin.members] == [("a", 0.0, 0.0), ("b", 0.5, 1.0), ("c", 0.5, 2.0)]
    assert ring.outliers == set() and only(Abort, actions) == []


def test_the_outlier_of_two_is_dropped_in_the_end_and_the_ring_goes_on() -> None:
    typical = TypicalContribution(2.0, 100)
    for before, outcome in ((0, "aborted"), (1, "aborted"), (2, None)):
        ring = a_round(("a", "b"), outlying={"b": before}, typical=typical)
        ring.joined("a", join(norm=1.0), 1001.0)
        actions = ring.joined("b", join(norm=1000.0), 1001.0)
        assert ring.outcome == outcome
    [begin] = only(Begin, actions)
    assert [(m.node, m.weight, m.norm) for m in begin.members] == [("a", 1.0, 1.0), ("b", 0.0, 0.0)]


def test_neither_of_two_is_an_outlier_in_the_first_round_which_defines_the_usual_norm() -> None:
    ring = a_round(("a", "b"))
    ring.joined("a", join(norm=1e-6), 1001.0)
    actions = ring.joined("b", join(norm=1.0), 1001.0)
    [begin] = only(Begin, actions)
    assert notices(actions) == [] and [m.norm for m in begin.members] == [1e-6, 1.0]
    for node in ("a", "b"):
        ring.reduced(node, begin.attempt, 7, 1002.0)
    assert ring.outcome == "committed" and ring.typical is not None and ring.typical.norm == 1.0


def test_a_difference_that_counted_is_dropped_if_its_owner_has_not_heard_of_that() -> None:
    ring = a_round(counted={"a": 7, "b": 7, "c": 5})
    ring.joined("a", join(), 1001.0)
    actions = ring.joined("b", join(committed=6), 1001.0)
    assert notices(actions) == [("dropped", "b")] and only(CatchUp, actions) == [CatchUp("b", "a", 7)]
    [notice] = only(Notice, actions)
    assert "it has round 6, but round 7 counted for it" in notice.reason
    # An owner that was left out of the rounds since then is only behind.
    assert notices(ring.joined("c", join(committed=5), 1001.0)) == []
    ring.caught_up("b", 1002.0)
    [begin] = only(Begin, ring.caught_up("c", 1002.0))
    assert [(m.node, m.weight, m.norm) for m in begin.members] == [("a", 0.5, 1.0), ("b", 0.0, 0.0), ("c", 0.5, 1.0)]


def test_without_new_samples_there_is_nothing_to_average_unless_an_owner_is_missing() -> None:
    nothing = join(samples=0, norm=0.0)
    ring = a_round()
    all_join(ring, nothing, nothing, nothing)
    assert ring.outcome == "aborted" and ring.has_nothing_new
    ring = a_round()
    ring.gone("c", "x", 1000.0)
    ring.joined("a", nothing, 1001.0)
    ring.joined("b", nothing, 1001.0)
    assert ring.outcome == "aborted" and not ring.has_nothing_new
    ring = a_round(counted={"a": 7})
    all_join(ring, join(samples=3, committed=6), nothing, nothing)
    [begin] = only(Begin, ring.caught_up("a", 1002.0))
    assert [m.weight for m in begin.members] == [0.0, 0.5, 0.5], "one still has what is dropped until the commit"
    assert not ring.has_nothing_new


def test_one_that_is_alone_with_its_difference_is_compared_with_the_usual_norm() -> None:
    ring = a_round()
    begun(ring, join(100, 1.0), join(100, 2.0), join(100, 3.0))
    for node in OWNERS:
        ring.reduced(node, 1, 4, 1002.0)
    assert ring.typical == TypicalContribution(2.0, 100)
    nothing = join(samples=0, norm=0.0)
    again = a_round(typical=ring.typical)
    actions = all_join(again, join(norm=500.0), nothing, nothing)
    assert (
        notices(actions) == [("left_out", "a")]
        and "the usual norm in the last round is 2:" in only(Notice, actions)[0].reason
    )
    assert begun(a_round(typical=ring.typical), join(norm=3.0), nothing, nothing).members[0].weight == 1.0


def test_one_that_missed_a_commit_catches_up_first() -> None:
    ring = a_round()
    assert ring.joined("a", join(committed=5), 1001.0) == []
    assert ring.joined("b", join(), 1002.0) == [CatchUp("a", "b", 7)]
    assert ring.joined("c", join(), 1003.0) == []
    assert ring.caught_up("c", 1004.0) == []
    [begin] = only(Begin, ring.caught_up("a", 1005.0))
    assert [m.node for m in begin.members] == ["a", "b", "c"]
    assert ring.caught_up("a", 1006.0) == []


def test_one_to_which_pieces_of_the_anchor_arrive_gets_more_time_and_one_to_which_none_do_is_left_out() -> None:
    ring = a_round()
    all_join(ring, join(committed=5), join(committed=5), join())
    assert ring.deadline == 1021.0
    for node in ("a", "b"):
        ring.progressed(node, 0, 10, 1020.0)
    ring.progressed("c", 0, 99, 1020.0)
    assert ring.tick(1021.0) == [] and ring.deadline == 1031.0
    ring.progressed("a", 0, 15, 1022.0)
    ring.progressed("b", 0, 10, 1022.0)
    actions = ring.tick(1031.0)
    assert notices(actions) == [("left_out", "b")] and "within 30 s" in ring.left_out["b"]
    [begin] = only(Begin, ring.caught_up("a", 1035.0))
    assert [m.node for m in begin.members] == ["a", "c"]
    assert ring.catch_up_took is not None
    assert ring.catch_up_took.seconds == 34.0 and ring.catch_up_took.cut_off == 1


def test_one_that_says_for_ever_that_pieces_arrive_is_left_out_in_the_end() -> None:
    ring = a_round()
    all_join(ring, join(committed=5), join(), join())
    for pieces in range(1, MAX_EXTENSIONS + 1):
        ring.progressed("a", 0, pieces, float(ring.deadline or 0.0))
        assert ring.tick(float(ring.deadline or 0.0)) == []
    ring.progressed("a", 0, 10**6, float(ring.deadline or 0.0))
    assert notices(ring.tick(float(ring.deadline or 0.0))) == [("left_out", "a")]


def test_a_round_in_which_none_is_behind_says_nothing_about_catching_up() -> None:
    ring = a_round()
    begun(ring)
    assert ring.catch_up_took is None


def test_one_that_does_not_catch_up_in_time_is_left_out() -> None:
    ring = a_round()
    all_join(ring, join(committed=5), join(), join())
    assert ring.deadline == 1021.0
    actions = ring.tick(1021.0)
    assert notices(actions) == [("left_out", "a")] and only(Abort, actions)[0].nodes == ("a",)
    assert [m.node for m in only(Begin, actions)[0].members] == ["b", "c"]


def test_another_donor_is_found_when_the_first_is_gone_or_its_donation_is_invalid() -> None:
    ring = a_round()
    assert CatchUp("a", "b", 7) in all_join(ring, join(committed=5), join(), join())
    assert ring.failed("a", 0, "b", "values that are not finite", 1002.0) == [CatchUp("a", "c", 7)]
    actions = ring.failed("a", 0, "c", "values that are not finite", 1003.0)
    assert notices(actions) == [("left_out", "a")]
    assert [m.node for m in only(Begin, actions)[0].members] == ["b", "c"]

    ring = a_round()
    all_join(ring, join(committed=5), join(), join())
    actions = ring.gone("b", "connection lost", 1002.0)
    assert notices(actions) == [("left_out", "b")] and only(CatchUp, actions) == [CatchUp("a", "c", 7)]


def test_without_the_newest_round_the_newest_one_that_an_owner_has_counts() -> None:
    ring = a_round()
    ring.joined("a", join(committed=5), 1001.0)
    ring.joined("b", join(committed=6), 1001.0)
    actions = ring.gone("c", "connection lost", 1002.0)
    assert ("behind", None) in notices(actions)
    assert only(CatchUp, actions) == [CatchUp("a", "b", 6)]
    assert only(Begin, ring.caught_up("a", 1003.0))


def test_two_owners_never_reduce_from_different_anchors_if_one_may_be_catching_up() -> None:
    ring = a_round()
    all_join(ring, join(committed=5), join(committed=5), join())
    # A donor of the newest anchor was ordered for both, and one of them may have the anchor already.
    actions = ring.gone("c", "connection lost", 1002.0)
    assert ring.outcome == "aborted" and not only(Begin, actions)


def test_an_owner_that_joins_later_does_not_lower_the_round_that_another_catches_up_to() -> None:
    ring = a_round()
    ring.joined("a", join(committed=5), 1001.0)
    assert ring.joined("c", join(), 1001.0) == [CatchUp("a", "c", 7)]
    assert notices(ring.gone("c", "connection lost", 1002.0)) == [("left_out", "c")]
    actions = ring.joined("b", join(committed=5), 1003.0)
    assert ring.outcome == "aborted" and not only(Begin, actions)


def test_one_that_has_caught_up_can_help_the_next() -> None:
    ring = a_round()
    all_join(ring, join(committed=5), join(committed=5), join())
    assert ring.caught_up("a", 1002.0) == []
    assert only(CatchUp, ring.gone("c", "connection lost", 1003.0)) == [CatchUp("b", "a", 7)]
    [begin] = only(Begin, ring.caught_up("b", 1004.0))
    assert [m.node for m in begin.members] == ["a", "b"]


def test_a_member_that_is_gone_before_the_commit_costs_an_attempt() -> None:
    ring = a_round()
    begun(ring)
    ring.reduced("a", 1, 5, 1003.0)
    ring.reduced("c", 1, 5, 1003.0)
    actions = ring.gone("b", "connection lost", 1004.0)
    assert notices(actions) == [("left_out", "b"), ("retry", None)]
    [begin] = only(Begin, actions)
    assert begin.attempt == 2 and [(m.node, m.weight) for m in begin.members] == [("a", 0.5), ("c", 0.5)]
    # Reports about the previous attempt do not count.
    assert ring.reduced("a", 1, 5, 1005.0) == [] == ring.failed("c", 1, "a", "old", 1005.0)
    assert ring.reduced("b", 2, 6, 1005.0) == []
    assert ring.reduced("a", 2, 6, 1005.0) == []
    assert ring.reduced("c", 2, 6, 1006.0) == [Commit(2, ("a", "c"))]


def test_fewer_than_two_members_or_no_samples_end_the_round() -> None:
    ring = a_round()
    begun(ring)
    ring.gone("a", "x", 1002.0)
    actions = ring.gone("b", "x", 1003.0)
    # It may reconnect before it knows that the round is over for it.
    assert [abort.nodes for abort in only(Abort, actions)] == [("b",), ("c",)]
    assert ring.outcome == "aborted" and ring.deadline is None

    ring = a_round()
    [abort] = only(Abort, all_join(ring, join(0), join(0), join(0)))
    assert abort.nodes == OWNERS and "no owner has learned" in abort.reason

    ring = a_round()
    assert [abort.nodes for abort in only(Abort, ring.tick(1010.0))] == [()]
    assert ring.outcome == "aborted"


def test_results_that_differ_are_reduced_once_more_and_then_given_up() -> None:
    ring = a_round()
    begun(ring)
    for attempt in (1, 2):
        ring.reduced("a", attempt, 1, 1003.0)
        ring.reduced("b", attempt, 1, 1003.0)
        actions = ring.reduced("c", attempt, 2, 1003.0)
        if attempt == 1:
            assert notices(actions) == [("retry", None)]
            assert [m.node for m in only(Begin, actions)[0].members] == list(OWNERS)
    assert notices(actions) == [("disagreed", None)]
    assert only(Abort, actions)[0].nodes == OWNERS and ring.outcome == "aborted"


def test_a_blamed_member_is_left_out() -> None:
    ring = a_round()
    begun(ring)
    actions = ring.failed("c", 1, "b", "values that are not finite", 1003.0)
    assert ("left_out", "b") in notices(actions)
    [abort] = only(Abort, actions)
    assert abort.nodes == ("b",) and "values that are not finite" in abort.reason
    assert [m.node for m in only(Begin, actions)[0].members] == ["a", "c"]


def test_a_member_that_blames_one_after_another_is_left_out_itself() -> None:
    owners = ("a", "b", "c", "d")
    ring = a_round(owners=owners)
    for node in owners:
        ring.joined(node, join(), 1001.0)
    assert ("left_out", "b") in notices(ring.failed("c", 1, "b", "bad", 1002.0))
    assert ("left_out", "c") in notices(ring.failed("c", 2, "a", "bad", 1003.0))
    assert ring.attempt == 3 and ring.outcome is None


def test_a_member_that_blames_itself_or_a_stranger_is_left_out() -> None:
    for blamed in ("c", "stranger"):
        ring = a_round()
        begun(ring)
        assert ("left_out", "c") in notices(ring.failed("c", 1, blamed, "out of memory", 1002.0))


def test_an_attempt_gets_more_time_while_pieces_arrive() -> None:
    ring = a_round()
    begun(ring)
    for extension in range(3):
        for node in OWNERS:
            ring.progressed(node, 1, 10 * (extension + 1), 1020.0 + 10 * extension)
        assert ring.deadline == 1021.0 + 10 * extension
        assert ring.tick(ring.deadline) == []
    assert ring.attempt == 1 and ring.deadline == 1051.0
    assert [ring.reduced(node, 1, 5, 1045.0) for node in OWNERS][-1] == [Commit(1, OWNERS)]
    assert ring.reduce_took is not None and ring.reduce_took.seconds == 44.0 and ring.reduce_took.cut_off == 0


def test_finished_members_need_not_report_again_and_count_as_progress() -> None:
    ring = a_round()
    begun(ring)
    ring.progressed("b", 1, 5, 1020.0)
    ring.progressed("c", 1, 5, 1020.0)
    ring.reduced("a", 1, 5, 1003.0)
    assert ring.tick(1021.0) == []
    ring.reduced("b", 1, 5, 1025.0)
    ring.progressed("c", 1, 5, 1031.0)
    assert ring.tick(1031.0) == []
    assert ring.reduced("c", 1, 5, 1032.0) == [Commit(1, OWNERS)]


def test_the_number_of_extensions_is_limited() -> None:
    ring = a_round()
    begun(ring)
    assert ring.deadline is not None
    extensions = 0
    while ring.attempt == 1:
        for number, node in enumerate(OWNERS):
            ring.progressed(node, 1, 10 * extensions + number + 1, ring.deadline)
        actions = ring.tick(ring.deadline)
        extensions += 1
    assert extensions == MAX_EXTENSIONS + 1
    # a has received least, and c sends to it.
    assert ("left_out", "c") in notices(actions) and only(Begin, actions)[0].attempt == 2


def test_without_progress_the_sender_of_the_line_that_carried_least_is_left_out() -> None:
    ring = a_round()
    begun(ring)
    for _ in range(2):
        assert ring.deadline is not None
        now = ring.deadline
        for node, pieces in zip(OWNERS, (5, 4, 0), strict=True):
            ring.progressed(node, 1, pieces, now)
        actions = ring.tick(now)
    assert notices(actions) == [("left_out", "b"), ("retry", None)]
    assert only(Abort, actions)[0].nodes == ("b",)
    assert [m.node for m in only(Begin, actions)[0].members] == ["a", "c"]
    assert ring.reduce_took is not None and ring.reduce_took.cut_off == 1 and ring.reduce_took.seconds == 30.0
    assert ring.deadline == now + 20.0


def test_a_silent_member_is_left_out_although_pieces_arrive() -> None:
    ring = a_round()
    begun(ring)
    ring.progressed("a", 1, 50, 1020.0)
    ring.progressed("b", 1, 60, 1020.0)
    ring.progressed("c", 1, 70, 1021.0 - SILENT_SECONDS - 0.1)
    actions = ring.tick(1021.0)
    assert ("left_out", "c") in notices(actions)
    assert [m.node for m in only(Begin, actions)[0].members] == ["a", "b"]


def test_reports_of_another_attempt_or_of_strangers_are_no_progress() -> None:
    ring = a_round()
    begun(ring)
    ring.progressed("stranger", 1, 1000, 1020.0)
    for node in ("a", "b"):
        ring.progressed(node, 1, 5, 1020.0)
    ring.progressed("c", 0, 5, 1020.0)
    ring.progressed("c", 2, 5, 1020.0)
    assert ("left_out", "c") in notices(ring.tick(1021.0))
    # Reports about the first attempt do not count for the second.
    assert ring.attempt == 2 and ring.deadline == 1041.0
    assert only(Abort, ring.tick(1041.0))[0].nodes == ("a", "b")


def test_a_line_that_broke_is_tried_again_with_the_same_members() -> None:
    ring = a_round()
    begun(ring)
    ring.reduced("a", 1, 5, 1003.0)
    ring.progressed("a", 1, 50, 1003.0)
    actions = ring.broke("b", 1, "the direct line to c broke", 1004.0)
    assert notices(actions) == [("retry", "b")] and ring.left_out == {}
    [begin] = only(Begin, actions)
    assert begin.attempt == 2 and [m.node for m in begin.members] == list(OWNERS)
    assert ring.deadline == 1024.0
    # Both ends may say that the same line broke.
    assert ring.broke("c", 1, "the direct line from b ended", 1004.1) == []
    assert ring.broke("stranger", 2, "x", 1004.2) == []
    for node in OWNERS:
        actions = ring.reduced(node, 2, 6, 1005.0)
    assert actions == [Commit(2, OWNERS)]


def test_lines_that_keep_breaking_end_the_round() -> None:
    ring = a_round(max_attempts=4)
    begun(ring)
    for attempt in range(1, 5):
        actions = ring.broke("b", attempt, "the direct line to c broke", 1004.0)
    assert ring.outcome == "aborted" and only(Abort, actions) == [Abort(OWNERS, "given up after 4 attempts")]
    assert ring.broke("b", 4, "x", 1005.0) == []


def test_members_are_those_of_the_attempt_and_then_of_the_commit() -> None:
    ring = a_round()
    assert ring.members == ()
    begun(ring)
    assert ring.members == OWNERS
    ring.gone("b", "connection lost", 1002.0)
    assert ring.members == ("a", "c")
    ring.reduced("a", 2, 6, 1005.0)
    ring.reduced("c", 2, 6, 1005.0)
    assert ring.outcome == "committed" and ring.members == ("a", "c")


def test_a_round_that_no_single_member_holds_up_ends() -> None:
    ring = a_round()
    begun(ring)
    actions = ring.tick(1026.0)
    assert only(Abort, actions)[0].nodes == OWNERS and ring.outcome == "aborted"

    ring = a_round()
    begun(ring)
    for now in (1021.0, 1031.0):
        for node in OWNERS:
            ring.progressed(node, 1, 3, now)
        actions = ring.tick(now)
    assert "equally slow" in only(Abort, actions)[0].reason and ring.outcome == "aborted"


def test_attempts_end() -> None:
    owners = tuple(f"n{i}" for i in range(9))
    ring = a_round(owners=owners, max_attempts=3)
    for node in owners:
        ring.joined(node, join(), 1001.0)
    for node in owners[:3]:
        actions = ring.gone(node, "x", 1002.0)
    assert ring.outcome == "aborted" and "after 3 attempts" in only(Abort, actions)[-1].reason
    assert only(Abort, actions)[-1].nodes == owners[3:]


def test_strangers_and_repeated_reports_are_ignored() -> None:
    ring = a_round()
    assert ring.joined("stranger", join(), 1001.0) == []
    assert ring.gone("stranger", "x", 1001.0) == []
    ring.joined("a", join(), 1001.0)
    assert ring.joined("a", join(samples=1), 1001.0) == []
    ring.gone("b", "x", 1001.0)
    assert ring.gone("b", "x", 1002.0) == []
    [begin] = only(Begin, ring.joined("c", join(), 1003.0))
    assert [m.weight for m in begin.members] == [0.5, 0.5]
    assert ring.reduced("stranger", 1, 3, 1004.0) == []
    ring.reduced("a", 1, 3, 1004.0)
    assert ring.reduced("a", 1, 3, 1004.0) == []


# Members that lie, with real reduces


class Liar(RingSwarm):
    """A ring in which n1 changes all pieces that it sends."""

    def __init__(self, count: int, lie: Any) -> None:
        super().__init__(count, CODECS["float32"])
        self.lie = lie
        self.learn(7)

    def send(self, source: str, to: str, message: Any) -> None:
        if source == "n1" and isinstance(message, tuple) and isinstance(message[1], Piece):
            message = (message[0], self.lie(message[1]))
        super().send(source, to, message)


@pytest.mark.parametrize(
    "lie",
    [
        lambda p: Piece(p.hop, p.segment, p.chunk, torch.full_like(p.data, 255)),
        lambda p: Piece(p.hop, p.segment, p.chunk, (p.data.view(torch.float32) * 1e6 + 1e6).view(torch.uint8)),
        lambda p: Piece(p.hop, p.segment, p.chunk, p.data[:-1]),
        lambda p: Piece(p.hop, p.segment, p.chunk + 1000, p.data),
        lambda p: Piece(p.hop + 1, p.segment, p.chunk, p.data),
    ],
    ids=["not finite", "far too long", "too short", "no such piece", "wrong hop"],
)
def test_a_member_that_sends_invalid_pieces_is_left_out_and_the_others_average_without_it(lie: Any) -> None:
    swarm = Liar(4, lie)
    swarm.begin(1)
    swarm.run()
    assert swarm.commit is not None and "n1" not in swarm.commit.nodes
    assert ("left_out", "n1") in [(notice.kind, notice.node) for notice in swarm.notices]
    honest = [node for node in swarm.survivors if node.name in swarm.commit.nodes]
    assert len(honest) == 3 and all(torch.equal(node.now, honest[0].now) for node in honest)

"""How long a round waits for a late owner, and what becomes of what that owner has learned."""

from collections.abc import Mapping

import pytest
import torch

from ravnest.averaging.participants import RingHistory
from ravnest.averaging.patience import MIN_GRACE_SECONDS, Patience
from ravnest.averaging.ring_round import RingRound, RoundSettings
from ravnest.averaging.round_messages import Abort, Action, Begin, Join, Notice
from ravnest.codecs.codec import CODECS
from tests.averaging.ring_swarm import VECTOR, RingSwarm, drawn

PATIENCE = Patience(interval_seconds=20.0, catch_up_seconds=4.0)
PIECES = 40


def a_round(owners: Mapping[str, int], patience: Patience | None = PATIENCE, usual: float = 5.0) -> RingRound:
    settings = RoundSettings(60.0, 10.0, 10.0, None, patience=patience, usual_reduce_seconds=usual)
    return RingRound(owners, RingHistory(), settings, 0.0, lambda members: PIECES)


def join(samples: int) -> Join:
    return Join(samples, 1.0, True, 0)


def left_out(actions: list[Action]) -> dict[str | None, str]:
    return {each.node: each.reason for each in actions if isinstance(each, Notice) and each.kind == "left_out"}


def test_waiting_ends_where_it_delays_the_others_more_than_it_helps_the_late_one() -> None:
    grace = PATIENCE.grace(late=100, joined=200, members=2)
    assert grace is not None and grace.seconds == pytest.approx((20 + 4) * 100 / 200)
    fewer = PATIENCE.grace(late=10, joined=200, members=2)
    assert fewer is not None and fewer.seconds == pytest.approx(24 / 20)
    hardly = Patience(interval_seconds=0.01).grace(late=1, joined=200, members=2)
    assert hardly is not None and hardly.seconds == MIN_GRACE_SECONDS, "a pause of a process is not lateness"


@pytest.mark.parametrize(("late", "joined", "members"), [(100, 100, 2), (150, 100, 3), (10, 100, 1), (0, 0, 2)])
def test_less_than_most_of_the_samples_or_one_member_is_no_quorum(late: int, joined: int, members: int) -> None:
    assert PATIENCE.grace(late, joined, members) is None


def test_a_ring_with_a_quorum_goes_on_without_a_late_owner_and_says_why() -> None:
    ring = a_round({"a": 100, "b": 100, "c": 100})
    ring.joined("a", join(100), 1.0)
    assert ring.deadline == 60.0, "one member is no quorum"
    ring.joined("b", join(100), 2.0)
    assert ring.deadline == pytest.approx(2.0 + 12.0)
    assert ring.tick(13.9) == []
    actions = ring.tick(14.0)
    assert list(left_out(actions)) == ["c"] and "delay the 200 samples of the others" in left_out(actions)["c"]
    [begin] = [each for each in actions if isinstance(each, Begin)]
    assert [(member.node, member.weight) for member in begin.members] == [("a", 0.5), ("b", 0.5)]
    # That it was not waited for says nothing about the deadline.
    assert ring.join_took is not None and ring.join_took.cut_off == 0
    assert [each.nodes for each in ring.joined("c", join(100), 15.0) if isinstance(each, Abort)] == [("c",)]


def test_an_owner_that_has_learned_most_is_waited_for() -> None:
    ring = a_round({"a": 100, "b": 100, "c": 300})
    ring.joined("a", join(100), 1.0)
    ring.joined("b", join(100), 2.0)
    assert ring.deadline == 60.0
    actions = ring.joined("c", join(300), 50.0)
    [begin] = [each for each in actions if isinstance(each, Begin)]
    assert [member.weight for member in begin.members] == pytest.approx([0.2, 0.2, 0.6])


def test_a_round_without_patience_waits_until_its_deadline() -> None:
    ring = a_round({"a": 100, "b": 100, "c": 1}, patience=None)
    ring.joined("a", join(100), 1.0)
    ring.joined("b", join(100), 2.0)
    assert ring.deadline == 60.0


def reducing(patience: Patience | None, samples: Mapping[str, int]) -> RingRound:
    ring = a_round(samples, patience)
    for node, count in samples.items():
        ring.joined(node, join(count), 0.0)
    assert ring.attempt == 1 and ring.deadline == 10.0
    return ring


def test_a_reduce_goes_on_without_a_line_that_would_take_longer_than_it_is_worth() -> None:
    # b has a fortieth of its pieces after 10 s, and so needs 390 s more; a is the sender.
    for patience, without in ((PATIENCE, ["a"]), (None, [])):
        ring = reducing(patience, {"a": 100, "b": 100, "c": 100})
        for node, pieces in (("a", 30), ("b", 1), ("c", 20)):
            ring.progressed(node, 1, pieces, 9.5)
        actions = ring.tick(10.0)
        assert list(left_out(actions)) == without
        assert ring.attempt == (2 if without else 1)
        if without:
            assert "with it the reduce would take 390 s more, without it 5 s" in left_out(actions)["a"]


def test_a_reduce_that_is_nearly_done_or_has_two_members_waits() -> None:
    ring = reducing(PATIENCE, {"a": 100, "b": 100, "c": 100})
    for node in "abc":
        ring.progressed(node, 1, 30 if node == "b" else 39, 9.5)
    assert ring.tick(10.0) == [] and ring.attempt == 1
    ring = reducing(PATIENCE, {"a": 100, "b": 100})
    for node, pieces in (("a", 30), ("b", 1)):
        ring.progressed(node, 1, pieces, 9.5)
    assert ring.tick(10.0) == [] and ring.attempt == 1


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_over_all_rounds_each_sample_counts_once_although_owners_are_late_in_turn(codec: str) -> None:
    """The anchor moves by the weighted mean of each round. An owner that was late brings all its samples to the next
    round with the weight of all of them, so what it learned is in the sum of the contributions exactly once."""
    swarm = RingSwarm(4, CODECS[codec])
    fed = dict.fromkeys(swarm.nodes, 0)
    counted = dict.fromkeys(swarm.nodes, 0)
    learned = {name: torch.zeros(VECTOR.coded_values, dtype=torch.float64) for name in swarm.nodes}
    contributed = {name: torch.zeros(VECTOR.coded_values, dtype=torch.float64) for name in swarm.nodes}
    tolerance = 1e-5 if codec == "float32" else 0.05
    late = [None, "n1", "n3", "n1", None, "n0", None]
    for round, absent in enumerate(late, start=1):
        for i, node in enumerate(swarm.nodes.values()):
            step = drawn(1000 * round + i) / 8
            step[VECTOR.coded_values :] = 0.0
            node.now += step
            learned[node.name] += step[: VECTOR.coded_values].double()
            fed[node.name] += 10 * (i + 1)
        for name, node in swarm.nodes.items():
            node.alive = name != absent
        shares = {name: fed[name] - counted[name] for name in swarm.nodes}
        here = {name: node for name, node in swarm.nodes.items() if node.alive}
        behind = {name: node.now[: VECTOR.coded_values] - node.state.anchor for name, node in here.items()}
        anchor = next(n for n in here.values() if n.state.committed == swarm.newest).state.anchor.double().clone()
        swarm.begin(round, shares)
        swarm.run()
        assert swarm.ring is not None and swarm.ring.outcome == "committed"
        assert set(swarm.ring.members) == set(here)
        weights = {name: shares[name] / sum(shares[n] for n in here) for name in here}
        mean = sum((weights[name] * behind[name].double() for name in here), torch.zeros_like(anchor))
        for node in here.values():
            assert torch.equal(node.state.anchor, next(iter(here.values())).state.anchor)
            assert torch.allclose(node.state.anchor.double(), anchor + mean, atol=tolerance)
        for name in here:
            contributed[name] += behind[name].double()
            counted[name] = fed[name]
    # After the last round, for which all were there, nothing is outstanding.
    assert counted == fed
    for name in swarm.nodes:
        assert torch.allclose(contributed[name], learned[name], atol=10 * tolerance)

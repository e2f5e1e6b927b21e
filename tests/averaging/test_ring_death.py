"""A member may die at any message: no survivor holds a half-averaged value, and survivors agree bit for bit."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ravnest.codecs.codec import CODECS, Codec
from tests.averaging.ring_swarm import VECTOR, RingSwarm, drawn

FLOAT32 = CODECS["float32"]


def swarm_of(count: int, codec: Codec = FLOAT32, outer: str = "mean") -> RingSwarm:
    swarm = RingSwarm(count, codec, outer)
    swarm.learn(7)
    return swarm


def check(swarm: RingSwarm, before: dict[str, Tensor], anchor: Tensor, round: int) -> None:
    """All that survivors are promised after a round, for either outcome."""
    assert swarm.ring is not None and swarm.ring.outcome is not None
    committed = [node for node in swarm.survivors if node.committed == round]
    if swarm.ring.outcome == "committed":
        assert swarm.commit is not None
        assert {node.name for node in committed} == {n.name for n in swarm.survivors if n.name in swarm.commit.nodes}
    else:
        assert swarm.commit is None and not committed
    for node in committed:
        assert torch.equal(node.now, committed[0].now)
        assert torch.equal(node.state.anchor, committed[0].state.anchor)
        assert torch.equal(node.now[: VECTOR.coded_values], node.state.anchor)
    for node in swarm.survivors:
        if node not in committed:
            assert torch.equal(node.now, before[node.name])
            assert torch.equal(node.state.anchor, anchor)
    if swarm.commit is not None and committed:
        weights = {name: 10 * (i + 1) for i, name in enumerate(swarm.nodes) if name in swarm.commit.nodes}
        want = sum(before[name].double() * w / sum(weights.values()) for name, w in weights.items())
        assert torch.allclose(committed[0].now.double(), want, atol=1e-5)


def check_that_nothing_is_lost(swarm: RingSwarm, round: int) -> None:
    """The next round includes everything that a failed round did not."""
    if len(swarm.survivors) < 2:
        return
    samples = {name: 10 * (i + 1) for i, name in enumerate(swarm.nodes)}
    total = sum(samples[node.name] for node in swarm.survivors)
    newest = max(swarm.survivors, key=lambda node: node.state.committed).state
    coded = VECTOR.coded_values
    want = newest.anchor.double().clone()
    for node in swarm.survivors:
        want += (node.now[:coded].double() - node.state.anchor.double()) * samples[node.name] / total
    newest_held = max(node.state.committed for node in swarm.survivors)
    swarm.begin(round)
    assert swarm.newest >= newest_held
    swarm.run()
    assert swarm.ring is not None and swarm.ring.outcome == "committed"
    for node in swarm.survivors:
        assert node.committed == round
        assert torch.equal(node.now, swarm.survivors[0].now)
        assert torch.allclose(node.state.anchor.double(), want, atol=1e-5)


def one_run(
    count: int, kill: str | None, at: int, told: bool, codec: Codec = FLOAT32, seed: int | None = None
) -> RingSwarm:
    swarm = swarm_of(count, codec)
    swarm.shuffle = random.Random(seed) if seed is not None else None
    before = {name: node.now.clone() for name, node in swarm.nodes.items()}
    swarm.begin(1)
    swarm.run(kill, at, told)
    if not codec.lossy:
        check(swarm, before, drawn(0)[: VECTOR.coded_values], 1)
    return swarm


@pytest.mark.parametrize("told", [True, False], ids=["told at once", "found out at the deadline"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_death_at_any_message_leaves_old_values_or_new_ones_and_loses_nothing(count: int, told: bool) -> None:
    messages = one_run(count, None, -1, told).delivered
    assert messages > count * (2 * (count - 1)) * 2
    outcomes = set()
    for name in [f"n{i}" for i in range(count)]:
        for at in range(messages + 1):
            swarm = one_run(count, name, at, told)
            assert swarm.ring is not None and swarm.ring.outcome is not None
            assert not swarm.nodes[name].alive or at == messages
            outcomes.add((swarm.ring.outcome, swarm.ring.attempt))
            check_that_nothing_is_lost(swarm, 2)
    # Deaths early, in the middle of an attempt, and after the commit all happened.
    if count == 2:
        assert {outcome for outcome, _ in outcomes} == {"committed", "aborted"}
    else:
        assert {("committed", 1), ("committed", 2)} <= outcomes and {o for o, _ in outcomes} == {"committed"}


def test_a_death_while_members_train_on_keeps_what_they_learned_since_the_snapshot() -> None:
    count = 3
    for at in range(70):
        swarm = swarm_of(count)
        before = {name: node.now.clone() for name, node in swarm.nodes.items()}
        swarm.progress_after_snapshot = True
        swarm.begin(1)
        swarm.run("n1", at, told=at % 2 == 0)
        for node in swarm.survivors:
            if node.committed:
                assert torch.allclose(node.now, swarm.survivors[0].now, atol=1e-5)
                assert torch.allclose(node.now[: VECTOR.coded_values], node.state.anchor + 0.125, atol=1e-5)
            else:
                assert torch.equal(node.now, before[node.name] + 0.125)


@pytest.mark.parametrize(("outer", "told"), [("mean", False), ("nesterov", True)])
def test_a_death_while_one_catches_up_loses_nothing_either(outer: str, told: bool) -> None:
    """n2 missed a round. In the next one any member may die at any message, also its donor and n2 itself."""
    coded, count = VECTOR.coded_values, 4

    def second_round() -> RingSwarm:
        swarm = swarm_of(count, FLOAT32, outer)
        swarm.nodes["n2"].alive = False
        swarm.begin(1)
        swarm.run()
        swarm.nodes["n2"].alive = True
        swarm.learn(5000)
        swarm.delivered = 0
        swarm.begin(2)
        return swarm

    whole = second_round()
    whole.run()
    assert whole.commit is not None and whole.commit.nodes == tuple(whole.nodes)
    for name in whole.nodes:
        for at in range(whole.delivered):
            swarm = second_round()
            before = {node.name: node.now[:coded] - node.state.anchor for node in swarm.survivors}
            swarm.run(name, at, told)
            committed = [node for node in swarm.survivors if node.committed == 2]
            assert len(committed) >= 2
            for node in swarm.survivors:
                if node in committed:
                    assert torch.equal(node.now, committed[0].now)
                    assert torch.equal(node.state.anchor, committed[0].state.anchor)
                else:
                    assert torch.allclose(node.now[:coded] - node.state.anchor, before[node.name], atol=1e-5)
            swarm.learn(9000)
            swarm.begin(3)
            swarm.run()
            assert all(torch.equal(node.now, swarm.survivors[0].now) for node in swarm.survivors)


@pytest.mark.parametrize("codec", [codec for codec in CODECS.values() if codec.lossy], ids=lambda codec: codec.name)
def test_survivors_agree_bit_for_bit_with_lossy_codecs_too(codec: Codec) -> None:
    for at in range(0, one_run(4, None, -1, True, codec).delivered, 4):
        swarm = one_run(4, "n2", at, told=at % 8 == 0, codec=codec)
        committed = [node for node in swarm.survivors if node.committed]
        assert len(committed) == 3
        assert all(torch.equal(node.now, committed[0].now) for node in committed)


@given(st.integers(2, 5), st.integers(0, 2**31), st.integers(0, 120), st.booleans(), st.booleans(), st.data())
@settings(max_examples=120)
def test_messages_in_any_order_and_more_than_once_change_nothing(
    count: int, seed: int, at: int, told: bool, repeat: bool, data: st.DataObject
) -> None:
    swarm = swarm_of(count)
    swarm.shuffle, swarm.repeat = random.Random(seed), repeat
    before = {name: node.now.clone() for name, node in swarm.nodes.items()}
    swarm.begin(1)
    killed = data.draw(st.sampled_from([None, *swarm.nodes]))
    swarm.run(killed, at, told)
    check(swarm, before, drawn(0)[: VECTOR.coded_values], 1)
    check_that_nothing_is_lost(swarm, 2)


@given(st.integers(0, 2**31), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 150)), max_size=4), st.booleans())
@settings(max_examples=80)
def test_several_deaths_in_one_round(seed: int, deaths: list[tuple[int, int]], told: bool) -> None:
    swarm = swarm_of(5)
    swarm.shuffle = random.Random(seed)
    before = {name: node.now.clone() for name, node in swarm.nodes.items()}
    swarm.begin(1)
    assert swarm.ring is not None
    while swarm.lines or swarm.ring.outcome is None:
        for which, at in deaths:
            if swarm.delivered == at and swarm.nodes[f"n{which}"].alive:
                swarm.kill(f"n{which}", told)
        if swarm.lines:
            swarm.step()
        elif swarm.ring.outcome is None:
            swarm.wait()
    check(swarm, before, drawn(0)[: VECTOR.coded_values], 1)
    check_that_nothing_is_lost(swarm, 2)


@pytest.mark.parametrize("outer", ["mean", "nesterov"])
def test_members_that_come_and_go_stay_bit_for_bit_together_over_rounds(outer: str) -> None:
    """One is cut off now and then; it catches up and its progress counts."""
    swarm = swarm_of(4, FLOAT32, outer)
    for round in range(1, 13):
        swarm.learn(1000 * round)
        away = f"n{round % 4}" if round % 3 else None
        if away is not None:
            swarm.nodes[away].alive = False
        swarm.begin(round)
        swarm.run()
        assert swarm.ring is not None and swarm.ring.outcome == "committed"
        anchors = [node.state.anchor for node in swarm.survivors]
        assert all(torch.equal(anchor, anchors[0]) for anchor in anchors)
        assert all(torch.equal(node.now, swarm.survivors[0].now) for node in swarm.survivors)
        if away is not None:
            swarm.nodes[away].alive = True

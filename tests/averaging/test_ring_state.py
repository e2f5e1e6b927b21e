"""State of a ring between rounds: anchors stay equal, progress is kept, nothing changes before a commit."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ravnest.averaging.outer.outer import outer_named
from ravnest.averaging.ring_state import RingState, TensorUpdate
from ravnest.averaging.segments import RingPosition
from ravnest.averaging.vector import Entry, RingVector
from ravnest.codecs.codec import CODECS, Codec
from ravnest.errors import PeerError
from tests.averaging.ring_drive import run_ring

FLOAT32 = CODECS["float32"]
VECTOR = RingVector([Entry("weight", (3, 4)), Entry("scalar", ())], [Entry("mean", (2,)), Entry("variance", (2,))])


def drawn(seed: int, vector: RingVector = VECTOR) -> Tensor:
    return torch.randn(vector.values, generator=torch.Generator().manual_seed(seed))


def states(count: int, outer: str = "mean", codec: Codec = FLOAT32) -> list[RingState]:
    return [RingState(VECTOR, drawn(0), outer_named(outer), codec) for _ in range(count)]


def a_round(
    round: int, rings: list[RingState], snapshots: list[Tensor], weights: list[float], piece_values: int | None = None
) -> list[TensorUpdate]:
    contributions = [ring.contribute(snapshot.clone()) for ring, snapshot in zip(rings, snapshots, strict=True)]
    assert all(contribution.finite for contribution in contributions)
    norms = [contribution.norm for contribution in contributions]
    reduces = [
        ring.reduce(contribution, RingPosition(i, weights, norms), piece_values)
        for i, (ring, contribution) in enumerate(zip(rings, contributions, strict=True))
    ]
    run_ring(reduces)
    return [
        ring.commit(round, contribution, done)
        for ring, contribution, done in zip(rings, contributions, reduces, strict=True)
    ]


def test_flattening_takes_any_float_type_and_views_give_the_shapes_back() -> None:
    tensors = {
        "weight": torch.arange(12.0).view(4, 3).t().to(torch.bfloat16),
        "scalar": torch.nn.Parameter(torch.tensor(7.0, dtype=torch.float64)),
        "mean": torch.tensor([1.0, 2.0]),
        "variance": torch.tensor([3.0, 4.0], dtype=torch.float16),
    }
    flat = VECTOR.flatten(tensors)
    assert flat.dtype == torch.float32 and not flat.requires_grad and flat.numel() == VECTOR.values == 17
    assert VECTOR.coded_values == 13
    for name, view in VECTOR.views(flat).items():
        assert torch.equal(view, tensors[name].detach().float())


def test_a_commit_moves_all_members_to_the_same_anchor_and_keeps_progress_since_the_snapshot() -> None:
    rings, snapshots = states(3), [drawn(i + 1) for i in range(3)]
    weights = [0.5, 0.2, 0.3]
    want = sum(w * s.double() for w, s in zip(weights, snapshots, strict=True))
    changes = a_round(1, rings, snapshots, weights)
    for snapshot, ring, change in zip(snapshots, rings, changes, strict=True):
        later = torch.full_like(snapshot, 0.25)
        now = snapshot + later
        for name, view in VECTOR.views(now).items():
            view += change.adds[name]
        assert torch.allclose(now.double(), want + later, atol=1e-6)
        assert torch.equal(ring.anchor, rings[0].anchor) and ring.committed == 1
        assert change.becomes is not None
        assert torch.equal(VECTOR.flatten(change.becomes)[: VECTOR.coded_values], ring.anchor)
        assert torch.allclose(VECTOR.flatten(change.becomes).double(), want, atol=1e-6)


def test_a_mean_is_made_in_the_memory_of_the_last_one_that_counted_and_of_no_other() -> None:
    def memory(ring: RingState) -> int:
        made = ring.reduce(ring.contribute(drawn(9)), RingPosition(0, [1.0], None))
        return made.result.data_ptr()

    ring, other = (RingState(VECTOR, drawn(0), outer_named("mean"), FLOAT32, keeps_memory=True) for _ in range(2))
    contributions = [each.contribute(drawn(i + 1)) for i, each in enumerate((ring, other))]
    reduces = [
        each.reduce(own, RingPosition(i, [0.5, 0.5], None))
        for i, (each, own) in enumerate(zip((ring, other), contributions, strict=True))
    ]
    run_ring(reduces)
    change = ring.commit(1, contributions[0], reduces[0])
    assert change.becomes is not None
    becomes = VECTOR.flatten(change.becomes)
    assert memory(ring) == reduces[0].result.data_ptr()
    # The attempt above has not counted, and pieces of it may still be on their way.
    assert memory(ring) != reduces[0].result.data_ptr()
    assert torch.equal(VECTOR.flatten(change.becomes), becomes)
    assert memory(other) != reduces[1].result.data_ptr()


def test_a_round_that_fails_leaves_no_trace_and_the_next_one_holds_what_was_learned() -> None:
    rings = states(2, "nesterov")
    anchor = rings[0].anchor.clone()
    contributions = [ring.contribute(drawn(i + 1)) for i, ring in enumerate(rings)]
    kept = [contribution.values.clone() for contribution in contributions]
    norms = [contribution.norm for contribution in contributions]
    run_ring([ring.reduce(contributions[i], RingPosition(i, [0.5, 0.5], norms)) for i, ring in enumerate(rings)])
    for ring, contribution, values in zip(rings, contributions, kept, strict=True):
        assert torch.equal(ring.anchor, anchor) and ring.committed == 0 and ring.outer.state is None
        assert torch.equal(contribution.values, values)
    again = rings[0].contribute(drawn(1))
    assert torch.equal(again.values, kept[0])


def test_an_attempt_after_a_failed_one_gives_the_same_as_if_it_were_the_first() -> None:
    rings = states(3)
    contributions = [ring.contribute(drawn(i + 1)) for i, ring in enumerate(rings)]
    norms = [contribution.norm for contribution in contributions]
    begun = rings[0].reduce(contributions[0], RingPosition(0, [0.2, 0.3, 0.5], norms))
    list(begun.start())
    done = [ring.reduce(contributions[i], RingPosition(i, [0.4, 0.6], norms[:2])) for i, ring in enumerate(rings[:2])]
    run_ring(done)
    want = 0.4 * contributions[0].values + 0.6 * contributions[1].values
    assert torch.allclose(done[0].result, want, atol=1e-6)


def test_one_that_missed_a_commit_catches_up_and_keeps_its_progress() -> None:
    rings = states(3, "nesterov")
    missing = rings[2]
    own = drawn(3)
    a_round(1, rings[:2], [drawn(1), drawn(2)], [0.5, 0.5])
    contribution = missing.contribute(own.clone())
    difference = contribution.values.clone()
    change = missing.catch_up(1, rings[0].donation())
    assert torch.equal(missing.anchor, rings[0].anchor) and missing.committed == 1
    assert missing.outer.state is not None and rings[0].outer.state is not None
    assert torch.equal(missing.outer.state, rings[0].outer.state)
    assert set(change.adds) == {"weight", "scalar"} and change.becomes is None
    now = VECTOR.views(own.clone())
    for name, add in change.adds.items():
        now[name] += add
    moved = VECTOR.flatten(now)
    # The progress of the member is on top of the new anchor now, and its contribution is still right.
    coded = VECTOR.coded_values
    assert torch.allclose(moved[:coded] - missing.anchor, difference[:coded], atol=1e-6)
    changes = a_round(2, rings, [drawn(4), drawn(5), moved], [0.2, 0.3, 0.5])
    assert len(changes) == 3 and all(torch.equal(ring.anchor, rings[0].anchor) for ring in rings)


@pytest.mark.parametrize(
    "donation",
    [torch.zeros(12), torch.zeros(26), torch.full((13,), math.nan), torch.zeros(13, dtype=torch.float64)],
    ids=["short", "with a state that the mean has not", "not finite", "not float32"],
)
def test_a_donation_that_does_not_fit_is_refused_and_changes_nothing(donation: Tensor) -> None:
    ring = states(1)[0]
    with pytest.raises(PeerError):
        ring.catch_up(4, donation)
    assert torch.equal(ring.anchor, drawn(0)[:13]) and ring.committed == 0


def test_a_donation_is_a_copy() -> None:
    ring = states(1)[0]
    donation = ring.donation()
    donation.zero_()
    assert torch.equal(ring.anchor, drawn(0)[:13])


def test_what_is_not_finite_is_said_before_it_can_do_harm() -> None:
    for place in (0, 16):
        snapshot = drawn(1)
        snapshot[place] = math.nan
        assert not states(1)[0].contribute(snapshot).finite
    contribution = states(1)[0].contribute(drawn(0))
    assert contribution.finite and contribution.norm == 0.0


def test_a_difference_longer_than_granted_is_clipped_to_what_is_granted() -> None:
    rings = states(2)
    far = drawn(0)
    far[:13] += 100.0
    far[13:] = 8.0
    contributions = [rings[0].contribute(far), rings[1].contribute(drawn(0))]
    granted = contributions[0].norm / 50
    run_ring(
        done := [
            ring.reduce(contributions[i], RingPosition(i, [0.5, 0.5], [granted, 0.0])) for i, ring in enumerate(rings)
        ]
    )
    assert torch.allclose(done[1].result[:13], torch.tensor(1.0))
    assert torch.allclose(done[1].result[13:], (drawn(0)[13:] + 8.0) / 2)


def test_variances_are_named_as_those_that_must_not_become_negative_and_means_are_not() -> None:
    rings = states(2)
    snapshots = [drawn(1), drawn(2)]
    for snapshot, means in zip(snapshots, ([1.0, 1.0], [-5.0, 1.0]), strict=True):
        snapshot[13:15] = torch.tensor(means)
        snapshot[15:] = torch.tensor([0.0, 2.0])
    # The first member's means happen to be positive, but not those of all members.
    assert [change.not_negative for change in a_round(1, rings, snapshots, [0.5, 0.5])] == [frozenset({"variance"})] * 2


@pytest.mark.parametrize("outer", ["mean", "nesterov"])
@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_anchors_stay_bit_for_bit_equal_over_many_rounds(codec: Codec, outer: str) -> None:
    """With lossy codecs too, and where a short round follows a long one: no honest member is refused."""
    vector = RingVector([Entry("weight", (40, 33))], [Entry("mean", (7,))])
    rings = [RingState(vector, drawn(0, vector), outer_named(outer), codec) for _ in range(4)]
    now = [drawn(0, vector) for _ in rings]
    for round in range(1, 21):
        size = random.Random(round).choice([1e-4, 1e-2, 1.0])
        for i, values in enumerate(now):
            values += size * drawn(1000 * round + i, vector)
        for values, change in zip(now, a_round(round, rings, now, [0.1, 0.2, 0.3, 0.4], 256), strict=True):
            assert change.becomes is not None
            values.copy_(vector.flatten(change.becomes))
        assert all(torch.equal(ring.anchor, rings[0].anchor) for ring in rings)
        assert all(torch.equal(values, now[0]) for values in now)


def test_what_a_coarse_codec_loses_comes_in_later_rounds() -> None:
    vector = RingVector([Entry("weight", (40, 33))])
    rings = [RingState(vector, drawn(0, vector), outer_named("mean"), CODECS["int4"]) for _ in range(3)]
    now = [drawn(0, vector) for _ in rings]
    want = drawn(0, vector).double()
    errors = []
    for round in range(1, 41):
        for i, values in enumerate(now):
            learned = drawn(1000 * round + i, vector)
            values += learned
            want += learned.double() / 3
        for values, change in zip(now, a_round(round, rings, now, [1 / 3] * 3, 256), strict=True):
            assert change.becomes is not None
            values.copy_(vector.flatten(change.becomes))
        errors.append(float((rings[0].anchor - want).norm()))
    assert max(errors[20:]) < 2 * max(errors[:5])


# Models cut at different places


@st.composite
def cut_models(draw: st.DrawFn) -> tuple[list[Entry], list[set[int]], list[int], int]:
    shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
    model = [Entry(f"t{i}", shape) for i, shape in enumerate(draw(st.lists(shapes, min_size=1, max_size=8)))]
    clusters = draw(st.integers(1, 6))
    cuts = [draw(st.sets(st.integers(1, len(model)), max_size=3)) for _ in range(clusters)]
    samples = draw(st.lists(st.integers(1, 500), min_size=clusters, max_size=clusters))
    return model, cuts, samples, draw(st.integers(0, 2**31))


@pytest.mark.parametrize("background", [True, False], ids=["in the background", "blocking"])
@given(cut_models())
@settings(max_examples=60)
def test_whatever_the_cuts_every_cluster_ends_with_the_weighted_mean(
    background: bool, case: tuple[list[Entry], list[set[int]], list[int], int]
) -> None:
    model, cuts, samples, seed = case
    generator = torch.Generator().manual_seed(seed)
    weights = [s / sum(samples) for s in samples]
    begun = {entry.name: torch.randn(entry.shape, generator=generator) for entry in model}
    trained = [{e.name: begun[e.name] + torch.randn(e.shape, generator=generator) for e in model} for _ in cuts]
    want = {
        entry.name: sum(w * tensors[entry.name].double() for w, tensors in zip(weights, trained, strict=True))
        for entry in model
    }
    now = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in trained]
    later = [{e.name: torch.randn(e.shape, generator=generator) for e in model} for _ in cuts]
    bounds = sorted({0, len(model)}.union(*cuts))
    for start, end in itertools.pairwise(bounds):
        vector = RingVector(model[start : (start + end + 1) // 2], model[(start + end + 1) // 2 : end])
        rings = [RingState(vector, vector.flatten(begun), outer_named("mean"), FLOAT32) for _ in cuts]
        changes = a_round(1, rings, [vector.flatten(tensors) for tensors in trained], weights, 3)
        for tensors, more, change in zip(now, later, changes, strict=True):
            for name, add in change.adds.items():
                assert change.becomes is not None
                if background:
                    tensors[name] += more[name]
                    tensors[name] += add
                else:
                    tensors[name] = change.becomes[name].clone()
    largest = max(float(t.abs().max()) for tensors in trained for t in tensors.values())
    for tensors, more in zip(now, later, strict=True):
        for name, tensor in tensors.items():
            local = more[name].double() if background else 0.0
            assert float((tensor.double() - want[name] - local).abs().max()) <= 1e-6 * (largest + 5.0)
            if not background:
                assert torch.equal(tensor, now[0][name])

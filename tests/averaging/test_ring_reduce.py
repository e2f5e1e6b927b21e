"""The reduce: the weighted mean, bit for bit the same at all members, and no invalid piece gets in."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ravnest.averaging.norms import NormBounds, codec_error, norm
from ravnest.averaging.ring_reduce import ErrorFeedback, Piece, RingReduce
from ravnest.averaging.segments import RingPosition
from ravnest.codecs.codec import CODECS, Codec
from ravnest.errors import PeerError
from tests.averaging.ring_drive import run_ring

FLOAT32 = CODECS["float32"]
LOSSY = [codec for codec in CODECS.values() if codec.lossy]


def by_name(codec: Codec) -> str:
    return codec.name


def ring(
    vectors: Sequence[Tensor],
    coded: int,
    weights: Sequence[float],
    codec: Codec,
    piece_values: int | None = None,
    residuals: Sequence[Tensor | None] | None = None,
    scale_of_first: float = 1.0,
) -> list[RingReduce]:
    norms = [norm(vector[:coded]) for vector in vectors]
    return [
        RingReduce(
            vector,
            coded,
            RingPosition(i, weights, norms),
            codec,
            piece_values=piece_values,
            feedback=ErrorFeedback(residuals[i] if residuals else None),
            scale=1.0 if i else scale_of_first,
        )
        for i, vector in enumerate(vectors)
    ]


def direct(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return sum((vector.double() * w for vector, w in zip(vectors, weights, strict=True)), torch.zeros(())).double()


@st.composite
def rings(draw: st.DrawFn) -> tuple[list[Tensor], int, list[float], int, int]:
    members = draw(st.integers(1, 6))
    coded, plain = draw(st.integers(0, 70)), draw(st.integers(0, 30))
    samples = draw(st.lists(st.integers(0, 1000), min_size=members, max_size=members).filter(any))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = draw(st.sampled_from([1e-30, 1e-8, 1.0, 1e12, 1e30]))
    vectors = [torch.randn(coded + plain, generator=generator) * size for _ in range(members)]
    return vectors, coded, [s / sum(samples) for s in samples], draw(st.integers(1, 9)), draw(st.integers(0, 999))


@given(rings())
@settings(max_examples=150)
def test_all_members_hold_the_weighted_mean_bit_for_bit(case: tuple[list[Tensor], int, list[float], int, int]) -> None:
    vectors, coded, weights, piece_values, seed = case
    members = ring(vectors, coded, weights, FLOAT32, piece_values)
    before = [vector.clone() for vector in vectors]
    run_ring(members, seed)
    packed = ring(vectors, coded, weights, CODECS["lossless"], piece_values)
    run_ring(packed, seed)
    members += packed
    assert all(member.done for member in members)
    want = direct(vectors, weights)
    largest = max((float(v.abs().max()) for v in vectors if v.numel()), default=0.0)
    for member in members:
        assert torch.equal(member.result, members[0].result)
        assert member.digest == members[0].digest
        assert float((member.result.double() - want).abs().max() if want.numel() else 0.0) <= 1e-6 * largest
    assert all(torch.equal(a, b) for a, b in zip(vectors, before, strict=True))


@pytest.mark.parametrize("codec", LOSSY, ids=by_name)
@given(rings())
@settings(max_examples=60)
def test_lossy_codecs_agree_bit_for_bit_and_stay_within_their_error(
    codec: Codec, case: tuple[list[Tensor], int, list[float], int, int]
) -> None:
    vectors, coded, weights, piece_values, seed = case
    if codec.name == "float16":
        # Beyond its range float16 only keeps the end of the range.
        vectors = [vector.clamp(-6e4, 6e4) for vector in vectors]
    members = ring(vectors, coded, weights, codec, piece_values)
    run_ring(members, seed)
    want = direct(vectors, weights)
    largest = max((float(v.abs().max()) for v in vectors if v.numel()), default=0.0)
    # Every one of up to n encodings errs, each on a sum that the errors before it made a little larger.
    once = codec.error(largest)
    allowed = len(vectors) * (once + codec.error(largest + len(vectors) * once)) + 1e-6 * largest
    for member in members:
        assert torch.equal(member.result, members[0].result)
        assert member.digest == members[0].digest
        off = (member.result.double() - want).abs()
        assert float(off[:coded].max() if coded else 0.0) <= allowed
        assert float(off[coded:].max() if len(off) > coded else 0.0) <= 1e-6 * largest


def test_the_error_of_a_coarse_codec_is_sent_later_and_does_not_grow() -> None:
    codec, count, members = CODECS["int4"], 700, 3
    generator = torch.Generator().manual_seed(5)
    weights = [0.2, 0.5, 0.3]
    way = torch.randn(count, generator=generator)
    residuals: list[Tensor | None] = [None] * members
    got, want = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    errors = []
    for _ in range(50):
        vectors = [way + torch.randn(count, generator=generator) for _ in range(members)]
        reduces = ring(vectors, count, weights, codec, 128, residuals)
        run_ring(reduces)
        residuals = [reduce.next_residual for reduce in reduces]
        assert all(torch.equal(reduce.result, reduces[0].result) for reduce in reduces)
        got += reduces[0].result
        want += direct(vectors, weights)
        errors.append(float((got - want).norm()))
    # The sum over rounds is off by what the residuals hold now, and by nothing else.
    held = sum((r.double() for r in residuals if r is not None), torch.zeros(()).double())
    assert torch.allclose(got + held, want, atol=1e-3)
    assert max(errors[25:]) < 2 * max(errors[:5])
    assert errors[-1] / float(want.norm()) < 0.01


def test_each_member_sends_the_minimum_of_a_ring() -> None:
    count, members = 6000, 4
    vectors = [torch.ones(count) for _ in range(members)]
    reduces = ring(vectors, count, [0.25] * members, FLOAT32, 500)
    # Six hops of a quarter of the vector each, in pieces of 500.
    assert run_ring(reduces) == members * 6 * 3
    assert [reduce.progress for reduce in reduces] == [18] * members


def test_one_member_is_done_at_once() -> None:
    alone = RingReduce(torch.tensor([1.0, 2.0]), 1, RingPosition(0, [0.5], [1.0]), FLOAT32)
    assert alone.done and list(alone.start()) == []
    assert alone.result.tolist() == [0.5, 1.0]


def test_a_clipped_member_scales_its_coded_section_and_not_its_plain_values() -> None:
    weights, norms = [0.5, 0.5], [2.0, 1.0]
    clipped = RingReduce(torch.tensor([8.0, 3.0]), 1, RingPosition(0, weights, norms), FLOAT32, scale=0.25)
    other = RingReduce(torch.tensor([1.0, 1.0]), 1, RingPosition(1, weights, norms), FLOAT32)
    run_ring([clipped, other])
    assert other.result.tolist() == [1.5, 2.0]


def test_digests_differ_where_results_do() -> None:
    def digest(values: list[float]) -> int:
        return RingReduce(torch.tensor(values), 2, RingPosition(0, [1.0], None), FLOAT32).digest

    assert digest([1.0, 2.0, 3.0]) == digest([1.0, 2.0, 3.0])
    assert len({digest([1.0, 2.0, 3.0]), digest([1.0, 2.0, 4.0]), digest([1.0, 2.0]), digest([0.0, 0.0, 0.0])}) == 4


# Pieces that a receiver refuses


def pair(norms: Sequence[float] | None = (2.0, 2.0)) -> tuple[RingReduce, RingReduce]:
    """Two members with 4 coded values and 2 plain ones, whose segments are 2 and 1: two pieces each."""
    own = torch.tensor([1.0, 1.0, 1.0, 1.0, 5.0, 5.0])
    first, second = (RingReduce(own.clone(), 4, RingPosition(i, [0.5, 0.5], norms), FLOAT32) for i in range(2))
    return first, second


def encoded(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(torch.uint8)


@pytest.mark.parametrize(
    ("piece", "says"),
    [
        (Piece(2, 0, 0, encoded(1, 1)), "hop 2"),
        (Piece(-1, 0, 0, encoded(1, 1)), "hop -1"),
        (Piece(0, 1, 0, encoded(1, 1)), "segment 1 came on hop 0"),
        (Piece(0, 0, 2, encoded(1, 1)), "has 2 pieces"),
        (Piece(0, 0, -1, encoded(1, 1)), "has 2 pieces"),
        (Piece(0, 0, 0, encoded(1)), "are 8"),
        (Piece(0, 0, 0, encoded(1, 1, 1)), "are 8"),
        (Piece(0, 0, 0, torch.ones(2)), "are 8"),
        (Piece(0, 0, 0, encoded(1, math.nan)), "not finite"),
        (Piece(0, 0, 1, encoded(math.inf)), "not finite"),
        (Piece(0, 0, 0, encoded(9, 9)), "norm"),
        (Piece(1, 1, 0, encoded(1, 1)), "before this member's share"),
    ],
)
def test_a_piece_that_cannot_be_is_refused(piece: Piece, says: str) -> None:
    _, second = pair()
    with pytest.raises(PeerError, match=says):
        second.receive(piece)
    assert second.progress == 0


def test_a_piece_that_comes_twice_is_refused() -> None:
    _, second = pair()
    second.receive(Piece(0, 0, 0, encoded(0.5, 0.5)))
    with pytest.raises(PeerError, match="twice"):
        second.receive(Piece(0, 0, 0, encoded(0.5, 0.5)))


def test_a_sum_that_comes_before_its_share_was_added_is_refused_also_for_a_foreign_segment() -> None:
    reduce = RingReduce(torch.ones(3), 3, RingPosition(0, [1 / 3] * 3, None), FLOAT32)
    list(reduce.start())
    with pytest.raises(PeerError, match="before this member's share"):
        reduce.receive(Piece(3, 2, 0, encoded(1)))


def test_lengths_add_up_over_pieces() -> None:
    """A sender that stays within the bound in each piece, but not in all of them together, is refused."""
    own = torch.ones(64)
    reduce = RingReduce(own, 64, RingPosition(1, [0.5, 0.5], [8.0, 8.0]), FLOAT32, piece_values=4)
    with pytest.raises(PeerError, match="norm"):
        for chunk in range(8):
            reduce.receive(Piece(0, 0, chunk, encoded(1.5, 1.5, 1.5, 1.5)))


def test_plain_values_that_make_the_sum_overflow_are_refused() -> None:
    own = torch.tensor([1.0, 3e38, 3e38, 3e38])
    reduce = RingReduce(own, 1, RingPosition(1, [0.3, 0.3, 0.4], None), FLOAT32)
    with pytest.raises(PeerError, match="overflow"):
        reduce.receive(Piece(0, 0, 0, encoded(3e38)))


@pytest.mark.parametrize("codec", CODECS.values(), ids=by_name)
def test_a_member_is_never_blamed_for_a_piece_that_it_accepted(codec: Codec) -> None:
    """One member adds more than it declared, in every piece. Only the next member may refuse that."""
    count, members = 1600, 5
    vectors = [torch.randn(count, generator=torch.Generator().manual_seed(i)) for i in range(members)]
    weights = [0.3, 0.0, 0.2, 0.4, 0.1]
    for factor in torch.linspace(0.5, 4.0, 36).tolist():
        # The first member declares the true length of its vector and sends more or less.
        reduces = ring(vectors, count, weights, codec, 128, scale_of_first=factor)
        lines = [(1, piece) for piece in reduces[0].start()]
        for i in range(1, members):
            lines += [((i + 1) % members, piece) for piece in reduces[i].start()]
        while lines:
            to, piece = lines.pop(0)
            try:
                onward = reduces[to].receive(piece)
            except PeerError:
                assert to == 1
                break
            if onward is not None:
                lines.append(((to + 1) % members, onward))


def test_limits_grow_from_hop_to_hop_also_where_nothing_is_added() -> None:
    """Two machines may disagree about the last bits of a norm; the one further on must be the more tolerant."""
    limits = NormBounds(RingPosition(3, [0.5, 0.0, 0.5, 0.0], [3.0] * 4), FLOAT32, 0.0, 9).by_hop
    assert len(limits) == 6
    assert all(limit < later for limit, later in itertools.pairwise(limits))


def test_values_whose_squares_overflow_are_no_false_alarm() -> None:
    own = torch.full((8,), 1e30)
    run_ring(reduces := ring([own, own], 6, [0.5, 0.5], FLOAT32))
    assert torch.equal(reduces[0].result, own)


def test_plain_values_may_be_of_any_length() -> None:
    own = torch.tensor([1e-3, 1e-3, 1e20, 1e20])
    run_ring(reduces := ring([own, own], 2, [0.5, 0.5], FLOAT32))
    assert torch.equal(reduces[1].result, own)


@pytest.mark.parametrize("codec", LOSSY, ids=by_name)
def test_the_error_allowed_for_a_codec_covers_the_worst_case(codec: Codec) -> None:
    # One large value and all others half a step off the grid, where rounding loses most.
    for block in (64, 256):
        for part in torch.linspace(0.0, 1.0, 509).tolist():
            values = torch.full((block,), part)
            values[0] = 1.0
            lost = codec.decode(codec.encode(values), block) - values
            assert float(lost.norm()) <= codec_error(codec) * float(values.norm()) * 1.001


@given(
    st.sampled_from(list(CODECS.values())),
    st.lists(
        st.tuples(
            st.integers(-1, 5), st.integers(-1, 3), st.integers(-1, 4), st.one_of(st.none(), st.binary(max_size=40))
        ),
        max_size=20,
    ),
    st.integers(0, 2**31),
)
@settings(max_examples=150)
def test_any_piece_is_refused_or_harmless(
    codec: Codec, sent: list[tuple[int, int, int, bytes | None]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    reduce = RingReduce(torch.ones(17), 11, RingPosition(1, [0.3, 0.3, 0.4], [3.4] * 3), codec, piece_values=2)
    list(reduce.start())
    for hop, segment, chunk, data in sent:
        # None stands for random bytes of a size that fits.
        size = codec.size_bytes(2)
        raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) if data is None else None
        piece = Piece(
            hop, segment, chunk, raw if raw is not None else torch.tensor(list(data or b""), dtype=torch.uint8)
        )
        before = reduce.progress
        try:
            onward = reduce.receive(piece)
        except PeerError:
            assert reduce.progress == before
            continue
        assert reduce.progress == before + 1
        if onward is not None:
            assert (onward.hop, onward.segment, onward.chunk) == (hop + 1, segment, chunk)
            # Four bytes are the one plain value of a segment's second piece.
            sizes = range(codec.size_bytes(2) + 1) if codec.varies else (codec.size_bytes(1), codec.size_bytes(2), 4, 8)
            assert len(onward.data) in sizes

"""The codec of a ring and the time of a round, from the lines and from what training takes of them."""

import math

import pytest

from ravnest.planner.link_codecs import share_of
from ravnest.planner.problem import NO_LIMIT, Network, Provider
from ravnest.planner.rings.line_shares import (
    WHOLE_LINES,
    LineShares,
    round_share,
)
from ravnest.planner.rings.ring_codecs import (
    AUTO,
    RING_CHOICES,
    RingCodec,
    RingLoad,
    choose_ring_codec,
    in_one_sentence,
    piece_values,
    ring_rates,
)
from ravnest.planner.rings.rings import Ring
from ravnest.planner.rings.round_time import round_time
from ravnest.state_budget import BUDGET_SHARE, FLOOR_SHARE

MB = 1e6


def machine(name: str, up: float, down: float = NO_LIMIT, latency: float = 0.0) -> Provider:
    return Provider(
        name=name, memory_bytes=1 << 40, up_bytes_per_second=up, down_bytes_per_second=down, latency_seconds=latency
    )


def ring(*owners: str, size: float = 8 * MB) -> Ring:
    return Ring(0, 1, owners, size, NO_LIMIT)


def test_the_codec_is_the_most_precise_within_the_budget_of_the_line() -> None:
    load, codecs = RingLoad(8 * MB, 0.0, 1 * MB), []
    for codec in RING_CHOICES:
        enough = load.sent_bytes(codec) / (BUDGET_SHARE * MB)
        assert choose_ring_codec(AUTO, load, enough * 1.001).codec == codec
        codecs.append(choose_ring_codec(AUTO, load, enough * 0.999).codec)
    assert codecs == ["bfloat16", "int8", "int4", "int4"]
    too_slow = choose_ring_codec(AUTO, load, 1.0)
    assert too_slow.codec == "int4" and "more than 15% of its slowest line (8 Mbit/s) carry" in too_slow.reason
    within = choose_ring_codec(AUTO, load, 20.0)
    assert within.codec == "int8" and within.reason.startswith("int8: each owner sends 1.9")
    assert "instead of 7.63 MiB in float32, within 15% of its slowest line (8 Mbit/s)" in within.reason


def test_what_no_codec_makes_smaller_counts_in_full() -> None:
    assert choose_ring_codec(AUTO, RingLoad(8 * MB, 0.0, 1 * MB), 30.0).codec == "bfloat16"
    assert choose_ring_codec(AUTO, RingLoad(8 * MB, 2 * MB, 1 * MB), 30.0).codec == "int8"


def test_a_setting_decides_and_owners_without_a_line_lose_nothing() -> None:
    slow = RingLoad(8 * MB, 0.0, 1.0)
    assert choose_ring_codec("float16", slow, 1.0) == RingCodec("float16", "float16, as averaging.codec says")
    assert choose_ring_codec(AUTO, RingLoad(8 * MB, 0.0, NO_LIMIT), 0.0).codec == "float32"


def test_rings_share_a_line_in_proportion_to_their_sizes() -> None:
    nodes = {name: machine(name, 8 * MB) for name in "abc"} | {"d": machine("d", 2 * MB)}
    rates = ring_rates([ring("a", "b", size=3 * MB), ring("a", "c", size=1 * MB)], Network(), nodes)
    assert rates == pytest.approx([6 * MB, 2 * MB])
    assert ring_rates([ring("a", "d")], Network(), nodes) == pytest.approx([2 * MB])


def test_pieces_are_small_on_slow_lines() -> None:
    assert piece_values("float32", NO_LIMIT) == 0
    assert 4 * piece_values("float32", 1.25 * MB) == 64 << 10
    assert piece_values("int8", 1.25 * MB) * 4 * share_of("int8") == pytest.approx(64 << 10, rel=0.01)
    assert 4 * piece_values("float32", 100 * MB) == pytest.approx(MB)


def test_the_codecs_of_all_rings_make_one_sentence() -> None:
    one, other = RingCodec("int8", "int8: a slow line"), RingCodec("float32", "float32: a fast line")
    assert in_one_sentence([one, one]) == "rings travel in int8: a slow line"
    assert in_one_sentence([one, other, one]) == (
        "2 rings travel in int8: a slow line; 1 ring travels in float32: a fast line"
    )


def test_a_round_gets_what_training_leaves_and_never_nothing() -> None:
    assert round_share(0.0) == pytest.approx(0.9)
    assert round_share(0.5) == pytest.approx(0.45)
    assert round_share(0.99) == round_share(7.0) == FLOOR_SHARE


def test_a_round_counts_lines_training_latency_coding_and_shared_lines() -> None:
    nodes = {name: machine(name, 1 * MB, latency=0.02) for name in "abcd"}
    alone = [ring("a", "b"), ring("c", "d")]

    def predicted(rings: list[Ring], shares: LineShares = WHOLE_LINES, codec: str = "float32") -> tuple[float, ...]:
        found = round_time(rings, [2 * MB] * len(rings), [codec] * len(rings), 3.0, Network(), nodes, shares)
        assert found.seconds == pytest.approx(3.0 + found.reducing_seconds)
        return found.line_seconds, found.latency_seconds, found.coding_seconds, found.budget_seconds

    line, latency, coding, budget = predicted(alone)
    # Two owners send 8 MB each at 1 MB/s.
    assert line == pytest.approx(8.0) and budget == pytest.approx(8.0 / BUDGET_SHARE)
    # Two steps over 40 ms each, and five messages of 20 ms.
    assert latency == pytest.approx(2 * 0.04 + 5 * 0.02)
    assert predicted(alone, LineShares(0.5))[0] == pytest.approx(16.0)
    assert predicted(alone, LineShares(1.0, up={"a": 0.1}))[0] == pytest.approx(80.0)
    assert predicted([*alone, ring("a", "c")])[0] == pytest.approx(16.0)
    assert predicted(alone, codec="int4")[2] > coding
    many = predicted([ring("a", "b", "c", "d")])
    assert many[0] == pytest.approx(2 * 3 / 4 * 8.0) and many[1] == pytest.approx(6 * 0.04 + 5 * 0.02)
    assert not math.isinf(many[3])

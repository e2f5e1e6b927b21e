"""Every link gets the codec that loses least of those with which its cluster stays as fast."""

import itertools

import numpy as np
import pytest

from ravnest.planner.cluster import Cluster, cluster_of
from ravnest.planner.link_codecs import CHOICES, EXACT, FREE_SHARE, share_of
from ravnest.planner.problem import Goal, Line, Network, Provider
from ravnest.planner.search.cuts import best_cuts
from ravnest.planner.search.search import form
from tests.planner.instances import random_model, random_providers
from tests.planner.made_up import machine, model

AUTOMATIC = Goal(codecs=CHOICES)
MIB = 2.0**20


def cluster(*mbps: float, goal: Goal = AUTOMATIC, in_flight: int = 16, crossing_bytes: float = MIB) -> Cluster:
    """Stages of 150 ms each, and lines of so many Mbit/s between each two."""
    costs = model(12, layer_seconds=0.0375, crossing_bytes=crossing_bytes)
    order = [machine(name, mbps=1e6) for name in "abcdefgh"[: len(mbps) + 1]]
    measured = {}
    for (one, other), rate in zip(itertools.pairwise(order), mbps, strict=True):
        measured[one.name, other.name] = measured[other.name, one.name] = Line(rate * 125_000, 0.01)
    cuts = [4 * k for k in range(1, len(order))]
    return cluster_of(costs, goal, Network(measured), order, cuts, in_flight)


def codecs(found: Cluster) -> list[str]:
    return [stage.codec for stage in found.stages[1:]]


def test_a_link_is_coded_as_little_as_its_line_allows() -> None:
    # A MiB takes 8.4 s at 1 Mbit/s, and the stages compute for about 160 ms.
    assert codecs(cluster(100, 50)) == ["float32", "bfloat16"]
    assert codecs(cluster(20, 500)) == ["int8", "float32"]
    assert codecs(cluster(1000, 2)) == ["float32", "int8"]


def test_the_reason_names_what_the_line_would_take_uncoded() -> None:
    found = cluster(20, 500).stages
    assert "with float32 for 419 ms" in found[1].codec_reason and found[1].codec_reason.startswith("int8: ")
    assert found[2].codec_reason.startswith("float32: its lines are busy for 17 ms")


def test_a_slower_line_elsewhere_gives_the_others_time() -> None:
    # At 2 Mbit/s even int8 takes a second: with float32 the other line is no slower.
    assert codecs(cluster(20, 500)) == ["int8", "float32"]
    assert codecs(cluster(20, 2)) == ["float32", "int8"]


def test_stages_on_one_machine_are_not_coded() -> None:
    costs = model(12, crossing_bytes=8 * MIB)
    order = [machine(name, mbps=1, host="tower") for name in "abc"]
    found = cluster_of(costs, AUTOMATIC, Network(), order, [4, 8], 8)
    assert codecs(found) == ["float32", "float32"]
    assert found.stages[1].codec_reason == "float32: no line lies between them"


def test_links_that_share_a_machine_s_line_are_counted_together() -> None:
    costs = model(12, layer_seconds=0.0375, crossing_bytes=MIB)
    middle = machine("b", mbps=1e6, up_mbps=120)
    order = [machine("a", mbps=1e6), middle, machine("c", mbps=1e6)]
    # Its own line sends gradients to one side and activations to the other: 140 ms in float32.
    found = cluster_of(costs, AUTOMATIC, Network(), order, [4, 8], 16)
    assert found.stages[1].up_seconds <= FREE_SHARE * found.busiest_seconds
    assert sorted(codecs(found)) == ["float32", "lossless"]
    two = cluster_of(costs, AUTOMATIC, Network(), order[:2], [6], 16)
    assert codecs(two) == ["float32"]


def test_what_must_be_exact_is_packed_where_a_line_would_hold_the_cluster_back() -> None:
    exact = Goal(codecs=EXACT)
    # 100 Mbit/s carry a MiB in 84 ms: fast enough. At 55 Mbit/s float32 takes 153 ms of 160, too much to be safe.
    assert codecs(cluster(100, 55, goal=exact)) == ["float32", "lossless"]
    assert codecs(cluster(20, 500, goal=exact)) == ["lossless", "float32"]
    reason = cluster(20, 500, goal=exact).stages[1].codec_reason
    assert reason.startswith("lossless: ") and "with float32 for 419 ms" in reason and "nothing may be lost" in reason


def test_packing_is_not_worth_it_on_a_fast_line() -> None:
    # With one in flight every microbatch waits for its way, but to pack it takes longer than 300 Mbit/s do.
    exact = Goal(codecs=EXACT)
    assert codecs(cluster(300, goal=exact, in_flight=1)) == ["float32"]
    assert codecs(cluster(150, goal=exact, in_flight=1)) == ["lossless"]


def test_what_is_set_holds_for_every_link() -> None:
    for codec in ("float32", "lossless", "float16", "bfloat16", "int8"):
        found = cluster(100, 50, goal=Goal(codecs=(codec,)))
        assert codecs(found) == [codec, codec]
        assert found.stages[1].codec_reason == f"{codec}, as pipeline.codec says"


def test_coded_bytes_are_what_lines_carry() -> None:
    plain, packed = (cluster(20, 20, goal=Goal(codecs=(codec,))) for codec in ("float32", "int8"))
    for one, other in zip(plain.stages, packed.stages, strict=True):
        assert other.line_seconds == pytest.approx(share_of("int8") * one.line_seconds)
        assert other.compute_seconds == one.compute_seconds


def test_what_no_codec_makes_smaller_is_counted_in_full() -> None:
    costs = model(4, crossing_bytes=1000.0)
    object.__setattr__(costs, "plain_bytes", (np.full(5, 400.0), np.zeros(5)))
    forward, backward = costs.carried(0.25)
    assert forward[2] == 0.25 * 600 + 400 and backward[2] == 0.25 * 1000


def test_a_way_that_is_long_for_what_is_in_flight_is_kept_short() -> None:
    # 60 ms are no bottleneck; but with one in flight every microbatch waits for the way of the one before.
    assert codecs(cluster(150, in_flight=16)) == ["float32"]
    assert codecs(cluster(150, in_flight=1)) == ["int8"]


@pytest.mark.parametrize("seed", range(8))
def test_a_chosen_codec_never_costs_a_cluster_its_rate(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs, order = random_model(rng), random_providers(rng, int(rng.integers(2, 6)), gib=(30, 60))
    chosen = best_cuts(costs, AUTOMATIC, Network(), order)
    smallest = best_cuts(costs, Goal(codecs=("int8",)), Network(), order)
    assert chosen is not None and smallest is not None
    assert chosen.period_seconds == pytest.approx(smallest.period_seconds, rel=1e-6)
    assert set(codecs(chosen)) <= set(CHOICES)


def test_a_plan_with_codecs_to_choose_from_is_no_worse_than_without() -> None:
    rng = np.random.default_rng(3)
    costs = random_model(rng)
    providers: list[Provider] = random_providers(rng, 6, gib=(2, 4))
    with_codecs = form(costs, AUTOMATIC, Network(), providers)
    without = form(costs, Goal(), Network(), providers)
    assert with_codecs.score >= without.score * (1 - 1e-9)

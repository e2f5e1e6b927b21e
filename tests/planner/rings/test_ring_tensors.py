"""Every parameter, buffer and counter is averaged in one ring, by those who hold it, and in one fragment."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ravnest.errors import PlanError
from ravnest.graph.capture.capture import capture
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.graph.portable import PortableGraph, WeightSpec
from ravnest.planner.rings.rings import Ring
from ravnest.planner.rings.tensors import MAX_COUNTED, RingTensors, check_can_be_averaged, fragments, tensors_of
from tests.graph.cutting import ALL, example
from tests.planner.rings.cut_rings import rings_cut_at


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", range(3))
def test_a_ring_holds_what_the_stages_of_its_owners_hold(name: str, seed: int) -> None:
    graph = example(name).graph
    plan = layout(graph)
    numbers = np.random.default_rng(seed)
    # Stages need not own a parameter here: what they hold between two cuts is averaged all the same.
    cuts = [sorted(numbers.choice(plan.cuts, min(s, len(plan.cuts)), replace=False).tolist()) for s in (0, 1, 3)]
    rings = rings_cut_at(graph, cuts)
    held = [tensors_of(graph, plan, ring) for ring in rings]
    used = {reference for node in plan.line for reference in node.references()} | set(graph.metrics.values())
    expected = [w.name for w in (*graph.parameters, *graph.states) if w.name in used]
    assert sorted(spec.name for tensors in held for spec in tensors.all) == sorted(expected)
    for c, places in enumerate(cuts):
        for stage, part in enumerate(split(graph, places)):
            mine = [t for ring, t in zip(rings, held, strict=True) if f"c{c}s{stage}" in ring.owners]
            assert {p for t in mine for p in t.parameters} == set(part.parameters)
            assert {s for t in mine for s in (*t.buffers, *t.counters)} == set(part.states)


def test_statistics_are_averaged_and_counters_are_not() -> None:
    graph = example("resnet").graph
    (ring,) = rings_cut_at(graph, [[], []])
    tensors = tensors_of(graph, layout(graph), ring)
    assert {spec.key.rpartition(".")[2] for spec in tensors.buffers} == {"running_mean", "running_var"}
    assert {spec.key.rpartition(".")[2] for spec in tensors.counters} == {"num_batches_tracked"}
    assert tensors.values == sum(math.prod(spec.shape) for spec in (*tensors.parameters, *tensors.buffers))


def test_a_piece_without_a_parameter_is_a_ring_if_it_has_a_buffer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4, affine=False), nn.ReLU(), nn.Linear(4, 2))
    batches = [(torch.randn(n, 4), torch.randn(n, 2)) for n in (3, 5)]
    graph = capture(model, F.mse_loss, {}, batches).graph
    plan = layout(graph)
    first, last = min(plan.state_use.values()), max(plan.state_use.values())
    before, after = max(c for c in plan.cuts if c <= first), min(c for c in plan.cuts if c > last)
    rings = rings_cut_at(graph, [[before], [after]])
    (alone,) = (ring for ring in rings if (ring.start, ring.end) == (before, after))
    tensors = tensors_of(graph, plan, alone)
    assert not tensors.parameters
    assert [spec.key for spec in tensors.buffers] == ["2.running_mean", "2.running_var"]
    assert [spec.key for spec in tensors.counters] == ["2.num_batches_tracked"]


def test_a_piece_without_anything_to_average_is_no_ring() -> None:
    graph = example("cnn").graph
    plan = layout(graph)
    used = {*plan.first_use.values(), *plan.state_use.values()}
    before, after = next((a, b) for a, b in itertools.pairwise(plan.cuts) if used.isdisjoint(range(a, b)))
    rings = rings_cut_at(graph, [[before], [after]])
    assert len(rings) == 2 and all(tensors_of(graph, plan, ring).all for ring in rings)


def test_too_many_whole_numbers_are_refused_with_the_buffers_name_and_the_fix() -> None:
    def counting(*sizes: int) -> PortableGraph:
        states = [WeightSpec(f"s{i}", f"layer.{i}.seen", torch.int64, (size, 2)) for i, size in enumerate(sizes)]
        return PortableGraph(nodes=(), states=(WeightSpec("mean", "mean", torch.float32, (MAX_COUNTED,)), *states))

    check_can_be_averaged(counting(100, MAX_COUNTED // 2 - 100))
    with pytest.raises(PlanError, match=r"buffer layer\.1\.seen has 65,336 whole numbers.*--clusters 1"):
        check_can_be_averaged(counting(101, MAX_COUNTED // 2 - 100))


def test_complex_numbers_are_refused_by_name() -> None:
    graph = PortableGraph(nodes=(), parameters=(WeightSpec("w", "phase.weight", torch.complex64, (2,)),))
    with pytest.raises(PlanError, match=r"phase\.weight has complex numbers.*--clusters 1"):
        check_can_be_averaged(graph)


@st.composite
def drawn_rings(draw: st.DrawFn) -> list[tuple[Ring, RingTensors]]:
    rings, number = [], itertools.count()

    def specs(dtype: torch.dtype, most: int) -> tuple[WeightSpec, ...]:
        sizes = draw(st.lists(st.integers(0, 1000), max_size=most))
        return tuple(WeightSpec(f"t{i}", f"key.{i}", dtype, (size,)) for size, i in zip(sizes, number, strict=False))

    for k in range(draw(st.integers(1, 5))):
        # The first cluster is cut at every ring, the second at every other one.
        ring = Ring(k, k + 1, (f"c0s{k}", f"c1s{k // 2}"), 1.0, 1.0)
        rings.append((ring, RingTensors(specs(torch.float32, 8), specs(torch.float32, 3), specs(torch.int64, 2))))
    return rings


@settings(max_examples=150)
@given(drawn_rings(), st.integers(1, 6))
def test_every_tensor_is_in_exactly_one_fragment(rings: list[tuple[Ring, RingTensors]], count: int) -> None:
    parts = fragments(rings, count)
    assert parts == fragments(rings, count)
    for ring, tensors in rings:
        mine = [part for part in parts if part.ring is ring]
        for kind in ("parameters", "buffers", "counters"):
            found = [spec for part in mine for spec in getattr(part.tensors, kind)]
            assert sorted(found, key=lambda s: s.name) == sorted(getattr(tensors, kind), key=lambda s: s.name)
        order = {spec.name: i for i, spec in enumerate(tensors.all)}
        for part in mine:
            assert [order[s.name] for s in part.tensors.all] == sorted(order[s.name] for s in part.tensors.all)
        assert len({part.fragment for part in mine}) == len(mine)
    used = {part.fragment for part in parts}
    assert used == set(range(len(used))) and len(used) <= count
    assert all(part.tensors.all for part in parts)


@settings(max_examples=150)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 6))
def test_fragments_of_one_ring_differ_by_no_more_than_the_largest_tensor(sizes: list[int], count: int) -> None:
    specs = tuple(WeightSpec(f"t{i}", f"t{i}", torch.float32, (size,)) for i, size in enumerate(sizes))
    parts = fragments([(Ring(0, 1, ("a", "b"), 1.0, 1.0), RingTensors(specs))], count)
    loads = [part.tensors.values for part in parts]
    assert len(loads) == min(count, len(sizes))
    assert max(loads) - min(loads) <= max(sizes)


def test_every_owner_sends_about_as_much_in_every_fragment() -> None:
    """Whole rings in turn would leave the peak of every line as it is."""
    graph = example("hf_gpt2").graph
    plan = layout(graph)
    cuts = [list(plan.cuts[len(plan.cuts) // 2 :][:1]), list(plan.cuts[len(plan.cuts) // 3 :: len(plan.cuts) // 3])]
    rings = [(ring, tensors_of(graph, plan, ring)) for ring in rings_cut_at(graph, cuts)]
    parts = fragments(rings, 3)
    for owner in {owner for ring, _ in rings for owner in ring.owners}:
        loads = [0, 0, 0]
        for part in parts:
            if owner in part.ring.owners:
                loads[part.fragment] += part.tensors.values
        largest = max(math.prod(s.shape) for ring, t in rings if owner in ring.owners for s in t.all)
        assert max(loads) <= sum(loads) / 3 + largest

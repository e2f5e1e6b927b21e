"""Places where a graph may be cut, for each kind of node."""

import pytest
import torch

from ravnest.graph.aliasing import Aliases, written_names
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.graph.portable import Node, PortableGraph, Ref, ValueSpec, WeightSpec
from tests.graph.cutting import ALL, example


@pytest.mark.parametrize("name", ALL)
def test_no_cut_parts_a_value_from_an_operator_that_changes_it_in_place(name: str) -> None:
    graph = example(name).graph
    plan, aliases = layout(graph), Aliases(graph)
    for cut in plan.cuts:
        written_later = {aliases.group(w) for node in plan.line[cut:] for w in written_names(node)}
        for value in plan.crossing[cut]:
            assert aliases.group(value.name) not in written_later, f"{value.name} crosses at {cut} and is then changed"


@pytest.mark.parametrize("name", ALL)
def test_what_reads_and_what_writes_a_state_stay_together(name: str) -> None:
    graph = example(name).graph
    plan, aliases = layout(graph), Aliases(graph)
    states = {aliases.group(s.name): s.key for s in graph.states}
    for cut in plan.cuts:
        used = [
            {aliases.group(name) for node in side for name in node.references()} & set(states)
            for side in (plan.line[:cut], plan.line[cut:])
        ]
        assert not used[0] & used[1], f"the cut at {cut} parts {[states[g] for g in used[0] & used[1]]}"


@pytest.mark.parametrize("name", ALL)
def test_the_place_of_a_state_is_in_the_stage_that_holds_it(name: str) -> None:
    graph = example(name).graph
    plan = layout(graph)
    assert set(plan.state_use) == {s.name for s in graph.states}
    for cut in plan.cuts:
        for held, states in zip((True, False), (part.states for part in split(graph, [cut])), strict=True):
            assert {s.name for s in states} == {n for n, place in plan.state_use.items() if (place < cut) is held}


@pytest.mark.parametrize("name", ALL)
def test_every_cut_lets_something_through_and_nothing_that_cannot_travel(name: str) -> None:
    plan = layout(example(name).graph)
    assert plan.cuts, "a model that cannot be cut shows nothing"
    for cut in plan.cuts:
        assert plan.crossing[cut]
        assert not any(v.dtype is not None and v.dtype.is_complex for v in plan.crossing[cut])


@pytest.mark.parametrize("name", ALL)
def test_what_crosses_a_cut_is_exactly_what_was_made_before_it_and_is_needed_after(name: str) -> None:
    graph = example(name).graph
    plan = layout(graph)
    parameters = {p.name for p in graph.parameters}
    assert not any(n.name in {m.name for m in plan.line} for n in plan.ahead)
    last = {graph.loss, *graph.metrics.values()}
    for cut in plan.cuts:
        before = {n.name for n in (*plan.ahead, *plan.line[:cut])} | {
            name for n in plan.line[:cut] for name in n.references() if name in parameters
        }
        after = {name for n in plan.line[cut:] for name in n.references()} | last
        assert {v.name for v in plan.crossing[cut]} == before & after


def test_masks_positions_and_sizes_are_computed_again_where_they_are_needed() -> None:
    plan = layout(example("hf_bert").graph)
    shared = set(plan.shared)
    assert shared, "BERT makes an attention mask"
    assert not any(n.output is not None and n.output.needs_grad for n in plan.shared.values())
    assert not any("linear" in n.op or "attention" in n.op or "dropout" in n.op for n in plan.shared.values())
    attentions = [n for n in plan.line if "attention" in n.op]
    assert len(attentions) == 3
    masks = {n.args[3].name for n in attentions if isinstance(n.args[3], Ref)}
    assert masks and masks <= shared


def test_a_frozen_backbone_is_real_work_and_is_not_repeated() -> None:
    plan = layout(example("frozen").graph)
    assert not any("conv" in n.op or "batch_norm" in n.op or "relu" in n.op for n in plan.shared.values())


def test_an_input_that_the_model_writes_into_is_copied_first() -> None:
    graph = example("in_place").graph
    copies = [n for n in graph.nodes if n.op == "aten.clone.default" and n.args == (Ref("inputs"),)]
    assert len(copies) == 1
    aliases = Aliases(graph)
    assert all(aliases.group(w) != aliases.group("inputs") for n in graph.nodes for w in written_names(n))


def test_a_write_through_a_keyword_forbids_the_cut_as_well() -> None:
    spec = {name: ValueSpec(name, torch.float32, ("b", 4), True) for name in ("a", "b", "c", "d")}
    nodes = (
        Node("a", "aten.mul.Tensor", (Ref("inputs"), Ref("w")), output=spec["a"]),
        Node("b", "aten.mul.Tensor", (Ref("a"), Ref("v")), output=spec["b"]),
        Node("c", "aten.add_.Tensor", (), {"other": Ref("b"), "self": Ref("a")}, output=spec["c"]),
        Node("d", "aten.mul.Tensor", (Ref("c"), Ref("u")), output=spec["d"]),
    )
    weights = tuple(WeightSpec(n, n, torch.float32, (4,)) for n in ("w", "v", "u"))
    graph = PortableGraph(nodes, inputs=(ValueSpec("inputs", torch.float32, ("b", 4)),), parameters=weights, loss="d")
    assert written_names(nodes[2]) == ["a"]
    assert layout(graph).cuts == (3,)


def test_a_gradient_comes_back_for_zeros_that_something_trained_was_written_into() -> None:
    graph = example("FilledIn").graph
    plan = layout(graph)
    (zeros,) = (node for node in plan.line if "new_zeros" in node.op)
    assert zeros.output is not None and not zeros.output.needs_grad, "when they are made"
    crossing = [v for cut in plan.cuts for v in plan.crossing[cut] if v.name == zeros.name]
    assert crossing and all(value.needs_grad for value in crossing)


def test_metrics_computed_early_cross_every_later_cut() -> None:
    graph = example("many_outputs").graph
    (activity,) = graph.metrics.values()
    plan = layout(graph)
    place = next(i for i, n in enumerate(plan.line) if n.name == activity)
    later = [cut for cut in plan.cuts if cut > place]
    assert later
    assert all(activity in {v.name for v in plan.crossing[cut]} for cut in later)


def test_nothing_is_cut_off_behind_the_loss() -> None:
    for name in ALL:
        graph = example(name).graph
        plan = layout(graph)
        place = next(i for i, n in enumerate(plan.line) if n.name == graph.loss)
        assert all(cut <= place for cut in plan.cuts), name

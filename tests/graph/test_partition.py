"""Cutting a model changes where it is computed, and nothing else."""

import random

import pytest
import torch

from ravnest.coordinator.plan.plan_run import check_stages
from ravnest.errors import PlanError
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import max_stages, split
from tests.exactness.plain_loop import call, copied, replayed_draws
from tests.graph.cutting import ALL, Outcome, even_costs, even_places, example, kept_generator, run
from tests.models import ZOO


@pytest.mark.parametrize("name", ALL)
def test_random_cuts_give_bitwise_the_same_loss_gradients_and_states(name: str) -> None:
    found, batch = example(name).captured, example(name).made.batches[2]
    whole = run(found, [], batch, microbatch=2)
    cuts = layout(found.graph).cuts
    chooser = random.Random(name)
    for count in (1, 1, 2, 3, 5, len(cuts)):
        places = sorted(chooser.sample(cuts, min(count, len(cuts))))
        _assert_same(run(found, places, batch, microbatch=2), whole, f"cut at {places}")


@pytest.mark.parametrize("name", ALL)
def test_the_whole_graph_computes_what_the_model_itself_does(name: str) -> None:
    made, found = example(name).made, example(name).captured
    model = ALL[name].make(batches=3).model.train()
    inputs, targets = copied(made.batches[2])
    with kept_generator(), replayed_draws(0, 2):
        loss = made.loss(call(model, inputs), targets)
    loss.backward()
    have = run(found, [], made.batches[2], microbatch=2)
    # Traced, transformers' Llama takes another attention kernel than it does when run plainly.
    tolerance = 1e-5 if name == "hf_llama" else 0.0
    torch.testing.assert_close(have.loss, loss.detach(), rtol=tolerance, atol=0.0)
    named = dict(model.named_parameters(remove_duplicate=False))
    assert {n for n, p in model.named_parameters() if p.grad is not None} == set(have.gradients)
    for key, gradient in have.gradients.items():
        want = named[key].grad
        assert want is not None
        torch.testing.assert_close(gradient, want, rtol=tolerance, atol=tolerance * float(want.abs().max()), msg=key)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for key, state in have.states.items():
        assert torch.equal(state, buffers[key]), key


@pytest.mark.parametrize("name", ALL)
def test_random_cuts_evaluate_to_the_same_numbers(name: str) -> None:
    found, batch = example(name).captured, example(name).made.batches[1]
    whole = run(found, [], batch, train=False)
    cuts = layout(found.graph).cuts
    places = sorted(random.Random(name).sample(cuts, min(3, len(cuts))))
    have = run(found, places, batch, train=False)
    _assert_same(have, whole, f"cut at {places}")
    for key, state in have.states.items():
        assert torch.equal(state, found.weights[key]), f"evaluation changed {key}"


@pytest.mark.parametrize("name", ["gpt_tied", "hf_gpt2", "OneLayerFourTimes"])
def test_a_tied_weight_stays_one_weight_under_every_cut(name: str) -> None:
    found, batch = example(name).captured, example(name).made.batches[0]
    tied = {"gpt_tied": "embedding.weight", "hf_gpt2": "transformer.wte.weight"}.get(name, "embedding.weight")
    whole = run(found, [], batch)
    cuts = layout(found.graph).cuts
    for cut in cuts if len(cuts) < 80 else cuts[::3]:
        stages = split(found.graph, [cut])
        assert [p.key for s in stages for p in s.parameters].count(tied) == 1, f"cut at {cut}"
        _assert_same(run(found, [cut], batch), whole, f"cut at {cut}")


@pytest.mark.parametrize("name", ALL)
def test_every_number_of_stages_up_to_the_most_can_really_be_made(name: str) -> None:
    graph = example(name).graph
    most = max_stages(graph)
    for stages in range(1, most + 1):
        parts = split(graph, even_places(graph, stages))
        assert len(parts) == stages
        assert all(part.parameters for part in parts)
        owned = [p.key for part in parts for p in part.parameters]
        assert sorted(owned) == sorted(p.key for p in graph.parameters)
        kept = [s.key for part in parts for s in part.states]
        assert sorted(kept) == sorted(s.key for s in graph.states)
        assert [part.loss for part in parts] == [None] * (stages - 1) + [graph.loss]
    with pytest.raises(PlanError, match=f"at most {most} stage.*not {most + 1}.*--providers {most} or fewer"):
        check_stages(even_costs(graph), most + 1)


@pytest.mark.parametrize("name", ALL)
def test_no_way_of_cutting_makes_more_stages_than_the_most(name: str) -> None:
    plan = layout(example(name).graph)
    bounds = [0, *plan.cuts, len(plan.line)]
    longest = [0] + [-(10**9)] * (len(bounds) - 1)
    for end in range(1, len(bounds)):
        for start in range(end):
            if any(bounds[start] <= place < bounds[end] for place in plan.first_use.values()):
                longest[end] = max(longest[end], longest[start] + 1)
    assert max_stages(example(name).graph) == longest[-1]


@pytest.mark.parametrize("name", ZOO)
def test_every_model_of_the_zoo_can_be_cut_into_four(name: str) -> None:
    assert max_stages(example(name).graph) >= 4


def test_masks_and_token_ids_are_fed_to_the_stages_that_need_them_and_cross_no_link() -> None:
    graph = example("hf_bert").graph
    parts = split(graph, even_places(graph, 4))
    for part in parts:
        for value in (*part.receives, *part.sends):
            assert value.dtype is not None and value.dtype.is_floating_point and value.needs_grad, value
    fed = [{v.name for v in part.inputs} for part in parts]
    assert fed[0] >= {"inputs_input_ids", "inputs_token_type_ids"}
    assert all("inputs_input_ids" not in names for names in fed[1:])
    attends = [any("attention" in n.op for n in part.nodes) for part in parts]
    assert [("inputs_attention_mask" in names) for names in fed] == attends
    assert [("targets" in names) for names in fed] == [False, False, False, True]


# T5 writes the distances of positions in place, so that they are made by one stage.
@pytest.mark.parametrize("name", [name for name in ZOO if name != "hf_t5"])
def test_no_whole_number_and_no_mask_crosses_any_cut_of_the_zoo(name: str) -> None:
    plan = layout(example(name).graph)
    for cut in plan.cuts:
        for value in plan.crossing[cut]:
            assert value.dtype is not None and value.dtype.is_floating_point, f"{value} crosses at {cut}"


def test_a_value_that_skips_a_stage_passes_through_it() -> None:
    graph = example("unet").graph
    root, stem, leaf = split(graph, even_places(graph, 3))
    skipping = {v.name for v in stem.receives} & {v.name for v in stem.sends}
    assert skipping, "the first level's activations are needed by the last"
    assert skipping <= {n.name for n in root.nodes}
    assert not skipping & {n.name for n in stem.nodes}
    assert skipping & {name for n in leaf.nodes for name in n.references()}


def test_a_size_is_read_off_what_a_stage_has_and_not_off_an_input_sent_for_that_alone() -> None:
    graph = example("hf_llama").graph
    parts = split(graph, even_places(graph, 3))
    assert [{v.name for v in part.inputs} for part in parts] == [{"inputs_input_ids"}, set(), {"targets"}]


def _assert_same(have: Outcome, want: Outcome, where: str) -> None:
    assert torch.equal(have.loss, want.loss), f"loss {where}"
    for what in ("metrics", "gradients", "states"):
        found, expected = getattr(have, what), getattr(want, what)
        assert set(found) == set(expected), f"{what} {where}"
        for key, value in expected.items():
            assert torch.equal(found[key], value), f"{what} {key} {where}"

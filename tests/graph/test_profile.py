"""Costs are measured on the real values, for every node, and measuring changes nothing."""

import copy

import pytest
import torch

from ravnest.graph.profile import profile
from ravnest.graph.program import Program
from tests.graph.cutting import ALL, Example, example


@pytest.mark.parametrize("name", ALL)
def test_every_node_that_trains_is_measured_and_nothing_is_changed(name: str) -> None:
    found = example(name).captured
    before, random_state = copy.deepcopy(dict(found.weights)), torch.get_rng_state()
    costs = profile(found.graph, found.weights, found.sample, samples=4)
    assert set(costs.nodes) == {step.node.name for step in Program(found.graph).train_steps}
    assert all(cost.forward_seconds > 0 and cost.backward_seconds >= 0 for cost in costs.nodes.values())
    assert costs.samples == 4 and costs.threads == torch.get_num_threads()
    assert torch.equal(torch.get_rng_state(), random_state)
    for key, weight in found.weights.items():
        assert torch.equal(weight, before[key]), key
        assert weight.grad is None


def test_a_backward_is_timed_where_there_is_one() -> None:
    found = example("frozen").captured
    costs = profile(found.graph, found.weights, found.sample, samples=4)
    frozen = [n.name for n in found.graph.nodes if n.output is not None and not n.output.needs_grad]
    trained = [n.name for n in found.graph.nodes if "linear" in n.op]
    assert frozen and trained
    assert all(costs.nodes[name].backward_seconds == 0 for name in frozen)
    assert all(costs.nodes[name].backward_seconds > 0 for name in trained)


def test_bytes_yielded_are_those_of_the_values() -> None:
    found = example("cnn").captured
    costs = profile(found.graph, found.weights, found.sample, samples=4)
    assert costs.nodes["conv2d"].output_bytes == 4 * 6 * 8 * 8 * 4
    assert costs.nodes[str(found.graph.loss)].output_bytes == 4


@pytest.mark.parametrize("name", ["cnn", "resnet", "gpt_tied", "unet", "hf_bert", "in_place"])
def test_bytes_saved_are_what_autograd_keeps_of_the_whole_model(name: str) -> None:
    found = example(name).captured
    costs = profile(found.graph, found.weights, found.sample, samples=4)
    assert sum(cost.saved_bytes for cost in costs.nodes.values()) == _saved_bytes(example(name))


def _saved_bytes(found: Example) -> int:
    """Bytes that autograd saves in one real forward, without weights and batch."""
    graph, captured = found.graph, found.captured
    weights = {w.name: captured.weights[w.key].clone() for w in graph.weights}
    for parameter in graph.parameters:
        weights[parameter.name].requires_grad_()
    known = {t.untyped_storage().data_ptr() for t in (*weights.values(), *captured.sample.values())}
    saved: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        Program(graph).run(captured.sample, weights, train=True)
    return sum(saved.values())

"""torch.compile of a stage gives the same function with numbered values; without a compiler the stage still trains."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.exc
import torch.nn.functional as F
from torch import nn

from ravnest.graph.capture.capture import Captured, capture
from ravnest.graph.compiling import as_module
from ravnest.graph.program import Program
from tests.models import ZOO
from tests.odd_models import ODD

CPU = torch.device("cpu")


def weights_of(found: Captured) -> dict[str, torch.Tensor]:
    trained = {spec.name for spec in found.graph.parameters}
    return {w.name: found.weights[w.key].clone().requires_grad_(w.name in trained) for w in found.graph.weights}


def gradients(loss: torch.Tensor, found: Captured, weights: dict[str, torch.Tensor]) -> list[Any]:
    wanted = [weights[spec.name] for spec in found.graph.parameters]
    return list(torch.autograd.grad(loss, wanted, allow_unused=True))


@pytest.mark.parametrize("kind", ["cnn_inplace", "resnet", "gpt_tied", "hf_bert", "gru", "frozen", "in_place"])
def test_the_function_that_is_compiled_is_the_graph(kind: str) -> None:
    made = ZOO[kind].make()
    found = capture(made.model, made.loss, made.metrics, made.batches[:2])
    check(found, found.structure.flatten(made.batches[0]))


WITH_BACKWARDS = ("Hooked", "OwnBackwards")
"""Odd models that bring a backward pass, which is interpreted."""


@pytest.mark.parametrize("kind", sorted(set(ODD) - set(WITH_BACKWARDS)))
def test_it_is_the_graph_of_odd_models_too(kind: str) -> None:
    made = ODD[kind].make()
    found = capture(made.model, made.loss, made.metrics, made.batches[:2])
    check(found, found.structure.flatten(made.batches[0]))


@pytest.mark.parametrize("kind", WITH_BACKWARDS)
def test_a_stage_with_a_backward_pass_of_its_own_says_why_it_is_not_compiled(kind: str) -> None:
    made = ODD[kind].make()
    found = capture(made.model, made.loss, made.metrics, made.batches[:2])
    with pytest.warns(UserWarning, match="defines its own backward pass"):
        program = Program(found.graph, compiled=True)
    assert "its own backward pass" in program.not_compiled
    loss = program.run(found.structure.flatten(made.batches[0]), weights_of(found), train=True)[str(found.graph.loss)]
    assert torch.isfinite(loss)


def check(found: Captured, values: dict[str, torch.Tensor]) -> None:
    # Random operators draw from one generator here and from seeds of their own there: both without seeds.
    graph = replace(found.graph, nodes=tuple(replace(n, seed=None) for n in found.graph.nodes))
    program = Program(graph)
    steps = [step.node for step in program.train_steps]
    module = as_module(steps, list(graph.given_names()), [str(graph.loss)], CPU)
    mine, theirs = weights_of(found), weights_of(found)
    torch.manual_seed(0)
    (loss,) = module(*program.environment(values, mine)[: len(list(graph.given_names()))])
    torch.manual_seed(0)
    expected = program.run(values, theirs, train=True)[str(graph.loss)]
    assert torch.equal(loss, expected)
    for one, other in zip(gradients(loss, found, mine), gradients(expected, found, theirs), strict=True):
        assert (one is None) == (other is None) and (one is None or torch.equal(one, other))
    for spec in graph.states:
        assert torch.equal(mine[spec.name], theirs[spec.name]), "batch norm counts in both"
    assert all(node.name.startswith(("g", "v", "detach", "output")) for node in module.graph.nodes), "no foreign names"


def a_net() -> tuple[Captured, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    batch = torch.randn(8, 6), torch.randint(0, 3, (8,))
    net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    found = capture(net, F.cross_entropy, {}, [batch])
    return found, found.structure.flatten(batch)


def test_a_compiled_stage_computes_what_an_uncompiled_one_does() -> None:
    found, values = a_net()
    program = Program(found.graph, compiled=True)
    mine, theirs = weights_of(found), weights_of(found)
    loss = program.run(values, mine, train=True)[str(found.graph.loss)]
    expected = Program(found.graph).run(values, theirs, train=True)[str(found.graph.loss)]
    torch.testing.assert_close(loss, expected)
    for one, other in zip(gradients(loss, found, mine), gradients(expected, found, theirs), strict=True):
        torch.testing.assert_close(one, other)
    assert program.not_compiled == ""


def test_where_nothing_can_be_compiled_the_stage_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*given: Any) -> Any:
        raise torch._dynamo.exc.TorchDynamoException("no C++ compiler was found")

    monkeypatch.setattr(torch, "compile", lambda module: no_compiler)
    found, values = a_net()
    program = Program(found.graph, compiled=True)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        loss = program.run(values, weights_of(found), train=True)[str(found.graph.loss)]
    assert torch.equal(loss, Program(found.graph).run(values, weights_of(found), train=True)[str(found.graph.loss)])
    assert program.not_compiled == "no C++ compiler was found"

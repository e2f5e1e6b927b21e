"""Runs a captured model, whole or cut, without engine and network: the results must not depend on the cuts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ravnest.engine.passes.row_lookups import RowLookups
from ravnest.graph.capture.capture import Captured, capture
from ravnest.graph.cutting.partition import split
from ravnest.graph.portable import PortableGraph
from ravnest.graph.portable_reader import read_graph
from ravnest.graph.profile import CostProfile, NodeCost
from ravnest.graph.program import Program
from ravnest.net.frames.decoding import decode
from ravnest.net.frames.encoding import encode
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.planner.count_costs import count_costs
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.search.cuts import best_cuts
from tests.exactness.plain_loop import copied
from tests.models import ZOO, Kind, Made
from tests.odd_models import ODD

ALL: dict[str, Kind] = {**ZOO, **ODD}


@dataclass(frozen=True)
class Example:
    made: Made
    captured: Captured

    @property
    def graph(self) -> PortableGraph:
        return self.captured.graph


@cache
def example(name: str) -> Example:
    """A model of the zoo with its capture. It is made once, and tests must not change it."""
    made = ALL[name].make(batches=3)
    return Example(made, capture(made.model, made.loss, made.metrics, made.batches[:2]))


def even_costs(graph: PortableGraph) -> ModelCosts:
    """Costs with the same time for every operator."""
    costs = CostProfile({n.name: NodeCost(1e-3, 0.0, 64, 0) for n in graph.nodes}, samples=4, threads=1)
    return count_costs(graph, costs, {v.name: 64 for v in graph.inputs})


def even_places(graph: PortableGraph, stages: int) -> list[int]:
    """Cuts for this many stages of about equal time."""
    equal = [Provider(name=f"p{i}", memory_bytes=1 << 50) for i in range(stages)]
    found = best_cuts(even_costs(graph), Goal(), Network(), equal)
    assert found is not None
    return [stage.start for stage in found.stages[1:]]


@dataclass(frozen=True)
class Outcome:
    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    """By key; parameters without a gradient have no entry."""
    states: dict[str, torch.Tensor]


def run(found: Captured, places: Sequence[int], batch: Any, *, train: bool = True, microbatch: int = 0) -> Outcome:
    """One microbatch through the stages cut at `places`: forward, and in training backward.

    Graphs travel as JSON and values as frames, as they do between machines.
    """
    graphs = [read_graph(stage.to_json()) for stage in split(found.graph, places)]
    tensors = found.structure.flatten(copied(batch))
    stages: list[_Ran] = []
    values: dict[str, Any] = {}
    lookups = RowLookups(graphs[-1], torch.device("cpu")) if graphs[-1].lookups else None
    if lookups is not None:
        weights = {w.name: found.weights[w.key] for w in graphs[-1].weights}
        values = lookups.look_up(microbatch, tensors, weights, train=train)
    with kept_generator():
        for graph in graphs:
            stages.append(_Ran.of(graph, found, {**tensors, **_sent(values)}, train, microbatch))
            values = stages[-1].results
    leaf = graphs[-1]
    loss = values[str(leaf.loss)]
    metrics = {} if train else {name: values[value] for name, value in leaf.metrics.items()}
    gradients: dict[str, torch.Tensor] = {}
    if train:
        back = {str(leaf.loss): torch.ones(())}
        for stage in reversed(stages):
            back = _sent(stage.backward(back, gradients))
        if lookups is not None:
            keys = {p.name: p.key for p in graphs[-1].parameters}
            for rows in lookups.gradients(microbatch, back):
                rows.add_to(gradients[keys[rows.parameter]])
    states = {s.key: stage.weights[s.name] for stage in stages for s in stage.graph.states}
    return Outcome(loss.detach(), metrics, gradients, states)


@contextmanager
def kept_generator() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


@dataclass
class _Ran:
    """One stage after its forward."""

    graph: PortableGraph
    given: dict[str, Any]
    weights: dict[str, torch.Tensor]
    results: dict[str, Any]

    @classmethod
    def of(cls, graph: PortableGraph, found: Captured, values: dict[str, Any], train: bool, microbatch: int) -> "_Ran":
        weights = {w.name: found.weights[w.key].clone() for w in graph.weights}
        given = {v.name: values[v.name] for v in (*graph.inputs, *graph.from_stages)}
        if train:
            for parameter in graph.parameters:
                weights[parameter.name].requires_grad_()
            for value in graph.from_stages:
                if value.needs_grad:
                    given[value.name].requires_grad_()
        with torch.set_grad_enabled(train):
            results = Program(graph).run(given, weights, train=train, microbatch=microbatch)
        return cls(graph, given, weights, results)

    def backward(self, back: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        leaves = {v.name: self.given[v.name] for v in self.graph.from_stages if v.needs_grad}
        leaves.update({p.name: self.weights[p.name] for p in self.graph.parameters})
        if not leaves:
            return {}
        # A view taken under no_grad says that it requires a gradient, and nothing leads back from it.
        ends = {id(leaf) for leaf in leaves.values()}
        led = {n: g for n, g in back.items() if self.results[n].grad_fn is not None or id(self.results[n]) in ends}
        found = torch.autograd.grad(
            [self.results[name] for name in led], list(leaves.values()), list(led.values()), allow_unused=True
        )
        by_name = {name: gradient for name, gradient in zip(leaves, found, strict=True) if gradient is not None}
        for parameter in self.graph.parameters:
            if parameter.name in by_name:
                assert parameter.key not in gradients, f"{parameter.key} is owned by two stages"
                gradients[parameter.key] = by_name.pop(parameter.name)
        return by_name


def _sent(values: dict[str, Any]) -> dict[str, Any]:
    tensors = {n: v.detach() for n, v in values.items() if isinstance(v, torch.Tensor)}
    scalars = {n: v for n, v in values.items() if not isinstance(v, torch.Tensor)}
    frame = decode(encode(Frame(FrameKind.FORWARD, 0, tensors=tensors, scalars=scalars)))
    return {**frame.tensors, **frame.scalars}

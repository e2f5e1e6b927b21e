"""Evaluation of the written model from its file, whose scores must be those that the swarm reported.

The requester computes with the portable graph, as every stage does, on its own processors. A model that is larger than
the free memory is cut: each part is loaded, run on the sample and released before the next. The check finds a stage
that saved another state than it trained, and a leaf that reported other scores than it computed.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from ravnest.coordinator.verification.decisions import Effort, ScoreComparison, Tolerance, compare_scores
from ravnest.coordinator.verification.reported_scores import ReportedScores
from ravnest.errors import RunError
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.graph.portable import PortableGraph
from ravnest.graph.program import Program

_HALVES: Final = frozenset({torch.float16, torch.bfloat16})

Weights = Callable[[PortableGraph], dict[str, torch.Tensor]]
"""The weights of a graph, by their names in it."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of a check."""

    comparison: ScoreComparison
    samples: int
    batches: int
    reported: Mapping[str, float]
    measured: Mapping[str, float]
    providers: tuple[str, ...]
    """The providers that reported the scores."""


def check_model(
    graph: PortableGraph,
    weights: Weights,
    witnessed: Sequence[ReportedScores],
    effort: Effort,
    allowed: Tolerance,
    free_bytes: int,
    seed: int,
) -> Checked:
    """Evaluates at least one batch of the sample, and more until the effort is spent, and compares the scores."""
    stages = cut_to_fit(graph, free_bytes)
    # All batches pass one part before the next part is loaded, so their number is fixed in advance.
    chosen = witnessed if len(stages) == 1 else witnessed[: effort.batches]
    scores: list[dict[str, float]] = []
    if len(stages) == 1:
        began = time.perf_counter()
        run = _Part(graph, weights(graph))
        for each in chosen:
            scores.append(_scores(graph, run.evaluate(each.batch.tensors, each.batch.microbatch, seed)))
            if time.perf_counter() - began > effort.seconds:
                break
    else:
        values = [dict(each.batch.tensors) for each in chosen]
        for stage in stages:
            part = _Part(stage, weights(stage))
            for each, own in zip(chosen, values, strict=True):
                own.update(part.evaluate(own, each.batch.microbatch, seed))
        scores = [_scores(graph, own) for own in values]
    looked_at = chosen[: len(scores)]
    samples = [each.batch.samples for each in looked_at]
    reported = _means([each.scores for each in looked_at], samples)
    measured = _means(scores, samples)
    comparison = compare_scores(reported, measured, sum(samples), len(samples), allowed)
    providers = tuple(dict.fromkeys(each.provider for each in looked_at))
    return Checked(comparison, sum(samples), len(samples), reported, measured, providers)


def weights_of(path: Path, aliases: Mapping[str, str], elsewhere: Mapping[str, torch.Tensor]) -> Weights:
    """Reads weights from a written model when they are needed. Weights that no state_dict has (buffers that are not
    persistent, constants of the graph) come from `elsewhere`. RunError when the file lacks a weight."""
    names: dict[str, str] = {}
    for name, owner in aliases.items():
        names.setdefault(owner, name)

    def read(graph: PortableGraph) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        try:
            with safe_open(path, framework="pt") as file:
                there = set(file.keys())
                for spec in graph.weights:
                    key = spec.key if spec.key in there else names.get(spec.key, spec.key)
                    if key in there:
                        found[spec.name] = file.get_tensor(key)
                    elif spec.key in elsewhere:
                        found[spec.name] = elsewhere[spec.key]
                    else:
                        raise RunError(f"{path} lacks {spec.key}, which the model has; export another checkpoint")
        except (SafetensorError, OSError) as error:
            raise RunError(f"{path} cannot be read back: {error}") from error
        return found

    return read


def cut_to_fit(graph: PortableGraph, free_bytes: int) -> tuple[PortableGraph, ...]:
    """The model in as few parts as possible, such that the weights of each take at most half of this memory, if it can
    be cut that way."""
    sizes = {w.name: w.dtype.itemsize * math.prod(w.shape) for w in graph.weights}
    if sum(sizes.values()) <= free_bytes // 2:
        return (graph,)
    # The parts run one after the other on this machine: no part looks rows up for another.
    plan = layout(graph, lookups_apart=False)
    places: list[int] = []
    held: set[str] = set()
    cuts = iter([*plan.cuts, len(plan.line)])
    cut, here = next(cuts), 0
    pending: set[str] = set()
    for place, node in enumerate(plan.line):
        while place >= cut:
            if held and sum(sizes[name] for name in held | pending) > free_bytes // 2:
                places.append(here)
                held = set()
            held |= pending
            pending, here = set(), cut
            cut = next(cuts)
        pending |= {name for name in node.references() if name in sizes}
    if held and here and sum(sizes[name] for name in held | pending) > free_bytes // 2:
        places.append(here)
    return split(graph, places, lookups_apart=False)


def computes_in_halves(graph: PortableGraph) -> bool:
    """Whether a value in the graph has 16 bits."""
    outputs = (node.output.dtype for node in graph.nodes if node.output is not None)
    return not _HALVES.isdisjoint([*(w.dtype for w in graph.weights), *outputs])


class _Part:
    """A graph with its weights."""

    def __init__(self, graph: PortableGraph, weights: Mapping[str, torch.Tensor]) -> None:
        self._program = Program(graph)
        self._weights = weights
        self._given = [value.name for value in (*graph.inputs, *graph.receives)]

    def evaluate(self, values: Mapping[str, Any], microbatch: int, seed: int) -> dict[str, Any]:
        # Copies: an operator may write to its inputs, and the batch may be evaluated again.
        given = {name: _copied(values[name]) for name in self._given}
        with torch.no_grad():
            return self._program.run(given, self._weights, train=False, seed=seed, microbatch=microbatch)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _scores(graph: PortableGraph, results: Mapping[str, Any]) -> dict[str, float]:
    return {
        "loss": float(results[str(graph.loss)]),
        **{name: float(results[value]) for name, value in graph.metrics.items()},
    }


def _means(scores: Sequence[Mapping[str, float]], samples: Sequence[int]) -> dict[str, float]:
    total = sum(samples)
    return {
        name: sum(each[name] * count for each, count in zip(scores, samples, strict=True)) / total for name in scores[0]
    }

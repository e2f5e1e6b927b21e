"""Split backward: its cost against a single backward, and how much earlier the previous stage gets its gradients.

A model is cut into two stages, and the leaf alternates between the two ways on one thread. The figures are the part
that the previous stage waits for, the part that is postponed, and both together relative to the single backward.
"""

import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models import GPT, SMALL, GPTSize, next_token_loss, token_batches
from benchmarks.report import ROOT, Row, Target, arguments, finish, say
from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage
from ravnest.graph.capture.capture import capture
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.jobfile import load_job
from ravnest.spec import OptimizerSpec

_SETTINGS = OptimizerSpec("SGD", {"lr": 0.0}).to_json()
_MAX_COST = 1.35
"""Maximum time of both parts together, relative to the single backward; planner/search/split_choice.py assumes it."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    model: nn.Module
    loss: Any
    batches: list[tuple[torch.Tensor, torch.Tensor]]


def main() -> int:
    given = arguments("backward", "Cost of a split backward, and its gain for the previous stage.")
    torch.set_num_threads(1)
    seconds = 3.0 if given.quick else 15.0
    rows = []
    for case in _cases(given.quick):
        rows.append(_measure(case, seconds))
        say(f"{case.name}: both parts take {rows[-1]['cost']:.3f} of the backward at once")
    worst = max(float(str(row["cost"])) for row in rows)
    return finish("backward", given, rows, [Target("both parts / backward at once", worst, _MAX_COST, at_most=True)])


def _cases(quick: bool) -> list[Case]:
    torch.manual_seed(0)
    images = [(torch.randn(size, 1, 8, 8), torch.randint(0, 10, (size,))) for size in (64, 63)]
    many = [(torch.randn(size, 1, 8, 8), torch.randint(0, 10, (size,))) for size in (512, 511)]
    net = load_job(str(ROOT / "examples" / "digits" / "job.py")).model
    tiny = GPTSize(layers=4, width=128, heads=4, vocabulary=96, context=64)
    cases = [
        Case("digits, batches of 64", net, F.cross_entropy, images),
        Case("digits, batches of 512", net, F.cross_entropy, many),
        Case("GPT, width 128, 4 layers", GPT(tiny), next_token_loss, token_batches(tiny, 16)[:2]),
    ]
    if not quick:
        cases.append(Case("GPT, width 320, 6 layers", GPT(SMALL), next_token_loss, token_batches(SMALL, 8)[:2]))
    return cases


def _measure(case: Case, seconds: float) -> Row:
    found = capture(case.model, case.loss, {}, case.batches)
    cuts = layout(found.graph).cuts
    root, leaf = split(found.graph, [cuts[len(cuts) // 3]])
    weights = {spec.key: found.weights[spec.key].clone() for spec in found.graph.weights}
    before = Stage(root, weights, StageSettings(optimizer=_SETTINGS, stages=2))
    fed = found.structure.flatten(case.batches[0])
    received = before.forward(0, {v.name: fed[v.name] for v in root.inputs})
    given = {**{v.name: fed[v.name] for v in leaf.inputs}, **received}
    stages = {
        way: Stage(
            leaf,
            {key: weight.clone() for key, weight in weights.items()},
            StageSettings(optimizer=_SETTINGS, stage=1, stages=2, split_backward=way == "split"),
        )
        for way in ("plain", "split")
    }
    assert stages["split"].splits_backward
    times: dict[str, list[tuple[float, float, float]]] = {"plain": [], "split": []}
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(times["split"]) < 5:
        for way, stage in stages.items():
            times[way].append(_step(stage, given))
    median = {way: [statistics.median(part) for part in zip(*all_[1:], strict=True)] for way, all_ in times.items()}
    whole = median["plain"][1]
    return {
        "case": case.name,
        "forward_ms": 1e3 * median["plain"][0],
        "split_forward_ms": 1e3 * median["split"][0],
        "backward_ms": 1e3 * whole,
        "first_part_ms": 1e3 * median["split"][1],
        "second_part_ms": 1e3 * median["split"][2],
        "cost": (median["split"][1] + median["split"][2]) / whole,
        "sooner": 1 - median["split"][1] / whole,
    }


def _step(stage: Stage, given: Mapping[str, Any]) -> tuple[float, float, float]:
    """Processor seconds of the forward, the backward, and its postponed part."""
    values = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    marks = [time.thread_time()]
    stage.forward(0, values)
    marks.append(time.thread_time())
    stage.backward(0, None)
    marks.append(time.thread_time())
    stage.finish_backward()
    marks.append(time.thread_time())
    stage.update(0)
    return marks[1] - marks[0], marks[2] - marks[1], marks[3] - marks[2]


if __name__ == "__main__":
    sys.exit(main())

"""Cuts a model into contiguous stages: where (by measured cost), and into what graphs."""

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ravnest.errors import PlanError
from ravnest.graph.layout import Layout, layout
from ravnest.graph.portable import Node, PortableGraph, Ref, ValueSpec
from ravnest.graph.profile import CostProfile

_BYTES_PER_SECOND = 1e9
"""What packing, sending and unpacking costs a stage on its own CPU; the link itself is the planner's concern."""
_NEAR = 1.02
_MOST_CUTS = 1500
_SIZE = "aten.sym_size.int"


@dataclass(frozen=True, slots=True)
class Cuts:
    """Chosen places, what each stage costs there, and why."""

    places: tuple[int, ...]
    stage_seconds: tuple[float, ...]
    crossing_bytes: tuple[int, ...]
    reason: str


def most_stages(graph: PortableGraph) -> int:
    """Into how many stages the model can be cut at most: each must own a trained parameter."""
    return len(_smallest_stages(layout(graph))) + 1


def choose_cuts(graph: PortableGraph, costs: CostProfile, stages: int) -> Cuts:
    """The cuts that make the slowest stage fastest, and among nearly equal ones those with the fewest bytes.

    PlanError where the model has fewer places to cut than asked for; it says how many stages are possible.
    """
    plan = layout(graph)
    smallest = _smallest_stages(plan)
    possible = len(smallest) + 1
    if stages > possible:
        raise PlanError(
            f"the model can be cut into at most {possible} stage{'s' if possible > 1 else ''}, not {stages} "
            f"(each stage needs a trainable parameter of its own); use --providers {possible} or fewer"
        )
    places, cost, traffic = _tables(plan, costs, smallest[: stages - 1])
    best = _shortest(np.where(np.isfinite(cost), cost, np.inf), stages, np.maximum)
    bottleneck = best[0]
    bytes_in = np.where(cost <= bottleneck * _NEAR, traffic[:, None], np.inf)
    chosen = _shortest(bytes_in, stages, np.add)[1]
    seconds = tuple(float(cost[a, b]) for a, b in zip((0, *chosen), (*chosen, len(places) - 1), strict=True))
    crossing = tuple(int(traffic[c]) for c in chosen)
    reason = (
        f"slowest of {stages} stages {max(seconds) * 1e3:.2f} ms of {sum(seconds) * 1e3:.2f} ms a microbatch, "
        f"{sum(crossing):,} bytes over {len(crossing)} cuts"
    )
    return Cuts(tuple(places[c] for c in chosen), seconds, crossing, reason)


def split(graph: PortableGraph, places: Sequence[int]) -> tuple[PortableGraph, ...]:
    """The stages of the model cut at `places`, each a graph of its own that receives what crosses and sends it on."""
    plan = layout(graph)
    bounds = [0, *places, len(plan.line)]
    stages = []
    for index, (start, end) in enumerate(itertools.pairwise(bounds)):
        receives = plan.crossing[start] if start else ()
        sends = plan.crossing[end] if index < len(places) else ()
        stages.append(_stage(graph, plan, start, end, receives, sends))
    return tuple(stages)


def _stage(
    graph: PortableGraph,
    plan: Layout,
    start: int,
    end: int,
    receives: tuple[ValueSpec, ...],
    sends: tuple[ValueSpec, ...],
) -> PortableGraph:
    line = plan.line[start:end]
    is_leaf = not sends
    shared = _sizes_from_near(graph, plan, line, receives)
    wanted = {name for node in line for name in node.references()} | {v.name for v in sends}
    if is_leaf:
        wanted |= {graph.loss or "", *graph.metrics.values()}
    computed: list[Node] = []
    for node in reversed(list(shared.values())):
        if node.name in wanted:
            computed.append(node)
            wanted.update(node.references())
    received = {v.name for v in receives}
    nodes = (*reversed(computed), *line)
    return replace(
        graph,
        nodes=nodes,
        inputs=tuple(v for v in graph.inputs if v.name in wanted),
        receives=receives,
        sends=sends,
        parameters=tuple(p for p in graph.parameters if p.name in wanted and p.name not in received),
        constants=tuple(c for c in graph.constants if c.name in wanted),
        states=tuple(s for s in graph.states if s.name in wanted),
        loss=graph.loss if is_leaf else None,
        metrics=graph.metrics if is_leaf else {},
    )


def _sizes_from_near(
    graph: PortableGraph, plan: Layout, line: tuple[Node, ...], receives: tuple[ValueSpec, ...]
) -> dict[str, Node]:
    """The shared nodes, with batch sizes read off a value this stage has anyway rather than off an input sent for that
    alone."""
    direct = _direct_inputs(plan, line)
    near = [*receives, *(v for v in graph.inputs if v.name in direct)]
    found: dict[str, tuple[str, int]] = {}
    for value in near:
        for dimension, size in enumerate(value.shape):
            if isinstance(size, str):
                found.setdefault(size, (value.name, dimension))
    specs = {v.name: v for v in graph.inputs}
    shared = dict(plan.shared)
    for name, node in plan.shared.items():
        if node.op == _SIZE and isinstance(node.args[0], Ref) and node.args[0].name in specs:
            size = specs[node.args[0].name].shape[int(node.args[1])]  # type: ignore[arg-type]
            if isinstance(size, str) and size in found:
                source, dimension = found[size]
                shared[name] = replace(node, args=(Ref(source), dimension))
    return shared


def _direct_inputs(plan: Layout, line: tuple[Node, ...]) -> set[str]:
    """Inputs this stage needs for more than their sizes."""
    wanted = {name for node in line if node.op != _SIZE for name in node.references()}
    for node in reversed(list(plan.shared.values())):
        if node.name in wanted and node.op != _SIZE:
            wanted.update(node.references())
    return wanted


def _smallest_stages(plan: Layout) -> list[int]:
    """The cuts that make as many stages as there can be: each as soon as the stage before it owns a parameter."""
    owned = sorted(plan.first_use.values())
    cuts: list[int] = []
    start = 0
    for cut in plan.cuts:
        here = bisect_left(owned, cut) > bisect_left(owned, start)
        after = bool(owned) and owned[-1] >= cut
        if here and after:
            cuts.append(cut)
            start = cut
    return cuts


def _tables(plan: Layout, costs: CostProfile, kept: Sequence[int]) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Candidate places (with both ends), seconds of the stage between each two of them, bytes that cross at each.

    Of very many places those with the least traffic stay, and `kept`: with them there is always a way.
    """
    cuts = list(plan.cuts)
    traffic_at = {c: sum(_value_bytes(v, costs) for v in plan.crossing[c]) for c in cuts}
    if len(cuts) > _MOST_CUTS:
        cuts = sorted({*sorted(cuts, key=lambda c: traffic_at[c])[:_MOST_CUTS], *kept})
    places = [0, *cuts, len(plan.line)]
    traffic = np.array([0.0, *(traffic_at[c] for c in cuts), 0.0])
    time = np.concatenate([[0.0], np.cumsum([costs.seconds(n.name) for n in plan.line])])[places]
    owned = np.concatenate([[0], np.cumsum(np.bincount(list(plan.first_use.values()), minlength=len(plan.line)))])[
        places
    ]
    # A stage moves its traffic both ways, once each microbatch.
    seconds = time[None, :] - time[:, None] + 2 * (traffic[:, None] + traffic[None, :]) / _BYTES_PER_SECOND
    legal = owned[None, :] > owned[:, None]
    return places, np.where(legal, seconds, np.inf), traffic


def _value_bytes(value: ValueSpec, costs: CostProfile) -> int:
    if value.dtype is None:
        return 8
    cost = costs.nodes.get(value.name)
    if cost is not None:
        return cost.output_bytes
    return torch.Size([s if isinstance(s, int) else 1 for s in value.shape]).numel() * value.dtype.itemsize


def _shortest(cost: np.ndarray, stages: int, combine: np.ufunc) -> tuple[float, list[int]]:
    """Best way from the first place to the last in exactly `stages` steps, costs joined by `combine` (max or sum)."""
    count = cost.shape[0]
    best = np.full(count, np.inf)
    best[0] = 0.0
    back: list[np.ndarray] = []
    for _ in range(stages):
        through = combine(best[:, None], cost)
        back.append(np.argmin(through, axis=0))
        best = np.min(through, axis=0)
    path, place = [], count - 1
    for step in reversed(back):
        path.append(place)
        place = int(step[place])
    path.reverse()
    return float(best[count - 1]), path[:-1]

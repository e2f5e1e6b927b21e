"""Partition of a model into contiguous stages, each a graph of its own. The planner chooses the cuts."""

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from ravnest.graph.cutting.layout import Layout, layout
from ravnest.graph.cutting.lookups import name_ahead
from ravnest.graph.portable import Node, PortableGraph, Ref, ValueSpec

_SIZE = "aten.sym_size.int"


def max_stages(graph: PortableGraph) -> int:
    """The maximum number of stages: each must own a trained parameter."""
    return len(_smallest_stages(layout(graph))) + 1


def split(graph: PortableGraph, places: Sequence[int], *, lookups_apart: bool = True) -> tuple[PortableGraph, ...]:
    """The stages of the model cut at `places`. Each receives the values that cross its first cut and sends those that
    cross its last one; the root of several also gets the rows that the leaf looks up for it.

    The places are those of the layout with the same `lookups_apart`.
    """
    plan = layout(graph, lookups_apart=lookups_apart)
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
    is_root, is_leaf = not receives, not sends
    line = plan.line[start:end]
    if is_leaf:
        line = (*(n if is_root else replace(n, name=name_ahead(n.name)) for n in plan.ahead), *line)
    ahead = tuple(node.output for node in plan.ahead if node.output is not None)
    rows = ahead if is_root and not is_leaf else ()
    shared = _sizes_from_near(graph, plan, line, (*rows, *receives))
    wanted = {name for node in line for name in node.references()} | {v.name for v in sends}
    if is_leaf:
        wanted |= {graph.loss or "", *graph.metrics.values()}
    computed: list[Node] = []
    for node in reversed(list(shared.values())):
        if node.name in wanted:
            computed.append(node)
            wanted.update(node.references())
    received = {v.name for v in (*rows, *receives)}
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
        rows=rows,
        lookups=ahead if is_leaf and not is_root else (),
    )


def _sizes_from_near(
    graph: PortableGraph, plan: Layout, line: tuple[Node, ...], from_stages: tuple[ValueSpec, ...]
) -> dict[str, Node]:
    """The shared nodes, with batch sizes read from a value that this stage has in any case, rather than from an input
    that would be sent for this purpose alone."""
    direct = _direct_inputs(plan, line)
    near = [*from_stages, *(v for v in graph.inputs if v.name in direct)]
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
    """Inputs that this stage needs for more than their sizes."""
    wanted = {name for node in line if node.op != _SIZE for name in node.references()}
    for node in reversed(list(plan.shared.values())):
        if node.name in wanted and node.op != _SIZE:
            wanted.update(node.references())
    return wanted


def _smallest_stages(plan: Layout) -> list[int]:
    """The cuts that make the maximum number of stages: each as soon as the stage before it owns a parameter."""
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

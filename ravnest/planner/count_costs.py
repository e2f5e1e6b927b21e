"""Cost tables of a captured model, counted from its graph and from the profile of its operators."""

import difflib
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import torch

from ravnest.errors import PlanError
from ravnest.graph import ops
from ravnest.graph.cutting.layout import Layout, layout
from ravnest.graph.portable import PortableGraph, ValueSpec
from ravnest.graph.profile import CostProfile
from ravnest.graph.weight_uses import unread_weights
from ravnest.planner.model_costs import ModelCosts, Table
from ravnest.planner.module_depth import module_depths

MAX_PLACES: Final = 400
"""Places that a plan looks at; in a model with more, those with the least traffic in their part of it."""

MIN_CODED_BYTES: Final = 1024
"""Smaller tensors travel without the codec of their link."""


def count_costs(
    graph: PortableGraph,
    costs: CostProfile,
    input_bytes: Mapping[str, int],
    begin_with: Sequence[str] | None = None,
) -> ModelCosts:
    """The tables of a captured and profiled model; `input_bytes` are the sizes of its inputs for one microbatch.

    `begin_with` names the only modules or parameters that stages may begin with; PlanError for a name that no stage can
    begin with.
    """
    plan = layout(graph)
    cuts = list(plan.cuts) if begin_with is None else sorted({cut_before(graph, plan, name) for name in begin_with})
    places = (0, *cuts, len(plan.line))
    amounts, uses = _amounts(graph, costs, plan), _input_uses(graph, plan)

    def sums(name: str) -> Table:
        return _sums_at(places, amounts[name])

    crossing = [(), *(plan.crossing[cut] for cut in cuts), ()]
    rows = [node.output for node in plan.ahead if node.output is not None]

    def traffic(size: Callable[[ValueSpec, CostProfile], int], *, backward: bool) -> Table:
        return np.array([sum(size(v, costs) for v in vs if v.needs_grad or not backward) for vs in crossing], float)

    return ModelCosts(
        places=places,
        heavy_seconds=sums("heavy"),
        light_seconds=sums("light"),
        heavy_forward_seconds=sums("heavy_forward"),
        light_forward_seconds=sums("light_forward"),
        parameter_bytes=sums("parameter_bytes"),
        parameters=sums("parameters"),
        saved_bytes=sums("saved_bytes"),
        forward_bytes=traffic(_value_bytes, backward=False),
        backward_bytes=traffic(_value_bytes, backward=True),
        input_bytes=tuple(float(input_bytes[v.name]) for v in graph.inputs),
        input_uses=np.array([_sums_at(places, uses[v.name]) for v in graph.inputs]).reshape(
            len(graph.inputs), len(places)
        ),
        samples=costs.samples,
        operators=sums("operators"),
        unread_bytes=sums("unread_bytes") if amounts["unread_bytes"].any() else None,
        states=sums("states"),
        step_seconds=costs.update.step_seconds + costs.stage_seconds,
        copy_byte_seconds=costs.update.copy_byte_seconds,
        code_byte_seconds=costs.update.code_byte_seconds,
        stale_byte_seconds=costs.update.stale_byte_seconds,
        state_bytes_per_byte=costs.update.state_bytes_per_byte,
        plain_bytes=(traffic(_plain_bytes, backward=False), traffic(_plain_bytes, backward=True)),
        rows_bytes=float(sum(_value_bytes(row, costs) for row in rows)),
        module_depth=np.array(module_depths(graph, plan), float)[list(places)],
    ).coarser(MAX_PLACES)


def cut_before(graph: PortableGraph, plan: Layout, name: str) -> int:
    """The cut with which a stage begins with this module or parameter; PlanError where there is none."""
    uses = {spec.key: plan.first_use[spec.name] for spec in graph.parameters if spec.name in plan.first_use}
    own = [use for key, use in uses.items() if key == name or key.startswith(f"{name}.")]
    if not own:
        near = difflib.get_close_matches(name, {key.rpartition(".")[0] for key in uses} | set(uses), n=1)
        hint = f"did you mean {near[0]}?" if near else "give names as in model.named_parameters() or named_modules()"
        raise PlanError(f"pipeline.cuts names {name}, and the model trains no parameter of that name; {hint}")
    # After everything that the stage before trains, and before the first use of the stage's own parameters.
    before = max((use for use in uses.values() if use < min(own)), default=-1)
    found = [cut for cut in plan.cuts if before < cut <= min(own)]
    if not found:
        raise PlanError(
            f"pipeline.cuts names {name}, and the model cannot be cut before it: nothing is trained before, or what "
            "crosses there cannot be sent; name another module"
        )
    return min(found, key=lambda cut: (sum(_elements(v) for v in plan.crossing[cut]), -cut))


def _amounts(graph: PortableGraph, costs: CostProfile, plan: Layout) -> Mapping[str, Table]:
    """For each kind of cost, the amount at every operator of the line."""
    amounts: dict[str, Table] = defaultdict(lambda: np.zeros(len(plan.line)))
    for i, node in enumerate(plan.line):
        cost = costs.nodes.get(node.name)
        if cost is not None:
            kind = "heavy" if ops.is_heavy(node.op) else "light"
            amounts[kind][i] += cost.seconds
            amounts[f"{kind}_forward"][i] += cost.forward_seconds
            amounts["saved_bytes"][i] += cost.saved_bytes
            amounts["operators"][i] += 1
    for node in plan.ahead:
        # The leaf does them. Their gradients are added to that of its own pass, in about the time of the lookup.
        if (cost := costs.nodes.get(node.name)) is not None:
            amounts["light"][-1] += 2 * cost.forward_seconds
            amounts["light_forward"][-1] += cost.forward_seconds
            amounts["operators"][-1] += 1
    unread = unread_weights(graph)
    for parameter in graph.parameters:
        if (first := plan.first_use.get(parameter.name)) is not None:
            size = torch.Size(parameter.shape).numel() * parameter.dtype.itemsize
            amounts["parameters"][first] += 1
            amounts["parameter_bytes"][first] += size
            amounts["unread_bytes"][first] += size * (parameter.name in unread)
            amounts["light"][first] += costs.update.parameter_seconds + costs.update.byte_seconds * size
    for place in plan.state_use.values():
        amounts["states"][place] += 1
    return amounts


def _sums_at(places: Sequence[int], amounts: Table) -> Table:
    sums: Table = np.concatenate([[0.0], np.cumsum(amounts)])[list(places)]
    return sums


def _elements(value: ValueSpec) -> int:
    return torch.Size([size if isinstance(size, int) else 1 for size in value.shape]).numel()


def _value_bytes(value: ValueSpec, costs: CostProfile) -> int:
    """Size of a value on a link."""
    if value.dtype is None:
        return 8
    cost = costs.nodes.get(value.name)
    return cost.output_bytes if cost is not None else _elements(value) * value.dtype.itemsize


def _plain_bytes(value: ValueSpec, costs: CostProfile) -> int:
    """Size of a value on a link, if no codec makes it smaller."""
    size = _value_bytes(value, costs)
    return 0 if value.dtype is torch.float32 and size >= MIN_CODED_BYTES else size


def _input_uses(graph: PortableGraph, plan: Layout) -> dict[str, Table]:
    """For every input, the number of times that each operator of the line reads it, directly or through nodes that
    every stage computes for itself."""
    needs: dict[str, set[str]] = {v.name: {v.name} for v in graph.inputs}
    for name, node in plan.shared.items():
        needs[name] = set(itertools.chain.from_iterable(needs.get(r, ()) for r in node.references()))
    uses = {v.name: np.zeros(len(plan.line)) for v in graph.inputs}
    for i, node in enumerate(plan.line):
        for name in set(itertools.chain.from_iterable(needs.get(r, ()) for r in node.references())):
            uses[name][i] += 1
    for node in plan.ahead:
        for name in set(itertools.chain.from_iterable(needs.get(r, ()) for r in node.references())):
            uses[name][-1] += 1
    for name in graph.metrics.values():
        for source in needs.get(name, ()):
            uses[source][-1] += 1
    return uses

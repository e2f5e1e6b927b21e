"""What a model costs between any two of the places where it may be cut, as tables.

Place 0 is before the model and the last place after it; a stage lies between two places. The tables are sums, so the
cost of every possible stage is two look-ups. They are made once for a model, from its graph and what its nodes cost
on the machine that measured them.
"""

import difflib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Self

import numpy as np
import torch

from ravnest.errors import PlanError
from ravnest.graph import ops
from ravnest.graph.layout import Layout, layout
from ravnest.graph.portable import PortableGraph, ValueSpec
from ravnest.graph.profile import CostProfile

Table = np.ndarray[Any, np.dtype[np.float64]]

MAX_PLACES: Final = 400
"""Of more places than these, the ones with the least traffic in their part of the model are looked at."""


MIN_CODED_BYTES: Final = 1024
"""Smaller tensors travel as they are, whatever the codec of their link."""


@dataclass(frozen=True, eq=False)
class ModelCosts:
    """Sums up to each place, and what crosses there, for one microbatch of `samples` samples."""

    places: tuple[int, ...]
    """Where in the model each is, as `split` takes them."""
    heavy_seconds: Table
    """Products and convolutions, forward and backward."""
    light_seconds: Table
    """All other operators, forward and backward, and the updates of the parameters."""
    heavy_forward_seconds: Table
    light_forward_seconds: Table
    parameter_bytes: Table
    parameters: Table
    """How many tensors of trained parameters: a stage without one cannot be."""
    saved_bytes: Table
    forward_bytes: Table
    """Crossing here, with each microbatch, from the stage before to the stage after; 0 at both ends."""
    backward_bytes: Table
    input_bytes: tuple[float, ...]
    """Of each input and target that the coordinator feeds."""
    input_uses: Table
    """For each input, how many operators up to each place read it: a stage with one of them is fed."""
    samples: int
    operators: Table | None = None
    """How many operators, where that is known."""
    states: Table | None = None
    """How many buffers that training changes, where that is known."""
    step_seconds: float = 0.0
    """What a microbatch costs a stage, however small it is: an update, and tasks that find an empty cache."""
    copy_byte_seconds: float = 0.0
    """What an update costs for each byte of parameters where older microbatches hold the version before."""
    state_bytes_per_byte: float = 2.0
    """Of the optimizer, for every byte of a parameter."""
    plain_forward_bytes: Table | None = None
    """Of what crosses, what no codec makes smaller: whole numbers, truth values, small tensors."""
    plain_backward_bytes: Table | None = None

    @classmethod
    def of(
        cls,
        graph: PortableGraph,
        costs: CostProfile,
        input_bytes: Mapping[str, int],
        begin_with: Sequence[str] | None = None,
    ) -> Self:
        """The tables of a captured and profiled model, whose inputs and targets are so large for one microbatch.

        Where modules or parameters are given to `begin_with`, stages begin with these alone; PlanError for a name with
        which none can begin.
        """
        plan = layout(graph)
        cuts = list(plan.cuts) if begin_with is None else sorted({cut_before(graph, plan, name) for name in begin_with})
        places = (0, *cuts, len(plan.line))
        size = len(plan.line)
        rows: dict[str, Table] = {
            name: np.zeros(size)
            for name in (
                "heavy",
                "light",
                "heavy_forward",
                "light_forward",
                "bytes",
                "parameters",
                "saved",
                "operators",
                "states",
            )
        }
        for i, node in enumerate(plan.line):
            cost = costs.nodes.get(node.name)
            if cost is not None:
                kind = "heavy" if ops.is_heavy(node.op) else "light"
                rows[kind][i] += cost.seconds
                rows[f"{kind}_forward"][i] += cost.forward_seconds
                rows["saved"][i] += cost.saved_bytes
                rows["operators"][i] += 1
        for parameter in graph.parameters:
            if (first := plan.first_use.get(parameter.name)) is not None:
                bytes_ = torch.Size(parameter.shape).numel() * parameter.dtype.itemsize
                rows["parameters"][first] += 1
                rows["bytes"][first] += bytes_
                rows["light"][first] += costs.update.parameter_seconds + costs.update.byte_seconds * bytes_
        for place in plan.state_use.values():
            rows["states"][place] += 1
        sums = {name: np.concatenate([[0.0], np.cumsum(values)])[list(places)] for name, values in rows.items()}
        crossing = [(), *(plan.crossing[c] for c in cuts), ()]
        used = {name: np.concatenate([[0.0], np.cumsum(uses)])[list(places)] for name, uses in _uses(graph, plan)}
        whole = cls(
            places=places,
            heavy_seconds=sums["heavy"],
            light_seconds=sums["light"],
            heavy_forward_seconds=sums["heavy_forward"],
            light_forward_seconds=sums["light_forward"],
            parameter_bytes=sums["bytes"],
            parameters=sums["parameters"],
            saved_bytes=sums["saved"],
            forward_bytes=np.array([sum(value_bytes(v, costs) for v in values) for values in crossing], float),
            backward_bytes=np.array(
                [sum(value_bytes(v, costs) for v in values if v.needs_grad) for values in crossing], float
            ),
            input_bytes=tuple(float(input_bytes[v.name]) for v in graph.inputs),
            input_uses=np.array([used[v.name] for v in graph.inputs]).reshape(len(graph.inputs), len(places)),
            samples=costs.samples,
            operators=sums["operators"],
            states=sums["states"],
            step_seconds=costs.update.step_seconds + costs.stage_seconds,
            copy_byte_seconds=costs.update.copy_byte_seconds,
            state_bytes_per_byte=costs.update.state_bytes_per_byte,
            plain_forward_bytes=np.array([sum(_plain_bytes(v, costs) for v in values) for values in crossing], float),
            plain_backward_bytes=np.array(
                [sum(_plain_bytes(v, costs) for v in values if v.needs_grad) for values in crossing], float
            ),
        )
        return whole.coarser(MAX_PLACES)

    @property
    def last(self) -> int:
        """The place after the model."""
        return len(self.places) - 1

    @cached_property
    def smallest_stages(self) -> tuple[int, ...]:
        """The cuts that make as many stages as there can be: each as soon as the stage before it owns a parameter."""
        cuts: list[int] = []
        start = 0
        for place in range(1, self.last):
            if self.parameters[start] < self.parameters[place] < self.parameters[self.last]:
                cuts.append(place)
                start = place
        return tuple(cuts)

    @property
    def max_stages(self) -> int:
        """Into how many stages these places cut the model at most."""
        return len(self.smallest_stages) + 1

    @cached_property
    def legal(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether a stage from place i to place j may be: it owns a parameter, and lies forward."""
        return np.triu(self.parameters[None, :] > self.parameters[:, None], 1)

    @cached_property
    def fed_bytes(self) -> Table:
        """What the coordinator feeds a stage from place i to place j."""
        fed = np.zeros((len(self.places), len(self.places)))
        for size, uses in zip(self.input_bytes, self.input_uses, strict=True):
            fed += size * (uses[None, :] > uses[:, None])
        return fed

    def carried(self, share: float) -> tuple[Table, Table]:
        """What crosses each place forth and back in a codec that makes `share` of the bytes of float32."""
        if share == 1.0:
            return self.forward_bytes, self.backward_bytes
        forth, back = share * self.forward_bytes, share * self.backward_bytes
        if self.plain_forward_bytes is not None:
            forth = forth + (1 - share) * self.plain_forward_bytes
        if self.plain_backward_bytes is not None:
            back = back + (1 - share) * self.plain_backward_bytes
        return forth, back

    def between(self, sums: Table) -> Table:
        """What lies between place i and place j."""
        return sums[None, :] - sums[:, None]

    def coarser(self, max_places: int) -> Self:
        """The same model with fewer places: spread evenly over its work and its parameters, each with the least traffic
        among its neighbours, and those that make the smallest stages, where they are few enough."""
        if len(self.places) <= max_places:
            return self
        work = self.heavy_seconds + self.light_seconds
        share = work / work[-1] if work[-1] > 0 else np.linspace(0, 1, len(work))
        share = share + self.parameter_bytes / max(1.0, self.parameter_bytes[-1])
        group = np.minimum((share / share[-1] * (max_places - 1)).astype(int), max_places - 2)
        kept = {0, self.last}
        if len(self.smallest_stages) <= max_places // 2:
            kept.update(self.smallest_stages)
        traffic = self.forward_bytes + self.backward_bytes
        for number in range(max_places - 1):
            members = [int(i) for i in np.flatnonzero(group == number) if 0 < i < self.last]
            if members:
                kept.add(min(members, key=lambda i: (traffic[i], i)))
        return self.at(sorted(kept))

    def at(self, chosen: Sequence[int]) -> Self:
        """The same model with these of its places alone; the first and the last must be among them."""
        index = list(chosen)
        assert index[0] == 0 and index[-1] == self.last
        return replace(
            self,
            places=tuple(self.places[i] for i in index),
            heavy_seconds=self.heavy_seconds[index],
            light_seconds=self.light_seconds[index],
            heavy_forward_seconds=self.heavy_forward_seconds[index],
            light_forward_seconds=self.light_forward_seconds[index],
            parameter_bytes=self.parameter_bytes[index],
            parameters=self.parameters[index],
            saved_bytes=self.saved_bytes[index],
            forward_bytes=self.forward_bytes[index],
            backward_bytes=self.backward_bytes[index],
            input_uses=self.input_uses[:, index],
            operators=None if self.operators is None else self.operators[index],
            states=None if self.states is None else self.states[index],
            plain_forward_bytes=None if self.plain_forward_bytes is None else self.plain_forward_bytes[index],
            plain_backward_bytes=None if self.plain_backward_bytes is None else self.plain_backward_bytes[index],
        )


def cut_before(graph: PortableGraph, plan: Layout, name: str) -> int:
    """Where to cut so that a stage begins with this module or parameter; PlanError where that cannot be."""
    uses = {spec.key: plan.first_use[spec.name] for spec in graph.parameters if spec.name in plan.first_use}
    own = [use for key, use in uses.items() if key == name or key.startswith(f"{name}.")]
    if not own:
        near = difflib.get_close_matches(name, {key.rpartition(".")[0] for key in uses} | set(uses), n=1)
        hint = f"did you mean {near[0]}?" if near else "give names as in model.named_parameters() or named_modules()"
        raise PlanError(f"pipeline.cuts names {name}, and the model trains no parameter of that name; {hint}")
    # After all that the stage before trains, and before the first use of what is its own.
    before = max((use for use in uses.values() if use < min(own)), default=-1)
    found = [cut for cut in plan.cuts if before < cut <= min(own)]
    if not found:
        raise PlanError(
            f"pipeline.cuts names {name}, and the model cannot be cut before it: nothing is trained before, or what "
            "crosses there cannot be sent; name another module"
        )
    return min(found, key=lambda cut: (sum(_size(v) for v in plan.crossing[cut]), -cut))


def _size(value: ValueSpec) -> int:
    return torch.Size([s if isinstance(s, int) else 1 for s in value.shape]).numel()


def value_bytes(value: ValueSpec, costs: CostProfile) -> int:
    """What a value takes on a link."""
    if value.dtype is None:
        return 8
    cost = costs.nodes.get(value.name)
    if cost is not None:
        return cost.output_bytes
    return torch.Size([s if isinstance(s, int) else 1 for s in value.shape]).numel() * value.dtype.itemsize


def _plain_bytes(value: ValueSpec, costs: CostProfile) -> int:
    """What a value takes on a link, where no codec makes it less."""
    size = value_bytes(value, costs)
    return 0 if value.dtype is torch.float32 and size >= MIN_CODED_BYTES else size


def _uses(graph: PortableGraph, plan: Layout) -> list[tuple[str, Table]]:
    """For every input, at which nodes of the line it is needed, also by way of nodes that every stage computes anew."""
    needs: dict[str, set[str]] = {v.name: {v.name} for v in graph.inputs}
    for name, node in plan.shared.items():
        needs[name] = set(itertools.chain.from_iterable(needs.get(r, ()) for r in node.references()))
    uses = {v.name: np.zeros(len(plan.line)) for v in graph.inputs}
    for i, node in enumerate(plan.line):
        for name in set(itertools.chain.from_iterable(needs.get(r, ()) for r in node.references())):
            uses[name][i] += 1
    for name in graph.metrics.values():
        for source in needs.get(name, ()):
            uses[source][-1] += 1
    return list(uses.items())

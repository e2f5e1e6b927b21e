"""Costs of a model between any two of the places where it may be cut, as tables.

Place 0 is before the model and the last place after it; a stage lies between two places. The tables are running sums,
so the cost of every possible stage is two look-ups. They are counted once for each model, see `count_costs`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Self

import numpy as np

Table = np.ndarray[Any, np.dtype[np.float64]]

DEPTH_PRICE: Final = 0.01
"""Traffic that a cut between two modules may cost, as a share, for each module that is then not cut apart."""


# Large: one table for each kind of cost.
@dataclass(frozen=True, eq=False)
class ModelCosts:
    """Sums up to each place, and the traffic across it, for one microbatch of `samples` samples."""

    places: tuple[int, ...]
    """Position of each place in the model, as `split` takes it."""
    heavy_seconds: Table
    """Products and convolutions, forward and backward."""
    light_seconds: Table
    """All other operators, forward and backward, and the updates of the parameters."""
    heavy_forward_seconds: Table
    light_forward_seconds: Table
    parameter_bytes: Table
    parameters: Table
    """Number of trained parameter tensors: every stage needs at least one."""
    saved_bytes: Table
    """Activations kept for the backward."""
    forward_bytes: Table
    """Bytes that each microbatch sends across a place, from the stage before to the stage after; 0 at both ends."""
    backward_bytes: Table
    input_bytes: tuple[float, ...]
    """Size of each input and target that the coordinator feeds."""
    input_uses: Table
    """For each input, the number of operators up to each place that read it: the stages with one of them are fed."""
    samples: int
    operators: Table | None = None
    """Number of operators, if known."""
    unread_bytes: Table | None = None
    """Parameters that no backward reads, such as tables whose rows are only looked up; None: there are none."""
    states: Table | None = None
    """Number of buffers that training changes, if known."""
    step_seconds: float = 0.0
    """Fixed cost of a microbatch for a stage of any size: an update, and operators that find an empty cache."""
    copy_byte_seconds: float = 0.0
    """Cost of an update per byte of parameters, where older microbatches hold the version before."""
    code_byte_seconds: float = 0.0
    """The same, where the version before is kept in 8 bits."""
    stale_byte_seconds: float = 0.0
    """Cost of the correction of staleness per byte of parameters."""
    state_bytes_per_byte: float = 2.0
    """Optimizer state per byte of a parameter."""
    plain_bytes: tuple[Table, Table] | None = None
    """The parts of `forward_bytes` and `backward_bytes` that no codec makes smaller: whole numbers, truth values, small
    tensors."""
    rows_bytes: float = 0.0
    """Bytes of looked-up rows that the leaf of several stages sends the root with each microbatch, and of their
    gradients, which come back."""
    module_depth: Table | None = None
    """For each place, the number of modules that it lies inside of, if known."""

    @property
    def last(self) -> int:
        """The place after the model."""
        return len(self.places) - 1

    @cached_property
    def smallest_stages(self) -> tuple[int, ...]:
        """The cuts that make the most stages: each as soon as the stage before it owns a parameter."""
        cuts: list[int] = []
        start = 0
        for place in range(1, self.last):
            if self.parameters[start] < self.parameters[place] < self.parameters[self.last]:
                cuts.append(place)
                start = place
        return tuple(cuts)

    @property
    def max_stages(self) -> int:
        """The largest number of stages that these places cut the model into."""
        return len(self.smallest_stages) + 1

    @cached_property
    def legal(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether a stage may lie from place i to place j: j comes after i, and the stage owns a parameter."""
        return np.triu(self.parameters[None, :] > self.parameters[:, None], 1)

    def versioned_bytes(self, *, recomputes: bool) -> Table:
        """Sums of the parameters of which a policy that keeps weights keeps versions: those that a backward reads, or
        all if it `recomputes` the forward."""
        return (
            self.parameter_bytes
            if recomputes or self.unread_bytes is None
            else self.parameter_bytes - self.unread_bytes
        )

    @cached_property
    def fed_bytes(self) -> Table:
        """Bytes that the coordinator feeds a stage from place i to place j."""
        fed = np.zeros((len(self.places), len(self.places)))
        for size, uses in zip(self.input_bytes, self.input_uses, strict=True):
            fed += size * (uses[None, :] > uses[:, None])
        return fed

    @cached_property
    def crossing_price(self) -> Table:
        """The bytes that cross each place both ways, a little more for a place inside of modules."""
        traffic = self.forward_bytes + self.backward_bytes
        return traffic if self.module_depth is None else traffic * (1 + DEPTH_PRICE * self.module_depth)

    def carried(self, share: float) -> tuple[Table, Table]:
        """Forward and backward bytes across each place in a codec that makes `share` of the bytes of float32."""
        if share == 1.0:
            return self.forward_bytes, self.backward_bytes
        forth, back = share * self.forward_bytes, share * self.backward_bytes
        if self.plain_bytes is None:
            return forth, back
        plain_forth, plain_back = self.plain_bytes
        return forth + (1 - share) * plain_forth, back + (1 - share) * plain_back

    def between(self, sums: Table) -> Table:
        """Differences of running sums: the amount between place i and place j."""
        return sums[None, :] - sums[:, None]

    def coarser(self, max_places: int) -> Self:
        """The same model with fewer places, spread evenly over its work and its parameters.

        Each is the place with the least traffic among its neighbours, if possible between two modules. The cuts of the
        smallest stages are kept too, unless they are more than half of the places.
        """
        if len(self.places) <= max_places:
            return self
        work = self.heavy_seconds + self.light_seconds
        share = work / work[-1] if work[-1] > 0 else np.linspace(0, 1, len(work))
        share = share + self.parameter_bytes / max(1.0, self.parameter_bytes[-1])
        group = np.minimum((share / share[-1] * (max_places - 1)).astype(int), max_places - 2)
        kept = {0, self.last}
        if len(self.smallest_stages) <= max_places // 2:
            kept.update(self.smallest_stages)
        traffic = self.crossing_price
        for number in range(max_places - 1):
            members = [int(i) for i in np.flatnonzero(group == number) if 0 < i < self.last]
            if members:
                kept.add(min(members, key=lambda i: (traffic[i], i)))
        return self.at(sorted(kept))

    def at(self, chosen: Sequence[int]) -> Self:
        """The same model with only these of its places, the first and the last among them."""
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
            unread_bytes=None if self.unread_bytes is None else self.unread_bytes[index],
            states=None if self.states is None else self.states[index],
            plain_bytes=None if self.plain_bytes is None else (self.plain_bytes[0][index], self.plain_bytes[1][index]),
            module_depth=None if self.module_depth is None else self.module_depth[index],
        )

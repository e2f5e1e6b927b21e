"""Seconds of every stage on every provider, as arrays from which thousands of orders are estimated at once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np

from ravnest.planner.cluster import memory_bytes, stage_tables
from ravnest.planner.line_arrays import Indices, LineArrays
from ravnest.planner.model_costs import ModelCosts, Table
from ravnest.planner.problem import Goal, Network, Provider

Single = np.ndarray[Any, np.dtype[np.float32]]
"""Half the size of a Table: a search has many of them."""

_NUMBERS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32)
"""Numbers in flight that are compared; little changes between them."""

_NEIGHBOURS: Final = 4
"""Tables of a provider where hosts are shared: the stage before, and the one after, on the same machine or not."""


@dataclass(frozen=True, eq=False)
class FlightNumbers:
    """The numbers in flight that are compared, ascending."""

    counts: Table
    worth: Table
    """For each number, the worth of a sample, see `Goal.worth`."""

    @classmethod
    def of(cls, goal: Goal) -> Self:
        highest = goal.max_in_flight
        numbers = [highest] if goal.in_flight is not None else sorted({min(number, highest) for number in _NUMBERS})
        return cls(np.array(numbers, float), np.array([goal.worth(number) for number in numbers]))

    def __len__(self) -> int:
        return len(self.counts)


class StageArrays:
    """Tables of seconds by the end and the start of a stage, in rows: one row for each provider, or four where hosts
    are shared."""

    def __init__(
        self,
        model: ModelCosts,
        goal: Goal,
        network: Network,
        providers: Sequence[Provider],
        numbers: FlightNumbers,
        lines: LineArrays,
    ) -> None:
        self._model, self._goal, self._numbers, self._lines = model, goal, numbers, lines
        self._memory = np.array([p.memory_bytes for p in providers], dtype=float)
        self._variants = _NEIGHBOURS if lines.some_share_a_machine else 1
        self._seconds, self.compute = self._tables(network, providers)
        self._averaging_seconds = math.inf
        # Filled for one number in flight after the other, when it is asked for.
        self.fitting: Single = np.empty((len(numbers) * len(self._seconds), *self._seconds.shape[1:]), dtype=np.float32)
        """Seconds of the stages that fit into the memory of their provider, infinite for others; see `offsets`."""
        self._filled: set[int] = set()

    def limit_averaging(self, averaging_seconds: float) -> None:
        """Leaves out stages whose parameters take longer than this to pass their provider's line."""
        self._averaging_seconds = averaging_seconds
        self._filled = set()

    def offsets(self, chosen: Indices) -> Indices:
        """For each of these numbers in flight, given by position, the first row of its tables in `fitting`."""
        for number in np.unique(chosen):
            if int(number) not in self._filled:
                self._fill(int(number))
                self._filled.add(int(number))
        return chosen * len(self._seconds)

    def rows(self, orders: Indices) -> Indices:
        """The row of each position of each order."""
        if self._variants == 1:
            return orders
        machine = self._lines.machine[orders]
        apart = ((machine[:, 1:] != machine[:, :-1]) & (orders[:, 1:] >= 0)).astype(np.int64)
        rows = orders * _NEIGHBOURS
        rows[:, 1:] += 2 * apart
        rows[:, :-1] += apart
        return rows

    def min_seconds(self) -> Single:
        """For each provider, the fewest seconds of a stage by its start and its end, over all possible neighbours."""
        tables = self._seconds.reshape(len(self._memory), -1, *self._seconds.shape[1:])
        shortest: Single = tables.min(axis=1).transpose(0, 2, 1)
        return shortest

    def _fill(self, number: int) -> None:
        held = memory_bytes(self._model, self._goal, int(self._numbers.counts[number])).T
        fits = held[None] <= self._memory[:, None, None]
        if math.isfinite(self._averaging_seconds):
            owned = self._model.between(self._model.parameter_bytes).T
            fits &= owned[None] <= (self._averaging_seconds * self._lines.slower_way)[:, None, None]
        fits = np.repeat(fits, self._variants, axis=0)
        first = number * len(self._seconds)
        self.fitting[first : first + len(self._seconds)] = np.where(fits, self._seconds, np.float32(np.inf))

    def _tables(self, network: Network, providers: Sequence[Provider]) -> tuple[Single, Single]:
        """Seconds of the stages, and of their computation alone."""
        seconds, compute = [], []
        for provider in providers:
            elsewhere = replace(
                provider,
                name=f"{provider.name} ",
                host="",
                up_bytes_per_second=math.inf,
                down_bytes_per_second=math.inf,
                reachable=True,
            )
            # Bit 1: the stage before is on another machine; bit 0: the one after is.
            for variant in range(_NEIGHBOURS) if self._variants > 1 else (_NEIGHBOURS - 1,):
                before, after = (elsewhere if variant & bit else provider for bit in (2, 1))
                tables = stage_tables(self._model, self._goal, network, provider, before, after)
                seconds.append(np.where(self._model.legal, tables.seconds, np.inf).T.astype(np.float32))
                compute.append(tables.compute.T.astype(np.float32))
        return np.stack(seconds), np.stack(compute)

"""States that the model changes as it runs: batch-norm statistics, running means, counters.

A training forward writes new states before the gradients of its microbatch are applied. A stage therefore keeps, for
each microbatch that is not yet part of an update, the states from before its forward. A checkpoint then contains only
the effect of applied microbatches, and a stage that discards its microbatches in flight can return to those states.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

Tensors = dict[str, torch.Tensor]


class ModelStates:
    """The states of one stage, by name in the graph."""

    def __init__(self, names: Sequence[str], fixed: Tensors) -> None:
        """`fixed` holds the states, and constants with them. The states in it are replaced as the model runs."""
        self.fixed = fixed
        self._names = names
        self._before: dict[int, Tensors] = {}
        """States before the forward of each microbatch that is not yet applied, in the order of the forwards."""

    def current(self) -> Tensors:
        return {name: self.fixed[name] for name in self._names}

    def copies(self, instead: Mapping[str, torch.Tensor] | None = None) -> Tensors:
        """Copies for a forward to write to: autograd may have saved the originals for a microbatch in flight.

        States named in `instead` are copied from there."""
        given = instead or {}
        return {name: given.get(name, self.fixed[name]).clone() for name in self._names}

    def advance(self, microbatch: int, states: Tensors) -> None:
        """Makes the states that the forward of this microbatch has written the current ones."""
        if states:
            self._before[microbatch] = self.current()
            self.fixed.update(states)

    def settle(self, microbatches: Sequence[int]) -> None:
        """Forgets the earlier states of these microbatches, which have been applied."""
        for microbatch in microbatches:
            self._before.pop(microbatch, None)

    @property
    def settled(self) -> Tensors:
        """The states without the effect of microbatches that are not yet applied, to be read only. Empty if there are
        no such microbatches."""
        return next(iter(self._before.values()), {})

    def forget(self) -> None:
        """Returns to the settled states."""
        self.fixed.update(self.settled)
        self._before.clear()

    def shift_settled(self, shift: Callable[[str, torch.Tensor], None]) -> None:
        """Changes every earlier copy of a state in the same way as the state itself: calls `shift` with the name and a
        tensor to write to."""
        for before in self._before.values():
            for name, state in before.items():
                # A new copy: autograd may have saved the old tensor.
                before[name] = state.clone()
                shift(name, before[name])

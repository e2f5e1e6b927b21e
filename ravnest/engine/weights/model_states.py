"""Values that the model changes as it runs: batch-norm statistics, running means, counters.

A training forward writes new states before its gradients are applied. So a stage keeps, for each microbatch that is not
in an update yet, the states from before its forward: a checkpoint then holds only what applied microbatches did, and a
stage that forgets its microbatches in flight returns to the states that it had without them.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

Tensors = dict[str, torch.Tensor]


class ModelStates:
    """The states of one stage, by name in the graph."""

    def __init__(self, names: Sequence[str], fixed: Tensors) -> None:
        """`fixed` holds the states, and constants next to them. The states in it are replaced as the model runs."""
        self.fixed = fixed
        self._names = names
        self._before: dict[int, Tensors] = {}
        """States before the forward of each microbatch that is not applied yet, in the order of the forwards."""

    def current(self) -> Tensors:
        return {name: self.fixed[name] for name in self._names}

    def copies(self, instead: Mapping[str, torch.Tensor] | None = None) -> Tensors:
        """States for a forward to write to: autograd may have saved the tensors themselves for a microbatch in flight.
        States named in `instead` are copied from there."""
        given = instead or {}
        return {name: given.get(name, self.fixed[name]).clone() for name in self._names}

    def advance(self, microbatch: int, states: Tensors) -> None:
        """The forward of this microbatch has written these states: they are the current ones now."""
        if states:
            self._before[microbatch] = self.current()
            self.fixed.update(states)

    def settle(self, microbatches: Sequence[int]) -> None:
        """These microbatches are applied."""
        for microbatch in microbatches:
            self._before.pop(microbatch, None)

    @property
    def settled(self) -> Tensors:
        """The states without the effect of microbatches that are not applied, to be read; empty if there are none of
        these."""
        return next(iter(self._before.values()), {})

    def forget(self) -> None:
        """Returns to the settled states."""
        self.fixed.update(self.settled)
        self._before.clear()

    def shift_settled(self, shift: Callable[[str, torch.Tensor], None]) -> None:
        """Applies to every older copy of a state what was applied to the state itself; `shift` gets the name and a
        tensor to write to."""
        for before in self._before.values():
            for name, state in before.items():
                # A fresh copy: autograd may have saved the other.
                before[name] = state.clone()
                shift(name, before[name])

"""Blocks of an update: the parameters of a stage in pieces of about a megabyte, each stepped while it is in the cache.

An update touches every value several times: gradient, weight, moments, predicted weight. Block by block, main memory is
read and written once, and temporary tensors are as large as one block. On a CPU small parameters share a block, and a
large one is stepped in parts if the optimizer computes each value from that value's own gradient and state. The parts
are views, so the result equals the step of the whole parameter bit for bit. On a GPU a block is larger and holds whole
parameters, because a GPU finishes a small block sooner than the next one is submitted.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from ravnest.engine.weights.adam import State, step_adam

BLOCK_BYTES: Final = 1 << 20
GPU_BLOCK_BYTES: Final = 256 << 20

_BY_VALUE: Final = frozenset({ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop})
"""Optimizers that compute each value from its own gradient and state, and from numbers of the parameter's state."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """The memory for predicted weights of a block, and the optimizer's options at the forward that uses them."""

    weights: Sequence[Tensor]
    options: Mapping[str, Any]


class Block:
    """Parameters that are stepped together: whole ones, or a part of one."""

    __slots__ = ("_optimizer", "_part", "ahead", "names", "parameters", "states")

    def __init__(
        self,
        optimizer: Optimizer,
        names: Sequence[str],
        parameters: list[Tensor],
        states: list[State],
        part: slice | None = None,
    ) -> None:
        self.names = names
        self.parameters = parameters
        """The gradient of each is its `grad`, None if it has none."""
        self.states = states
        """The optimizer's state of each parameter, to be read and changed."""
        self.ahead: Ahead | None = None
        """Set if weights are to be predicted with the step."""
        self._optimizer = optimizer
        self._part = part

    def cut(self, tensor: Tensor) -> Tensor:
        """The values of this block in a contiguous tensor that is shaped like the whole parameter."""
        return tensor if self._part is None else tensor.view(-1)[self._part]

    def step(self) -> None:
        """Steps the optimizer on these parameters alone."""
        group = self._optimizer.param_groups[0]
        if _is_plain_adam(self._optimizer, group) and all(p.device.type == "cpu" for p in self.parameters):
            step_adam(self.parameters, self.states, group)
            return
        parameters, states = group["params"], self._optimizer.state
        group["params"] = self.parameters
        if self._part is not None:
            # Torch looks up a state by the identity of the parameter, here of a view.
            self._optimizer.state = defaultdict(dict, zip(self.parameters, self.states, strict=True))
        try:
            self._optimizer.step()
        finally:
            group["params"], self._optimizer.state = parameters, states


class Blocks:
    """The parameters of one optimizer, in groups of blocks."""

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, Tensor], block_bytes: int | None = None) -> None:
        """`parameters` are those of the optimizer's only group, by name. `block_bytes` replaces the size of a block."""
        on_cpu = all(parameter.device.type == "cpu" for parameter in parameters.values())
        self.groups = _groups(parameters, block_bytes or (BLOCK_BYTES if on_cpu else GPU_BLOCK_BYTES))
        """Names of the parameters, small parameters first. A group has one block, or is one parameter in parts."""
        self._optimizer = optimizer
        self._parameters = parameters
        self._part_bytes = (block_bytes or BLOCK_BYTES) if on_cpu and _steps_by_value(optimizer) else None

    def of(self, group: Sequence[str]) -> Iterator[Block]:
        """The blocks of a group, one after the other; the state of a part is valid until the next one is taken.

        The gradients are those that the parameters have when the iteration begins. It must be exhausted.
        """
        parameters = [self._parameters[name] for name in group]
        if self._part_bytes is not None and len(group) == 1 and self._has_parts(parameters[0]):
            yield from self._parts(group[0], max(1, self._part_bytes // parameters[0].element_size()))
            return
        known = self._optimizer.state
        # Reading the state of a parameter creates it, which only a step may do.
        states = [known[p] if p.grad is not None else known.get(p, {}) for p in parameters]
        yield Block(self._optimizer, group, parameters, states)

    def _has_parts(self, parameter: Tensor) -> bool:
        assert self._part_bytes is not None
        contiguous = parameter.is_contiguous() and (parameter.grad is None or parameter.grad.is_contiguous())
        return contiguous and parameter.nbytes > self._part_bytes

    def _parts(self, name: str, length: int) -> Iterator[Block]:
        """Blocks of this many values of one parameter."""
        parameter = self._parameters[name]
        values = parameter.detach().view(-1)
        gradient = None if parameter.grad is None else parameter.grad.view(-1)
        known: State = self._optimizer.state.get(parameter, {})
        whole = {k: v.contiguous() for k, v in known.items() if isinstance(v, Tensor) and v.shape == parameter.shape}
        numbers = {k: v for k, v in known.items() if k not in whole}
        created: dict[str, Tensor] = {}
        state: State = {}
        for first in range(0, values.numel(), length):
            part = slice(first, first + length)
            weights = values[part]
            weights.grad = None if gradient is None else gradient[part]
            views = {k: v.view(-1)[part] for k, v in whole.items()}
            # Every part begins with the same numbers, such as the count of steps, and changes a copy of them.
            state = views | {k: v.clone() if isinstance(v, Tensor) else v for k, v in numbers.items()}
            yield Block(self._optimizer, (name,), [weights], [state], part)
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == weights.shape and value is not views.get(key):
                    # The first step of an optimizer creates its moments, as new tensors.
                    if key not in created:
                        created[key] = torch.empty_like(parameter.detach())
                    created[key].view(-1)[part] = value
        if gradient is not None:
            kept = {**whole, **created}
            self._optimizer.state[parameter].update({key: kept.get(key, value) for key, value in state.items()})


def _steps_by_value(optimizer: Optimizer) -> bool:
    return type(optimizer) in _BY_VALUE and not optimizer.defaults.get("differentiable")


def _is_plain_adam(optimizer: Optimizer, options: Mapping[str, Any]) -> bool:
    return type(optimizer) in (Adam, AdamW) and not any(
        options[name] for name in ("foreach", "capturable", "differentiable")
    )


def _groups(parameters: Mapping[str, Tensor], block_bytes: int) -> list[tuple[str, ...]]:
    """Groups of up to `block_bytes`, the smallest parameters first; a larger parameter is a group of its own.

    Small parameters first: their gradients are freed before the memory for a large one is needed.
    """
    found: list[list[str]] = []
    filled = 0
    for name in sorted(parameters, key=lambda name: parameters[name].nbytes):
        size = parameters[name].nbytes
        if not found or filled + size > block_bytes:
            found.append([])
            filled = 0
        found[-1].append(name)
        filled += size
    return [tuple(names) for names in found]

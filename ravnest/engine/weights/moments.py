"""Optimizer moments: the state tensors that are as large as their parameter, such as running means of gradients."""

import torch

from ravnest.spec import OptimizerSpec


def moment_names(spec: OptimizerSpec) -> tuple[str, ...]:
    """The names of the optimizer's moments, found by one step on a small parameter. GraphError if the optimizer cannot
    be built.

    Counters, such as the number of steps, are excluded: averaging them is meaningless.
    """
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer = spec.build([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state.get(parameter, {})
    return tuple(
        sorted(
            name
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point()
        )
    )

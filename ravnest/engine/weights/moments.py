"""What an optimizer keeps that is as large as its parameters: means of gradients, and of their squares."""

import torch

from ravnest.spec import OptimizerSpec


def moment_names(spec: OptimizerSpec) -> tuple[str, ...]:
    """The names of those, as a step of a small parameter shows them; GraphError where it cannot be built.

    What is counted (the number of steps) is not among them: a mean of it means nothing.
    """
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer = spec.build([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = optimizer.state.get(parameter, {})
    return tuple(
        sorted(
            name
            for name, value in kept.items()
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point()
        )
    )

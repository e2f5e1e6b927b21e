"""Warm-up of torch before the first backward.

In the first backward of a process, torch imports much that it does not use (symbolic shapes, and with them sympy),
which takes seconds on a small machine. A standby does this while no run waits for it.
"""

import torch

_warm = False


def warm_up() -> None:
    """Run a backward and an optimizer step, once per process. Any thread may call this."""
    global _warm
    if _warm:
        return
    _warm = True
    weight = torch.nn.Parameter(torch.ones(1))
    with torch.enable_grad():
        # With a gradient of the output, as in a stage: torch imports the modules to compare their shapes.
        (gradient,) = torch.autograd.grad(weight * weight, weight, torch.ones(1))
    weight.grad = gradient
    torch.optim.AdamW([weight], lr=0.1).step()

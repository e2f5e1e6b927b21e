"""Having ready what a first backward needs.

The first backward of a process makes torch import much that it does not use (its symbolic shapes, and sympy with them):
seconds on a small machine. One who stands by does that while nobody waits for it.
"""

import torch

_warm = False


def warm_up() -> None:
    """Runs a backward and a step of an optimizer, once in a process. May be called on any thread."""
    global _warm
    if _warm:
        return
    _warm = True
    weight = torch.nn.Parameter(torch.ones(1))
    with torch.enable_grad():
        # With the gradient of what comes after, as a stage has it: torch compares their shapes, and imports for that.
        (gradient,) = torch.autograd.grad(weight * weight, weight, torch.ones(1))
    weight.grad = gradient
    torch.optim.AdamW([weight], lr=0.1).step()

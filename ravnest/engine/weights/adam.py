"""The step of Adam and AdamW on one block, with few calls from Python for each block.

The operators are those of torch's own step of one tensor, so the result equals it bit for bit on a CPU; a step of
torch's optimizer takes as long as the arithmetic of a block. With a momentum given, the step is Nesterov's in the form
of NAdam.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

PRODUCT: Final = "momentum_product"
"""Key in the optimizer's state of a parameter: the product of all momenta so far, used for the bias correction of the
mean. It is saved with the rest of the state."""

State = dict[str, Any]


@torch.no_grad()
def step_adam(
    parameters: Sequence[Tensor], states: Sequence[State], options: Mapping[str, Any], momentum: float | None = None
) -> list[Tensor] | None:
    """Steps the parameters that have a gradient. Returns the scales of `scales_of` if they were computed for all.

    `options` are those of the optimizer. `momentum` replaces its beta1, for a step of NAdam.
    """
    pairs = [(p, s) for p, s in zip(parameters, states, strict=True) if p.grad is not None]
    stepped, known = [p for p, _ in pairs], [s for _, s in pairs]
    if not pairs:
        return None
    for parameter, state in pairs:
        _begin(parameter, state, options)
    gradients = [parameter.grad for parameter in stepped if parameter.grad is not None]
    counters = [state["step"] for state in known]
    torch._foreach_add_(counters, 1)
    if momentum is None and options["fused"]:
        _step_fused(stepped, gradients, known, options)
        return None
    (beta1, beta2), rate, decay = options["betas"], options["lr"], options["weight_decay"]
    counts = [float(counter) for counter in counters]
    if options["maximize"]:
        gradients = list(torch._foreach_neg(gradients))
    if decay and options["decoupled_weight_decay"]:
        torch._foreach_mul_(stepped, 1 - rate * decay)
    elif decay:
        gradients = list(torch._foreach_add(gradients, stepped, alpha=decay))
    means, squares = ([state[name] for state in known] for name in ("exp_avg", "exp_avg_sq"))
    now = beta1 if momentum is None else momentum
    torch._foreach_lerp_(means, gradients, 1 - now)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    if options["amsgrad"]:
        largest = [state["max_exp_avg_sq"] for state in known]
        torch._foreach_maximum_(largest, squares)
        squares = largest
    scales = scales_of(squares, counts, options)
    if momentum is None:
        torch._foreach_addcdiv_(stepped, means, scales, [-(rate / (1 - beta1**count)) for count in counts])
    else:
        products = [state.get(PRODUCT, beta1 ** (count - 1)) * now for state, count in zip(known, counts, strict=True)]
        for state, product in zip(known, products, strict=True):
            state[PRODUCT] = product
        torch._foreach_addcdiv_(stepped, gradients, scales, [-rate * (1 - now) / (1 - p) for p in products])
        torch._foreach_addcdiv_(stepped, means, scales, [-rate * now / (1 - p * now) for p in products])
    return scales if len(pairs) == len(parameters) else None


def scales_of(squares: Sequence[Tensor], counts: Sequence[float], options: Mapping[str, Any]) -> list[Tensor]:
    """The divisors of Adam's steps: the roots of the means of squares after `counts` steps, without their bias."""
    scales = list(torch._foreach_sqrt(list(squares)))
    torch._foreach_div_(scales, [(1 - options["betas"][1] ** count) ** 0.5 for count in counts])
    torch._foreach_add_(scales, options["eps"])
    return scales


def _begin(parameter: Tensor, state: State, options: Mapping[str, Any]) -> None:
    """Creates the state of a parameter without one, as torch does at a parameter's first step."""
    if state:
        return
    state["step"] = torch.zeros((), device=parameter.device if options["fused"] else "cpu")
    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    if options["amsgrad"]:
        state["max_exp_avg_sq"] = torch.zeros_like(parameter)


def _step_fused(
    parameters: list[Tensor], gradients: list[Tensor], states: Sequence[State], options: Mapping[str, Any]
) -> None:
    kernel = torch._fused_adamw_ if options["decoupled_weight_decay"] else torch._fused_adam_
    kernel(
        parameters,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if options["amsgrad"] else [],
        [state["step"] for state in states],
        lr=options["lr"],
        beta1=options["betas"][0],
        beta2=options["betas"][1],
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        amsgrad=options["amsgrad"],
        maximize=options["maximize"],
    )

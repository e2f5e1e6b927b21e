"""Reference for the swarm: a plain PyTorch training loop with the user's own model, autograd and optimizer.

It uses one function of Ravnest, `draw_seed`, the seed of a random operator, so that dropout draws the same numbers in
both.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

from ravnest.graph.program import draw_seed
from tests.models import Kind, Made


@contextmanager
def replayed_draws(seed: int, microbatch: int) -> Iterator[None]:
    """Context in which every random function of torch is seeded by its number within the microbatch."""
    numbers = itertools.count()

    def seeded(function: Callable[..., Any], draws: Callable[..., bool]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if draws(*args, **kwargs):
                torch.manual_seed(draw_seed(seed, microbatch, next(numbers)))
            return function(*args, **kwargs)

        return wrapped

    with ExitStack() as stack:
        for name, draws in _DRAWING.items():
            stack.enter_context(patch.object(F, name, seeded(getattr(F, name), draws)))
        for name in ("rand", "randn_like", "rand_like", "bernoulli"):
            stack.enter_context(patch.object(torch, name, seeded(getattr(torch, name), lambda *_, **__: True)))
        bernoulli_ = seeded(torch.Tensor.bernoulli_, lambda *_, **__: True)
        stack.enter_context(patch.object(torch.Tensor, "bernoulli_", bernoulli_))
        for name in ("lstm", "gru"):
            stack.enter_context(
                patch.object(torch._VF, name, seeded(getattr(torch._VF, name), _recurrent_draws), create=True)
            )
        yield


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def copied(batch: Any) -> Any:
    """A copy of the batch, for models that write into their inputs."""
    return copy.deepcopy(batch)


def train_plainly(
    kind: Kind, made: Made, *, seed: int = 0, clip_norm: float | None = None, optimizer: Any = None
) -> nn.Module:
    """The model after one pass over its batches in an ordinary training loop.

    `optimizer` replaces that of the kind; there is no schedule and no accumulation then.
    """
    if optimizer is not None:
        kind = replace(kind, optimizer=optimizer, schedule=None, accumulate=1)
    model = copy.deepcopy(made.model)
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    stepper = kind.optimizer(parameters)
    schedule = None if kind.schedule is None else kind.schedule(stepper)
    with kept_generator():
        for number, batch in enumerate(made.batches):
            inputs, targets = copied(batch)
            with replayed_draws(seed, number):
                loss = made.loss(call(model, inputs), targets)
            (loss / kind.accumulate).backward()
            if (number + 1) % kind.accumulate == 0:
                if clip_norm is not None:
                    nn.utils.clip_grad_norm_(parameters, clip_norm)
                stepper.step()
                if schedule is not None:
                    schedule.step()
                stepper.zero_grad()
    return model


def worst_difference(have: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative difference between two state_dicts, and the name of its tensor.

    The difference of a tensor is the largest difference between two entries, divided by the largest entry, so that
    entries near zero do not dominate. Integer tensors must be equal.
    """
    assert set(have) == set(want)
    worst, where = 0.0, ""
    for name, expected in want.items():
        found = have[name]
        assert found.shape == expected.shape and found.dtype == expected.dtype, name
        if not expected.is_floating_point():
            assert torch.equal(found, expected), f"{name}: {found} is not {expected}"
            continue
        assert bool(torch.isfinite(found).all()), name
        gap = (found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-12)
        if float(gap) > worst:
            worst, where = float(gap), name
    return worst, where


@contextmanager
def kept_generator() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


def _dropout_draws(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return p > 0 and training


def _rrelu_draws(input: Any, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, *more: Any) -> bool:
    return training


def _attention_draws(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> bool:
    return (args[4] if len(args) > 4 else dropout_p) > 0


def _recurrent_draws(*args: Any) -> bool:
    # (input, hx, weights, has_biases, num_layers, dropout, train, …): one operator draws for all its layers.
    return args[5] > 0 and args[6]


_DRAWING: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(
        ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"), _dropout_draws
    ),
    "rrelu": _rrelu_draws,
    "scaled_dot_product_attention": _attention_draws,
}

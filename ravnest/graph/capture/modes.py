"""Training and evaluation modes of a user's modules, as the user means them, and their restoration after a capture.

A module that the user put in eval() remains in it while the model trains: a frozen batch norm, a frozen dropout. A
model that is in eval() as a whole, as `from_pretrained` returns it, trains in train mode, as in every training loop. If
a module's own train() leaves it or parts of it in evaluation mode, capture respects that.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ravnest.errors import CaptureError

_MODE_MATTERS = (
    *(nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd, nn.RNNBase, nn.RReLU, nn.MultiheadAttention),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)
"""Modules of torch whose behaviour depends on their mode. The other modules of torch.nn do the same in both modes."""

Modes = Mapping[nn.Module, bool]


def training_modes(model: nn.Module) -> Modes:
    """The mode of each module of the model in training; CaptureError if it is ambiguous."""
    left = {module: module.training for module in model.modules()}
    with left_as_it_was(model):
        model.train()
        trains = {module: module.training for module in model.modules()}
    if model.training:
        return {module: mode and trains[module] for module, mode in left.items()}
    trained = [name for name, module in model.named_modules() if module.training and _looks_at_its_mode(module)]
    if trained:
        raise CaptureError(
            f"the model is in eval(), but its module {trained[0]} is in train(), so the mode of the rest in training "
            "is not clear; call model.train(), and then eval() on the modules that should remain in evaluation mode"
        )
    return trains


def frozen_modules(model: nn.Module, modes: Modes) -> list[str]:
    """Names of the outermost modules that remain in eval() in training."""
    names: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in names)
        if not modes[module] and not inside and any(_looks_at_its_mode(m) for m in module.modules()):
            names.append(name)
    return names


def set_modes(modes: Modes) -> None:
    for module, mode in modes.items():
        module.training = mode


@contextmanager
def left_as_it_was(*things: Any) -> Iterator[None]:
    """Undo all changes to the modules among these at the end of the block: modes, attributes and parameter hooks."""
    modules = list(dict.fromkeys(m for thing in things if isinstance(thing, nn.Module) for m in thing.modules()))
    attributes = [dict(vars(m)) for m in modules]
    tensors = {id(v): v for each in attributes for v in each.values() if isinstance(v, torch.Tensor)}
    copies = {key: (tensor._version, tensor.detach().clone()) for key, tensor in tensors.items()}
    parameters = [p for m in modules for p in m.parameters(recurse=False)]
    hooks = [dict(p._backward_hooks) if p._backward_hooks else {} for p in parameters]
    try:
        yield
    finally:
        for module, kept in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(kept)
        for key, (version, copy) in copies.items():
            if tensors[key]._version != version:
                with torch.no_grad():
                    tensors[key].data.copy_(copy)
        for parameter, before in zip(parameters, hooks, strict=True):
            if parameter._backward_hooks:
                for added in parameter._backward_hooks.keys() - before.keys():
                    del parameter._backward_hooks[added]


def _looks_at_its_mode(module: nn.Module) -> bool:
    """Whether the module's own behaviour may depend on its mode."""
    if type(module).__module__.startswith("torch.nn.modules"):
        return isinstance(module, _MODE_MATTERS)
    return True

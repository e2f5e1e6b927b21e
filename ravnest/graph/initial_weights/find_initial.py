"""Search for the recipes of a model's weights: each recipe is repeated here and compared bit for bit.

One weight at a time, so that the search needs memory for one more tensor. A weight without a recipe, such as one from a
file, has its hash only.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from ravnest.errors import GraphError
from ravnest.graph.initial_weights.recipe import CONSTANT, MAX_ZERO_ROWS, Recipe
from ravnest.graph.initial_weights.recorder import Place, place_of

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by size: bits are compared, as NaN is not equal to itself."""


@dataclass(frozen=True, slots=True)
class InitialWeight:
    """Description of a weight by which a provider gets it without its bytes."""

    sha256: str
    """Hash of the weight's bytes, in hexadecimal."""
    recipe: Recipe | None = None
    """None where nothing shorter than the bytes makes the weight."""


def find_initial(weights: Mapping[str, Tensor], draws: Mapping[Place, Recipe]) -> dict[str, InitialWeight]:
    """The hash of each weight, and the recipe that makes it if there is one."""
    return {key: _initial(tensor, draws) for key, tensor in weights.items()}


def _initial(tensor: Tensor, draws: Mapping[Place, Recipe]) -> InitialWeight:
    tensor = tensor.detach()
    recipe = None
    if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.itemsize in _BITS:
        recipe = _constant(tensor) or _drawn(tensor, draws.get(place_of(tensor)))
        if recipe is not None and len(json.dumps(recipe.to_json())) >= tensor.nbytes:
            recipe = None
    return InitialWeight(sha256_of(tensor), recipe)


def sha256_of(tensor: Tensor) -> str:
    """The hash of a tensor's bytes, in hexadecimal."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def _constant(tensor: Tensor) -> Recipe | None:
    bits = _bits(tensor)
    if bits.numel() == 0:
        return None
    # Most tensors that are not constant show it in a few values.
    for some in (bits[:: max(1, bits.numel() // 64)], bits):
        if bool((some != bits[0]).any()):
            return None
    return Recipe(CONSTANT, data=bytes(bits[:1].view(torch.uint8).tolist()))


def _drawn(tensor: Tensor, recipe: Recipe | None) -> Recipe | None:
    """The recipe, perhaps with rows of zeros, if it makes this tensor."""
    if recipe is None or not tensor.is_floating_point():
        return None
    try:
        made = recipe.make(tuple(tensor.shape), tensor.dtype)
    except GraphError:
        return None
    if torch.equal(_bits(made), _bits(tensor)):
        return recipe
    if tensor.dim() < 2:
        return None
    differs = (_bits(made).view(tensor.shape) != _bits(tensor).view(tensor.shape)).flatten(1).any(1)
    rows = differs.nonzero().flatten().tolist()
    if len(rows) > MAX_ZERO_ROWS or any(bool(_bits(tensor[row].contiguous()).any()) for row in rows):
        return None
    return replace(recipe, zero_rows=tuple(rows))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(_BITS[tensor.itemsize])

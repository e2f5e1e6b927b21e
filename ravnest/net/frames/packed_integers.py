"""Integers of 64 bits in fewer bytes: the distance of each value from the lowest, in the smallest type that holds it.

Token ids and class numbers are int64 in PyTorch, and rarely need it. The conversion is exact for every value: a range
that needs more than four bytes travels as it is.
"""

from dataclasses import dataclass
from typing import Final

import torch

TYPES: Final = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
"""Types of the distances, by their size in bytes."""


@dataclass(frozen=True, slots=True)
class IntegerRange:
    """How the values of one int64 tensor travel."""

    size_bytes: int
    """Bytes of each value: a key of TYPES."""
    lowest: int
    """The smallest of the values, which is added to each distance."""


def packing_of(tensor: torch.Tensor) -> IntegerRange | None:
    """The packing that holds all values of a tensor; None where it travels as it is."""
    if tensor.dtype is not torch.int64 or tensor.numel() == 0:
        return None
    lowest, highest = (int(bound) for bound in torch.aminmax(tensor))
    for size_bytes in TYPES:
        if highest - lowest < 1 << 8 * size_bytes:
            return IntegerRange(size_bytes, lowest)
    return None


def packed(tensor: torch.Tensor, packing: IntegerRange) -> torch.Tensor:
    """The distances of the values from the lowest."""
    return (tensor - packing.lowest).to(TYPES[packing.size_bytes])


def unpacked(distances: torch.Tensor, packing: IntegerRange) -> torch.Tensor:
    """The values as int64, in the memory order of the distances. Distances that a peer made up wrap around."""
    return distances.to(torch.int64).add_(packing.lowest)


def fed_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the values of an input in a frame that feeds it."""
    packing = packing_of(tensor)
    return tensor.nbytes if packing is None else tensor.numel() * packing.size_bytes

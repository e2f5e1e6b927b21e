"""Parameters taken a few at a time: what is done with many of them at once makes values as large as all of these."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

import torch

Item = TypeVar("Item")

_MAX_PIECES: Final = 8
PIECE_BYTES: Final = 8 << 20
_GPU_PIECE_BYTES: Final = 256 << 20
"""A GPU is given one piece in a fraction of the time that it computes on so much; with smaller ones it waits."""
_BATCH_BYTES: Final = 1 << 20


def pieces(parameters: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """The parameters' names, small ones first, in a few pieces of about equal size.

    An optimizer makes values as large as the parameters at hand, Adam two of them. Stepping piece by piece, and letting
    the gradients of each piece go, makes room for those: the stage takes hardly more than at the end of a backward.
    """
    on_processor = all(p.device.type == "cpu" for p in parameters.values())
    total = sum(p.nbytes for p in parameters.values())
    least = max(PIECE_BYTES if on_processor else _GPU_PIECE_BYTES, total // _MAX_PIECES)
    names = sorted(parameters, key=lambda name: parameters[name].nbytes)
    # Where there are none, an update is a step all the same: schedules count them.
    return _filled(names, lambda name: parameters[name].nbytes, least) or [[]]


def batches(items: Iterable[Item], parameter: Callable[[Item], torch.Tensor]) -> list[list[Item]]:
    """What has a parameter each, in the same order, so many at a time as are worth one call of torch together.

    On a processor small ones together, and a large one without others: it costs the call nothing, and the memory of
    what the call makes is that of one parameter. On a GPU as in `pieces`.
    """
    found = list(items)
    on_processor = all(parameter(item).device.type == "cpu" for item in found)
    least = _BATCH_BYTES if on_processor else _GPU_PIECE_BYTES
    return _filled(found, lambda item: parameter(item).nbytes, least, apart=on_processor)


def _filled(
    items: Iterable[Item], size_of: Callable[[Item], int], least: int, *, apart: bool = False
) -> list[list[Item]]:
    """The items in order, so many in each list that it has `least` bytes; with `apart`, one that has as many by itself
    is alone."""
    found: list[list[Item]] = []
    filled = 0
    for item in items:
        size = size_of(item)
        if not found or filled >= least or (apart and size >= least):
            found.append([])
            filled = 0
        found[-1].append(item)
        filled += size
    return found

"""Buckets of parameters: groups that are processed together, so that temporary tensors stay small and calls few."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

import torch

Item = TypeVar("Item")

MAX_UPDATE_BUCKETS: Final = 8
UPDATE_BUCKET_BYTES: Final = 8 << 20
FOREACH_BUCKET_BYTES: Final = 1 << 20
GPU_BUCKET_BYTES: Final = 256 << 20
"""Larger, because a GPU finishes a small bucket sooner than the next one is submitted."""


def update_buckets(parameters: Mapping[str, torch.Tensor], min_bytes: int = UPDATE_BUCKET_BYTES) -> list[list[str]]:
    """Names of the parameters in a few buckets of about equal size, at least `min_bytes` on a CPU; small ones first.

    An optimizer allocates temporary tensors as large as the parameters that it steps, Adam two of them. Stepping one
    bucket at a time and freeing its gradients keeps the peak memory of an update close to that of the backward.
    """
    on_cpu = all(p.device.type == "cpu" for p in parameters.values())
    total = sum(p.nbytes for p in parameters.values())
    size = max(min_bytes if on_cpu else GPU_BUCKET_BYTES, total // MAX_UPDATE_BUCKETS)
    names = sorted(parameters, key=lambda name: parameters[name].nbytes)
    # Without parameters there is one empty bucket: schedules count the update.
    return _filled(names, lambda name: parameters[name].nbytes, size) or [[]]


def foreach_buckets(
    items: Iterable[Item], parameter: Callable[[Item], torch.Tensor], min_bytes: int = FOREACH_BUCKET_BYTES
) -> list[list[Item]]:
    """The items in order, in buckets that are each worth one `torch._foreach` call; `parameter` returns an item's
    tensor.

    On a CPU small parameters share a bucket of about `min_bytes`, and a larger one has a bucket of its own: temporary
    tensors are then only as large as that one parameter. On a GPU the buckets are as large as those of an update.
    """
    found = list(items)
    on_cpu = all(parameter(item).device.type == "cpu" for item in found)
    size = min_bytes if on_cpu else GPU_BUCKET_BYTES
    return _filled(found, lambda item: parameter(item).nbytes, size, isolate=on_cpu)


def _filled(
    items: Iterable[Item], size_of: Callable[[Item], int], min_bytes: int, *, isolate: bool = False
) -> list[list[Item]]:
    """The items in order, in buckets of at least `min_bytes`; with `isolate`, a larger item has its own bucket."""
    found: list[list[Item]] = []
    filled = 0
    for item in items:
        size = size_of(item)
        if not found or filled >= min_bytes or (isolate and size >= min_bytes):
            found.append([])
            filled = 0
        found[-1].append(item)
        filled += size
    return found

"""Conversion between the tensors of a stage and what a ring averages: one flat vector, and a list of counters."""

from collections.abc import Mapping, Sequence

import torch

from ravnest.averaging.vector import Entry, RingVector
from ravnest.errors import GraphError
from ravnest.net.v1.control_pb2 import Ring


def ring_vector(ring: Ring, tensors: Mapping[str, torch.Tensor], moments: Sequence[str]) -> RingVector:
    """The layout of a ring of a stage with these tensors. GraphError if the stage lacks one of the ring's tensors.

    `moments`: the optimizer's state tensors of each parameter that are averaged, too.
    """
    names = [f"param:{key}" for key in ring.parameters]
    plain = [f"buffer:{key}" for key in ring.buffers]
    missing = [name for name in (*names, *plain, *_counter_names(ring)) if name not in tensors]
    if missing:
        raise GraphError(f"ring {ring.ring} has {missing[0][:80]!r}, which this stage does not have")
    shapes = {name: tuple(tensors[name].shape) for name in (*names, *plain)}
    for moment in moments:
        for key in ring.parameters:
            shapes[name := f"optim:{key}:{moment}"] = shapes[f"param:{key}"]
            plain.append(name)
    return RingVector([Entry(name, shapes[name]) for name in names], [Entry(name, shapes[name]) for name in plain])


def flat(vector: RingVector, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The ring's tensors in one new vector. Moments that the optimizer does not have before its first update are 0."""
    missing = {entry.name: torch.zeros(entry.shape) for entry in vector.plain if entry.name not in tensors}
    return vector.flatten({**tensors, **missing})


def restored_parameters(vector: RingVector, ring: Ring, saved: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One flat value per parameter from tensors by parameter key; 0 for a parameter without one. GraphError for a
    tensor that does not fit its parameter."""
    values = torch.zeros(vector.coded_values)
    views = vector.parameter_views(values)
    for key in ring.parameters:
        view, tensor = views[f"param:{key}"], saved.get(key)
        if tensor is None:
            continue
        if tensor.shape != view.shape or tensor.dtype != torch.float32 or not torch.isfinite(tensor).all():
            raise GraphError(f"the averaging state of {key[:80]!r} does not fit that parameter")
        view.copy_(tensor)
    return values


def counters_of(ring: Ring, tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """All counters of the ring, one after the other."""
    return [int(value) for name in _counter_names(ring) for value in tensors[name].flatten().tolist()]


def counter_tensors(ring: Ring, tensors: Mapping[str, torch.Tensor], values: Sequence[int]) -> dict[str, torch.Tensor]:
    """The inverse of `counters_of`: one value per counter, in the shapes of the ring's counters in `tensors`."""
    names = _counter_names(ring)
    parts = torch.split(torch.tensor(values, dtype=torch.int64), [tensors[name].numel() for name in names])
    return {name: part.reshape(tensors[name].shape) for name, part in zip(names, parts, strict=True)}


def _counter_names(ring: Ring) -> list[str]:
    return [f"buffer:{key}" for key in ring.counters]

"""Agreement of what comes to a stage about one microbatch: from the coordinator and from the stages next to it.

What the coordinator says of a microbatch is the truth: the data is the requester's own. The stage before must have sent
values of the same free sizes, and must say the same of the microbatch; the stage after must send gradients of exactly
what was sent to it. Checked before anything is computed: kernels that are given parts of different batches do not all
check them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch

from ravnest.engine.messages import Message
from ravnest.errors import PeerError
from ravnest.graph.portable import PortableGraph
from ravnest.graph.sizes import misfit, sizes_of
from ravnest.microbatch import Marks

Shapes = Mapping[str, torch.Size]


class MisfitError(PeerError):
    """What the stage before sent does not fit what the coordinator says of the microbatch."""


def feed_misfit(graph: PortableGraph, fed: Message) -> str:
    """What of a feed does not agree with the rest of it; empty where all does."""
    sizes = {**sizes_of(graph.inputs, fed.values), **fed.sizes}
    found = misfit(graph.inputs, fed.values, sizes)
    return f"the feed of microbatch {fed.microbatch} does not agree with itself: {found}" if found else ""


def forward_misfit(graph: PortableGraph, fed: Message, received: Message) -> str:
    """What of the activations of a microbatch does not agree with its feed; empty where all does."""
    number = fed.microbatch
    if received.marks.train != fed.marks.train:
        return f"microbatch {number} came for training from one side and not from the other"
    if received.marks != fed.marks:
        for mark in fields(Marks):
            name = mark.name
            said, truth = getattr(received.marks, name), getattr(fed.marks, name)
            if said != truth:
                return f"the activations of microbatch {number} came with {name} {said}, and its feed says {truth}"
    sizes = {**sizes_of(graph.inputs, fed.values), **fed.sizes}
    found = misfit(graph.receives, received.values, sizes)
    return f"the activations of microbatch {number} do not fit its feed: {found}" if found else ""


def backward_misfit(sent: Shapes, gradients: Message) -> str:
    """Which gradient has not the shape of what it is for; empty where all have."""
    for name, gradient in gradients.values.items():
        shape = sent.get(name)
        if shape is not None and isinstance(gradient, torch.Tensor) and gradient.shape != shape:
            return (
                f"the gradient of {name} for microbatch {gradients.microbatch} has the shape {tuple(gradient.shape)}, "
                f"and {tuple(shape)} was sent"
            )
    return ""


def shapes_of(values: Mapping[str, Any], names: Iterable[str]) -> Shapes:
    """The shapes of those of these values that are tensors."""
    return {name: value.shape for name in names if isinstance(value := values.get(name), torch.Tensor)}

"""Agreement checks between the messages about one microbatch: its feed, its activations and its gradients.

The coordinator's feed is authoritative, because the data is the requester's own. Activations must have the same marks
and the same free sizes as the feed, and gradients the shapes of the activations that were sent. The stage checks this
before it computes, because not all kernels detect arguments from different batches. Each check returns the first
disagreement as text, or an empty string.
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
    """The activations from the stage before do not fit the coordinator's feed of the microbatch."""


def feed_misfit(graph: PortableGraph, fed: Message) -> str:
    """Checks the sizes within a feed."""
    sizes = {**sizes_of(graph.inputs, fed.values), **fed.sizes}
    found = misfit(graph.inputs, fed.values, sizes)
    return f"the feed of microbatch {fed.microbatch} does not agree with itself: {found}" if found else ""


def forward_misfit(graph: PortableGraph, fed: Message, received: Message) -> str:
    """Checks the activations of a microbatch against its feed."""
    number = fed.microbatch
    if received.marks != fed.marks:
        for mark in fields(Marks):
            got, expected = getattr(received.marks, mark.name), getattr(fed.marks, mark.name)
            if got != expected:
                return f"the activations of microbatch {number} have {mark.name} {got}, but its feed has {expected}"
    sizes = {**sizes_of(graph.inputs, fed.values), **fed.sizes}
    found = misfit(graph.from_stages, received.values, sizes)
    return f"the activations of microbatch {number} do not fit its feed: {found}" if found else ""


def backward_misfit(sent: Shapes, gradients: Message) -> str:
    """Checks the shapes of gradients against those of the activations that were sent."""
    for name, gradient in gradients.values.items():
        shape = sent.get(name)
        if shape is not None and isinstance(gradient, torch.Tensor) and gradient.shape != shape:
            return (
                f"the gradient of {name} for microbatch {gradients.microbatch} has the shape {tuple(gradient.shape)}, "
                f"and {tuple(shape)} was sent"
            )
    return ""


def shapes_of(values: Mapping[str, Any], names: Iterable[str]) -> Shapes:
    """The shapes of the named values that are tensors."""
    return {name: value.shape for name in names if isinstance(value := values.get(name), torch.Tensor)}

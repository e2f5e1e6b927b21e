"""Coding of the tensors of a frame in the codec of its link.

Only float32 tensors are coded. Tensors below MIN_BYTES, numbers and truth values stay as they are, because coding them
saves next to nothing. A lossy codec is also not used for:

- evaluation, because the trained model will be used without a codec, and its loss and metrics are the ones to report;
- a tensor with a value that is not finite or that the codec would clip, because a loss that is not finite must be found
  at its origin, and a codec would hide it.
"""

import math
from dataclasses import replace
from typing import Final

import torch

from ravnest.codecs.codec import PLAIN, Codec
from ravnest.errors import PeerError
from ravnest.net.frames.frames import Coded, Frame
from ravnest.net.frames.tensor_bytes import dense, shaped

MIN_BYTES: Final = 1024


def coded(frame: Frame, codec: Codec) -> Frame:
    """The frame as it travels on a link of this codec. Coded tensors are on their device, or on the CPU."""
    if codec is PLAIN or (codec.lossy and not frame.marks.train):
        return frame
    plain: dict[str, torch.Tensor] = {}
    packed: dict[str, Coded] = {}
    for name, tensor in frame.tensors.items():
        found = _packed(name, tensor, codec)
        if found is None:
            plain[name] = tensor
        else:
            packed[name] = found
    return replace(frame, tensors=plain, coded=packed)


def decoded(frame: Frame, codec: Codec) -> Frame:
    """The frame before it was coded; PeerError if it was coded differently.

    Decoded tensors are on the device of their bytes. The order of the values in a frame has no meaning.
    """
    if not frame.coded:
        return frame
    tensors = dict(frame.tensors)
    for name, packed in frame.coded.items():
        if packed.codec != codec.name or codec is PLAIN:
            raise PeerError(f"the tensor {name[:80]!r} came in {packed.codec}, and this link is one of {codec.name}")
        values = codec.decode(packed.data, math.prod(packed.shape))
        tensors[name] = shaped(values, packed.shape, packed.order)
    return replace(frame, tensors=tensors, coded={})


def raw_bytes(frame: Frame) -> int:
    """Size of the tensors of a frame without a codec."""
    return _bytes(frame) + sum(packed.raw_bytes for packed in frame.coded.values())


def saved_bytes(frame: Frame) -> int:
    """Bytes that the codec saves."""
    return sum(packed.raw_bytes - packed.data.nbytes for packed in frame.coded.values())


def _packed(name: str, tensor: torch.Tensor, codec: Codec) -> Coded | None:
    """The tensor in the codec; None if it has to travel as it is."""
    if tensor.dtype is not torch.float32 or tensor.nbytes < MIN_BYTES:
        return None
    memory, order = dense(name, tensor)
    values = memory.view(-1)
    if codec.lossy:
        least, most = (float(value) for value in torch.aminmax(values))
        # A NaN fails the comparison, so the tensor is not coded.
        if not max(-least, most) <= codec.largest or math.isnan(least):
            return None
    return Coded(codec.name, tuple(tensor.shape), order, codec.encode(values))


def _bytes(frame: Frame) -> int:
    return sum(tensor.nbytes for tensor in frame.tensors.values())

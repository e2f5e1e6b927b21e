"""In what the tensors of a frame travel between two stages: as they are, or in the codec of their link.

Only float32 tensors are coded. What stays as it is, and why:

- Tensors below MIN_BYTES, numbers and truth values: they would save next to nothing.

And where the codec loses something:

- Evaluation: the model that a run leaves behind is used without a codec, and its loss and metrics are to be those.
- A tensor with a value that is not finite, or that the codec would cut off: a loss that is not finite has to be found
  where it arises, and a codec would hide it.
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
    """The frame as it travels on a link of this codec. Coded tensors are where they were, or on the CPU."""
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
    """The frame that was made to travel on a link of this codec; PeerError for one that was coded otherwise.

    Decoded tensors are on the device of their bytes. The order of values in a frame means nothing.
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
    """What the tensors of a frame take when none of them is coded."""
    return _bytes(frame) + sum(packed.raw_bytes for packed in frame.coded.values())


def saved_bytes(frame: Frame) -> int:
    """How many bytes fewer travel than without a codec."""
    return sum(packed.raw_bytes - packed.data.nbytes for packed in frame.coded.values())


def _packed(name: str, tensor: torch.Tensor, codec: Codec) -> Coded | None:
    """The tensor in the codec; None where it has to travel as it is."""
    if tensor.dtype is not torch.float32 or tensor.nbytes < MIN_BYTES:
        return None
    memory, order = dense(name, tensor)
    values = memory.view(-1)
    if codec.lossy:
        least, most = (float(value) for value in torch.aminmax(values))
        # Of a NaN the comparison is false.
        if not max(-least, most) <= codec.largest or math.isnan(least):
            return None
    return Coded(codec.name, tuple(tensor.shape), order, codec.encode(values))


def _bytes(frame: Frame) -> int:
    return sum(tensor.nbytes for tensor in frame.tensors.values())

"""Frames: the unit that flows between stages, and between the coordinator and a stage.

A frame has a kind, the microbatch that it is about, tensors and numbers. `encoding` and `decoding` turn it into bytes
and back.
"""

import enum
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final

import torch

from ravnest.microbatch import UNMARKED, Marks

MAGIC: Final = b"RVN\x01"
PREFIX: Final = struct.Struct("<4sI")
"""First bytes of an encoded frame: MAGIC, and the size of the header."""
ALIGNMENT_BYTES: Final = 64


class FrameKind(enum.IntEnum):
    """The meaning of a frame for the stage that receives it."""

    FEED = 1
    """Inputs to the root or targets to the leaf, from the coordinator."""
    FORWARD = 2
    """Activations, towards the leaf."""
    BACKWARD = 3
    """Gradients, towards the root."""
    RESULT = 4
    """Loss and metrics of a microbatch, to the coordinator."""
    DONE = 5
    """The microbatch has passed its last step on this stage."""
    RESUME = 6
    """First on every connection of a link: `microbatch` counts the frames that have arrived so far."""
    ACK = 7
    """`microbatch` counts the frames that have arrived, so that the sender may forget them."""
    END = 8
    """Nothing follows."""
    CONTROL = 9
    """A message of control.proto, in the bytes of the tensor `message`."""
    RING = 10
    """A piece of a ring's average, in the bytes of the tensor `data`."""
    PART = 11
    """Bytes of a part of a replica, in the tensor `data`; `replica` is its number."""


@dataclass(frozen=True, slots=True)
class RingPlace:
    """Place of a piece in an averaging round."""

    round: int
    ring: int
    attempt: int = 0
    hop: int = 0
    segment: int = 0
    chunk: int = 0
    donation: bool = False
    """The piece belongs to no attempt: it is part of the anchor and the outer state, for an owner that was left out."""
    last: bool = False
    """The last piece of a donation."""


PLACE: Final = tuple(each.name for each in fields(RingPlace))
MARKS: Final = tuple(each.name for each in fields(Marks))
"""Fields of a place and of marks, which have the same names in the header of a frame."""


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """A float32 tensor in the bytes of a codec."""

    codec: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    """Its dimensions in the order of its memory, as `tensor_bytes.dense` returns them."""
    data: torch.Tensor
    """Flat, uint8."""

    @property
    def raw_bytes(self) -> int:
        """Size without the codec."""
        return math.prod(self.shape) * torch.float32.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One message about one microbatch. A tensor of a received frame is a view of the message it came in."""

    kind: FrameKind
    microbatch: int
    marks: Marks = UNMARKED
    """In a PART frame, `replica` says which replica the bytes belong to."""
    generation: int = 0
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scalars: Mapping[str, int | float | bool] = field(default_factory=dict)
    piece: RingPlace | None = None
    coded: Mapping[str, Coded] = field(default_factory=dict)
    """Tensors in a codec, in a FORWARD or BACKWARD frame. Decoding the frame does not check their bytes; the codec
    does."""
    residence_micros: int = 0
    """In a BACKWARD frame: the time from the arrival of the activations at its sender to the frame; 0: unknown."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """In a FEED frame: the free sizes of the microbatch, by symbol."""

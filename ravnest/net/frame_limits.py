"""Limits of a frame. Does not import torch, so that a module that only opens connections need not either."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """Both sides check these limits before they allocate anything."""

    frame_bytes: int = 1 << 30
    header_bytes: int = 1 << 18
    tensors: int = 1024
    scalars: int = 1024
    sizes: int = 256
    dimensions: int = 16
    name_characters: int = 256


DEFAULT_LIMITS: Final = FrameLimits()

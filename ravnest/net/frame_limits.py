"""How large a frame may be; known without torch, to those who only open a connection."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """Checked on both sides, before anything is allocated."""

    frame_bytes: int = 1 << 30
    header_bytes: int = 1 << 18
    tensors: int = 1024
    scalars: int = 1024
    sizes: int = 256
    dimensions: int = 16
    name_characters: int = 256


DEFAULT_LIMITS: Final = FrameLimits()

"""Interface between the lines of a stage and its rings."""

from typing import Protocol

import torch

from ravnest.net.frames.frames import RingPlace


class PieceHandler(Protocol):
    """The rings of a stage, as its lines see them."""

    def take(self, peer: str, generation: int, place: RingPlace, data: torch.Tensor) -> None:
        """Take a piece from another owner; blocks while the piece is early. PeerError for an invalid piece."""
        ...

    def is_wanted(self, place: RingPlace) -> bool:
        """Whether a piece that waits to be sent is still of use. May be called on any thread."""
        ...

    def on_line_broken(self, peer: str, reason: str) -> None:
        """A line broke in the middle of something. Called on the network's loop."""
        ...

"""The rings of a stage for which every piece is of use, and that only note which lines broke."""

from collections.abc import Callable

import torch

from ravnest.net.frames.frames import RingPlace


class Wanting:
    def __init__(self, on_broken: Callable[[str], None]) -> None:
        self._on_broken = on_broken

    def take(self, peer: str, generation: int, place: RingPlace, data: torch.Tensor) -> None:
        raise AssertionError("nothing comes over these lines")

    def is_wanted(self, place: RingPlace) -> bool:
        return True

    def is_urgent(self, place: RingPlace) -> bool:
        """Training stands still for the rounds with odd numbers."""
        return place.round % 2 == 1

    def on_line_broken(self, peer: str, reason: str) -> None:
        self._on_broken(peer)

"""Shifts of a stage towards its rings' anchors, and the log of those that a snapshot may lack.

A commit or a catch-up moves the anchor at once, and the stage follows between two microbatches. A snapshot that the
stage takes before it follows lacks the shift. The log makes up for that: a difference from the new anchor must not
contain what is already in that anchor.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ravnest.averaging.ring_state import TensorUpdate


@dataclass(frozen=True, slots=True)
class Shift:
    """The change that a stage still has to make after its anchor has moved."""

    update: TensorUpdate
    counters: tuple[int, ...] = ()
    """The amount that each counter is behind the largest of all members; empty: the counters do not change."""

    def add_to(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add the update to those of the ring's tensors that are here."""
        for name, add in self.update.adds.items():
            if name in tensors:
                tensors[name].add_(add.to(tensors[name].dtype))
                if name in self.update.not_negative:
                    tensors[name].clamp_(min=0)


class ShiftLog:
    """The latest shifts of one ring, numbered from 1. Not thread-safe."""

    def __init__(self) -> None:
        self._count = 0
        self._latest: list[Shift] = []

    def append(self, shift: Shift) -> Shift:
        self._latest.append(shift)
        self._count += 1
        return shift

    def after(self, number: int) -> list[Shift]:
        """The shifts after this number, which a stage that has made only that many lacks."""
        lacking = self._count - number
        assert lacking <= len(self._latest)
        return self._latest[len(self._latest) - lacking :]

    def forget(self, number: int) -> None:
        """Drop the shifts up to this number: no snapshot is left that could lack one of them."""
        del self._latest[: max(0, len(self._latest) - (self._count - number))]

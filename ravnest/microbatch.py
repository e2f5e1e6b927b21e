"""Marks of a microbatch: everything that its stages are told about it besides its values.

The coordinator writes the marks once, when it feeds the microbatch, and every stage passes them on unchanged. They
travel as one value through the dispatcher, the frames, the provider and the engine.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks that contradict each other are a ValueError."""

    train: bool = True
    """False: the microbatch is evaluated, and changes nothing in any stage."""
    samples: int = 0
    checkpoint: int = 0
    """Not 0: every stage saves its state under this number after applying this microbatch."""
    flush: bool = False
    """Apply the gradients summed so far with this microbatch, even if fewer than `accumulate`."""
    round: int = 0
    """Not 0: every stage takes part in this round of averaging before it applies this microbatch."""
    fragment: int = 0
    """Part of the model that the round averages: 0 for all rings, otherwise the rings of the fragment before this
    number."""
    updates: int = 0
    """Number of updates that the run has made once this microbatch is applied; 0 if the sender does not say."""
    replica: int = 0
    """Not 0: every stage copies its state after this microbatch, as its part of this replica."""

    def __post_init__(self) -> None:
        if self.fragment and not self.round:
            raise ValueError(f"fragment {self.fragment} belongs to no round")
        if not self.train and (self.checkpoint or self.flush or self.round or self.updates or self.replica):
            raise ValueError("an evaluation has marks that only training may have")


UNMARKED: Final = Marks()
"""Marks of a message that needs none."""

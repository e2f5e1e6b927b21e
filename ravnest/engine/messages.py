"""Messages into and out of a stage's worker, and the Outbox that takes them: the engine's side of every link.

The engine knows nothing of sockets. The provider turns frames into calls of the worker, and its implementation of
`Outbox` turns results into frames.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ravnest.engine.stage import Update
from ravnest.engine.telemetry.spans import Span
from ravnest.microbatch import UNMARKED, Marks


@dataclass(frozen=True, slots=True)
class Message:
    """Values of one microbatch on their way between stages, or between the coordinator and a stage."""

    microbatch: int
    values: Mapping[str, Any]
    marks: Marks = UNMARKED
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The free sizes of the microbatch by symbol, if the message comes from the coordinator."""

    def with_values(self, values: Mapping[str, Any]) -> "Message":
        """The same microbatch with other values."""
        return Message(self.microbatch, values, self.marks, self.sizes)

    def with_marks(self, marks: Marks) -> "Message":
        """The same microbatch with other marks."""
        return Message(self.microbatch, self.values, marks, self.sizes)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a stage between two updates, for a round of averaging."""

    round: int
    fragment: int
    version: int
    samples: int
    """Number of samples that the stage has applied since it was built."""
    tensors: Mapping[str, torch.Tensor]
    """Named as in `Stage.state`. They share the stage's memory and change once the call has returned."""


@dataclass(frozen=True, slots=True)
class LossRecord:
    microbatch: int
    loss: float
    samples: int


class Outbox(Protocol):
    """Destination of a worker's results.

    Every method is called on the worker's thread; only `save` may block for long. Tensors passed to `save`, `keep` and
    `snapshot` share the stage's memory and change once the call has returned; those of `keep` can be frozen.
    """

    def forward(self, message: Message) -> None:
        """Send these activations to the stage after this one; from a leaf, looked-up rows to the root."""

    def backward(self, message: Message) -> None:
        """Send these gradients to the stage before this one; from a root, those of the rows to the leaf."""

    def trained(self, loss: LossRecord) -> None:
        """The leaf has computed the loss of a training microbatch."""

    def updated(self, update: Update) -> None:
        """The stage has applied an update."""

    def worked(self, span: Span) -> None:
        """A piece of work or a wait has ended."""

    def done(self, message: Message) -> None:
        """A training microbatch is finished, because every stage has computed its backward: the root says so, or the
        leaf that looked rows up for it."""

    def evaluated(self, message: Message) -> None:
        """The leaf has evaluated a microbatch; the values are the loss and the metrics as plain numbers."""

    def save(self, checkpoint: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """Save the stage's state as its part of this checkpoint."""

    def keep(self, replica: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """Freeze or copy the stage's state as its part of this replica; the worker waits for that.

        The metadata is that of `Stage.state` with `applied`, a JSON list of the applied microbatches, and `samples`,
        the number of samples that this stage has applied.
        """

    def snapshot(self, snapshot: Snapshot) -> None:
        """Copy the tensors of the stage that a round averages."""

    def failed(self, kind: str, text: str, microbatch: int | None) -> None:
        """The worker has failed and stops."""

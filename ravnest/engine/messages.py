"""What goes into and out of a stage's worker, and who takes it: the engine's side of every link.

The engine knows nothing of sockets. A provider turns frames into calls of the worker, and an `Outbox` turns what comes
out into frames. Every method of an Outbox is called on the worker's thread.
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
    """The free sizes of the microbatch by symbol, where it comes from the coordinator."""

    def with_values(self, values: Mapping[str, Any]) -> "Message":
        """The same microbatch with other values."""
        return Message(self.microbatch, values, self.marks, self.sizes)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A stage between two updates, as it goes into a round of averaging."""

    round: int
    fragment: int
    version: int
    samples: int
    """That the stage has applied since it was built."""
    tensors: Mapping[str, torch.Tensor]
    """As `Stage.state` names them. The stage's own memory: they change once the snapshot has been taken."""


@dataclass(frozen=True, slots=True)
class LossRecord:
    microbatch: int
    loss: float
    samples: int


class Outbox(Protocol):
    """Where a worker's results go. Called on the worker's thread; must not block for long, `save` excepted."""

    def forward(self, message: Message) -> None:
        """To the stage after this one."""

    def backward(self, message: Message) -> None:
        """To the stage before this one."""

    def trained(self, loss: LossRecord) -> None:
        """A leaf has computed the loss of a training microbatch."""

    def updated(self, update: Update) -> None:
        """The stage has applied an update."""

    def worked(self, span: Span) -> None:
        """A piece of work is done."""

    def done(self, message: Message) -> None:
        """The root has finished a training microbatch: every stage has seen its backward."""

    def evaluated(self, message: Message) -> None:
        """A leaf has evaluated a microbatch; values are the loss and the metrics as plain numbers."""

    def save(self, checkpoint: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """Take the stage's state away; the tensors are the stage's own memory and change once this returns."""

    def keep(self, replica: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """Take the stage's state as its part of this replica: what `Stage.state` gives, and in the metadata `applied`,
        a JSON list of the microbatches that are in it, and `samples`, how many this stage has applied.

        The tensors are the stage's own memory and change once this returns, and the worker waits: take a copy, and do
        the rest elsewhere.
        """

    def snapshot(self, snapshot: Snapshot) -> None:
        """Take from the stage what a round averages."""

    def failed(self, kind: str, text: str, microbatch: int | None) -> None:
        """The worker cannot go on, and stops."""

"""Rows that a leaf looked up for the root: what became of each microbatch until its gradients of rows are applied.

The gradients of a leaf's own pass are there first. Those of the rows come back when the microbatch ends, while the leaf
has passed over the next ones. So the update of a microbatch waits for its rows as long as the leaf has nothing else to
do and no rows of an earlier microbatch come back, and otherwise leaves them to the next update. With one microbatch in
flight every update has the whole gradient.
"""

from collections.abc import Collection, Sequence

from ravnest.engine.inbox.agreement import Shapes
from ravnest.engine.inbox.applied import Applied
from ravnest.engine.messages import Message


class RowReturns:
    """The microbatches of training of one worker, without their values."""

    def __init__(self) -> None:
        self.looked_up: dict[int, Message] = {}
        """Those whose gradients of rows have not come back."""
        self.held: Message | None = None
        """The one whose own gradients are summed and wait for those of its rows."""
        self._not_passed: dict[int, Shapes] = {}
        """Those of `looked_up` that the leaf has not passed over itself, with the shapes of their rows."""
        self._taken: list[Message] = []
        """Those whose gradients of rows are summed, until they are reported."""
        self._summed: list[int] = []
        """The same, until an update includes them."""

    def begin(self, message: Message, rows: Shapes) -> None:
        """Rows of these shapes are looked up for a microbatch."""
        self.looked_up[message.microbatch] = message.with_values({})
        self._not_passed[message.microbatch] = rows

    def passed(self, microbatch: int) -> Shapes:
        """The leaf begins its own pass over the microbatch; returns the shapes of its rows."""
        return self._not_passed.pop(microbatch)

    def not_in(self, summed: Collection[int]) -> dict[int, Message]:
        """Those of `looked_up` whose own gradients are not summed."""
        return {number: message for number, message in self.looked_up.items() if number not in summed}

    def take(self, microbatch: int) -> Message:
        """The gradients of the rows of a microbatch have come back; returns it with the marks that it began with."""
        message = self.looked_up.pop(microbatch)
        self._taken.append(message)
        self._summed.append(microbatch)
        return message

    @property
    def more_to_pass(self) -> bool:
        """Whether the leaf is still to pass over a microbatch itself, so that another update follows."""
        return bool(self._not_passed)

    @property
    def are_last(self) -> bool:
        """Whether no update is to come that the gradients of rows could be part of."""
        return self.held is None and not self._not_passed

    def lacking(self, applied: Applied) -> list[int]:
        """The microbatches whose gradients of rows wait for an update."""
        return [number for number in self._summed if number not in applied]

    def applied(self, own: Sequence[int], applied: Applied) -> None:
        """An update has the leaf's own gradients of these microbatches, and all gradients of rows so far."""
        applied.without_rows.update(number for number in own if number not in applied)
        applied.add(self._summed)
        self._summed = []

    def pop_taken(self) -> list[Message]:
        """Removes and returns the microbatches to report."""
        taken, self._taken = self._taken, []
        return taken

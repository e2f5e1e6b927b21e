"""Walk of the requester's thread through the data, and what it waits for in the coordinator."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from ravnest.coordinator.feed.evaluation_scores import Evaluation
from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.report.phase import Phase

T = TypeVar("T")


class DataRewindError(Exception):
    """The run continues from an earlier position: the requester's thread must walk the data again from there."""

    def __init__(self, place: DataPosition) -> None:
        super().__init__(f"back to {place.updates} updates")
        self.place = place


class DataWalk:
    """The walk of one run. All methods run on the network's event loop."""

    def __init__(self) -> None:
        self.evaluation: Evaluation | None = None
        """The evaluation that is under way."""
        self.is_finishing = False
        """Whether the last checkpoint is being taken."""
        self.is_over = False
        """Whether the last checkpoint has been taken: nothing more is fed."""
        self._rewind_to: DataPosition | None = None
        self._step: asyncio.Task[Any] | None = None
        """The task that the requester's thread waits for; None while the thread is busy with the data."""
        self._left_at = 0.0
        """When the thread last began to be busy with the data."""

    @property
    def is_undisturbed(self) -> bool:
        """Whether no evaluation and no last checkpoint would be disturbed by a new deployment."""
        return self.evaluation is None and not self.is_finishing

    @property
    def phase(self) -> Phase:
        """The phase of a run that is deployed and at this point of the walk."""
        if self.evaluation is not None:
            return Phase.EVALUATING
        return Phase.SAVING if self.is_finishing or self.is_over else Phase.TRAINING

    @property
    def data_seconds(self) -> float | None:
        """For how long the requester's thread has been busy with the data; None if it waits for the coordinator."""
        return time.monotonic() - self._left_at if self._step is None and self._left_at else None

    async def step(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` for the requester's thread; DataRewindError if the data must be walked again instead."""
        self._step = asyncio.current_task()
        try:
            if self._rewind_to is None:
                return await work
        except asyncio.CancelledError:
            if self._rewind_to is None:
                raise
        finally:
            self._step, self._left_at = None, time.monotonic()
            work.close()
        place, self._rewind_to = self._rewind_to, None
        raise DataRewindError(place)

    def rewind(self, place: DataPosition) -> None:
        """Makes the requester's thread walk the data again from this position. The evaluation under way is dropped,
        because it comes again with the data."""
        self._rewind_to = place
        self.evaluation, self.is_finishing = None, False
        if self._step is not None:
            self._step.cancel()

"""Records of a hosted stage that wait for the next report, and messages that wait for the coordinator.

The engine's thread fills the records and the network's loop empties them. They outlive the generations of the stage:
after a rebuild of the cluster, the coordinator gets what had not been reported before.
"""

import asyncio
from collections import deque
from typing import TypeVar

from ravnest.engine.messages import LossRecord
from ravnest.engine.stage import Update
from ravnest.net.v1.control_pb2 import ProviderMessage
from ravnest.provider.stage.spans import SpanRecorder

T = TypeVar("T")


class StageRecords:
    """Losses, updates, saved checkpoints and spans of one stage since the last report."""

    def __init__(self, record_updates: bool = True, spans: SpanRecorder | None = None) -> None:
        self.messages: asyncio.Queue[ProviderMessage] = asyncio.Queue()
        """Messages to the coordinator about averaging rounds and traces."""
        self.news = asyncio.Event()
        """Set when there are losses or saved checkpoints to report, or a new generation to look for."""
        self.spans = spans or SpanRecorder(0)
        self._record_updates = record_updates
        self._loop = asyncio.get_running_loop()
        # Deques instead of calls into the loop: waking the loop for each record would slow the worker down.
        self._losses: deque[LossRecord] = deque()
        self._updates: deque[Update] = deque()
        self._saved: deque[int] = deque()

    def tell(self, message: ProviderMessage) -> None:
        """Queue a message to the coordinator. On the network's loop."""
        self.messages.put_nowait(message)

    def trained(self, loss: LossRecord) -> None:
        """Record the loss of a microbatch. On the engine's thread."""
        self._losses.append(loss)
        if len(self._losses) == 1:
            self._loop.call_soon_threadsafe(self.news.set)

    def updated(self, update: Update) -> None:
        """Record an update, if the job asks for that. On the engine's thread."""
        if self._record_updates:
            self._updates.append(update)

    def saved(self, checkpoint: int) -> None:
        """Record that the coordinator has this stage's part of a checkpoint. On any thread."""
        self._saved.append(checkpoint)
        self._loop.call_soon_threadsafe(self.news.set)

    def take(self) -> tuple[list[LossRecord], list[Update], list[int]]:
        """Losses, updates and saved checkpoints since the last call."""
        # Cleared first: a record that arrives while the others are taken counts as news again.
        self.news.clear()
        return _taken(self._losses), _taken(self._updates), _taken(self._saved)


def _taken(records: deque[T]) -> list[T]:
    """Empty a queue that another thread may be filling."""
    taken = []
    while records:
        taken.append(records.popleft())
    return taken

"""From the engine's thread to the network's loop: what a stage puts out becomes frames, records and uploads."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any, Final, TypeVar

import torch

from ravnest.engine.messages import LossRecord, Message, Snapshot, Span
from ravnest.engine.stage import Update
from ravnest.errors import PeerError, RavnestError, RefusedError
from ravnest.graph.weights import stream_tensors
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.v1.control_pb2 import ProviderMessage
from ravnest.provider.links.link_delay import LinkDelay, Stays
from ravnest.provider.links.pack_threads import Outgoing
from ravnest.provider.replicas.format import Keep
from ravnest.provider.replicas.outgoing import StateTransfers
from ravnest.provider.stage.spans import SpanRecorder

Upload = Callable[[str, Callable[[], AsyncIterator[bytes]]], Coroutine[Any, Any, None]]
"""Uploads what the function yields, under a name; the function is called again where it has to be sent again."""

_ANOTHER_SECONDS: Final = 5.0
"""Within which a provider learns that its coordinator is another one."""

T = TypeVar("T")


class FrameOutbox:
    """The engine's Outbox over three queues of frames. The queues stay short: what is in flight is limited at the
    root."""

    def __init__(
        self, generation: int, upload: Upload, record_updates: bool, spans: SpanRecorder | None = None
    ) -> None:
        self.to_next: asyncio.Queue[Outgoing] = asyncio.Queue()
        self.to_previous: asyncio.Queue[Outgoing] = asyncio.Queue()
        self.to_coordinator: asyncio.Queue[Outgoing] = asyncio.Queue()
        self.messages: asyncio.Queue[ProviderMessage] = asyncio.Queue()
        """What the coordinator is to hear of rounds."""
        self.failure: asyncio.Future[tuple[str, str, int]] = asyncio.get_running_loop().create_future()
        self.news = asyncio.Event()
        """Set when there are losses or saved checkpoints to report."""
        self.on_keep: Keep = lambda replica, tensors, metadata: None
        """Who takes the stage's part of a replica. On any thread; it returns at once, and the tensors are its own."""
        self.on_snapshot: Callable[[Snapshot], None] = _no_rings
        """Who takes what a round averages, on the engine's thread."""
        self.beside: Callable[[], Mapping[str, torch.Tensor]] = dict
        """What a checkpoint has beside the stage's own state, where that does not bring it along; on the engine's
        thread."""
        self.has_room: Callable[[int], bool] = lambda size_bytes: False
        """Whether there is main memory for a copy of this size: then a checkpoint is uploaded while the stage works,
        and otherwise the stage waits for it. On the engine's thread."""
        self.mark: Callable[[], torch.cuda.Event | None] = lambda: None
        """When what the stage has computed so far will be there; on the engine's thread."""
        self.delay = LinkDelay()
        """Of the link to the next stage."""
        self.stays = Stays()
        """Of microbatches of the stage before."""
        self.spans = spans or SpanRecorder(0)
        self.transfers = StateTransfers()
        """Where it is told that the stage's state is being uploaded."""
        self._loop = asyncio.get_running_loop()
        self._generation = generation
        self._upload = upload
        self._record_updates = record_updates
        # Filled by the worker's thread, emptied by the loop: to wake the loop for each would hold the worker up.
        self._losses: deque[LossRecord] = deque()
        self._updates: deque[Update] = deque()
        self._saved: deque[int] = deque()
        self._uploading: Future[None] | None = None
        self._is_over = False
        self._nobody_saves = threading.Event()

    def follow(self, before: "FrameOutbox") -> None:
        """Goes on where another outbox of the same stage was, whose worker has ended: what that had to tell the
        coordinator and has not told is told now. Frames under way are not: they are of a generation that is over."""
        self.messages = before.messages
        self._losses, self._updates, self._saved = before._losses, before._updates, before._saved
        self.on_snapshot, self.beside = before.on_snapshot, before.beside
        if self._losses or self._saved:
            self.news.set()

    def give_up(self) -> None:
        """Breaks off an upload under way, and any later one: nobody wants it any more, and the worker must not wait for
        it. That the worker cannot go on is no failure from now on."""
        self._is_over = True
        if self._uploading is not None:
            self._uploading.cancel()

    def save_no_more(self) -> None:
        """The coordinator is gone, and with it any checkpoint that it wanted: the stage goes on without saving it."""
        self._nobody_saves.set()
        if self._uploading is not None:
            self._uploading.cancel()

    def take_records(self) -> tuple[list[LossRecord], list[Update], list[int]]:
        """Losses, updates and saved checkpoints since the last call."""
        # First: what comes while they are taken is news again.
        self.news.clear()
        return _taken(self._losses), _taken(self._updates), _taken(self._saved)

    def forward(self, message: Message) -> None:
        self.spans.put_out("forward", message.microbatch)
        if message.marks.train:
            self.delay.handed_over(message.microbatch)
        self._put(self.to_next, FrameKind.FORWARD, message)

    def backward(self, message: Message) -> None:
        self.spans.put_out("backward", message.microbatch)
        self._put(self.to_previous, FrameKind.BACKWARD, message, self.stays.left_micros(message.microbatch))

    def done(self, message: Message) -> None:
        self._put(self.to_coordinator, FrameKind.DONE, message)

    def evaluated(self, message: Message) -> None:
        self._put(self.to_coordinator, FrameKind.RESULT, message)

    def trained(self, loss: LossRecord) -> None:
        self._losses.append(loss)
        if len(self._losses) == 1:
            self._loop.call_soon_threadsafe(self.news.set)

    def updated(self, update: Update) -> None:
        if self._record_updates:
            self._updates.append(update)

    def worked(self, span: Span) -> None:
        self.spans.worked(span)

    def save(self, checkpoint: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        if self._nobody_saves.is_set():
            return
        name = f"checkpoint-{checkpoint}"
        if not any(key.startswith("outer:") for key in tensors):
            tensors = {**tensors, **self.beside()}
        if self.has_room(sum(tensor.nbytes for tensor in tensors.values())):
            self._upload_copy(checkpoint, name, tensors, metadata)
        else:
            # The worker waits: the tensors are the stage's own.
            self._upload_own(checkpoint, name, tensors, metadata)

    def _upload_copy(
        self, checkpoint: int, name: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
    ) -> None:
        if self._uploading is not None:
            # The coordinator has given the checkpoint before up, if it has not taken it.
            self._uploading.cancel()
        work = self._upload_aside(checkpoint, name, _copied(tensors), dict(metadata))
        self._uploading = asyncio.run_coroutine_threadsafe(work, self._loop)
        if self._is_over or self._nobody_saves.is_set():
            self._uploading.cancel()

    async def _upload_aside(
        self, checkpoint: int, name: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
    ) -> None:
        try:
            with self.transfers.sending("checkpoint", name, sum(t.nbytes for t in tensors.values())) as sending:
                await self._upload(name, lambda: sending.counted(_chunks(tensors, metadata)))
        except Exception as error:
            is_refused = isinstance(error, RefusedError)
            if is_refused and await asyncio.to_thread(self._nobody_saves.wait, _ANOTHER_SECONDS):
                # By a coordinator that was started again, and has never asked for it.
                return
            text = str(error) if isinstance(error, RavnestError) else f"{type(error).__name__}: {error}"
            self._fail(("error", text, -1))
            return
        self._saved.append(checkpoint)
        self.news.set()

    def _upload_own(
        self, checkpoint: int, name: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
    ) -> None:
        total_bytes = sum(tensor.nbytes for tensor in tensors.values())
        with self.transfers.sending("checkpoint", name, total_bytes) as sending:
            upload = self._upload(name, lambda: sending.counted(_chunks(tensors, metadata)))
            self._uploading = asyncio.run_coroutine_threadsafe(upload, self._loop)
            if self._is_over:
                self._uploading.cancel()
            try:
                self._uploading.result()
            except (CancelledError, RefusedError):
                # By a coordinator that was started again, perhaps, and has never asked for it: that is known soon.
                if self._is_over or not self._nobody_saves.wait(_ANOTHER_SECONDS):
                    raise
                return
        self._saved.append(checkpoint)
        self._loop.call_soon_threadsafe(self.news.set)

    def keep(self, replica: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        # A copy, though it doubles the stage's memory: writing or sending it takes far longer than an update may wait.
        self.on_keep(replica, _copied(tensors), dict(metadata))

    def tell(self, message: ProviderMessage) -> None:
        """Something for the coordinator. On the network's loop."""
        self.messages.put_nowait(message)

    def snapshot(self, snapshot: Snapshot) -> None:
        self.on_snapshot(snapshot)

    def failed(self, kind: str, text: str, microbatch: int | None) -> None:
        self._loop.call_soon_threadsafe(self._fail, (kind, text, -1 if microbatch is None else microbatch))

    def came(self, frame: Frame) -> None:
        """A frame of a neighbouring stage is here; evaluations say nothing of the way back."""
        if frame.kind is FrameKind.BACKWARD:
            self.delay.returned(frame.microbatch, frame.residence_micros)
        elif frame.marks.train:
            self.stays.arrived(frame.microbatch)

    def _put(self, queue: asyncio.Queue[Outgoing], kind: FrameKind, message: Message, stay_micros: int = 0) -> None:
        tensors = {n: v for n, v in message.values.items() if isinstance(v, torch.Tensor)}
        scalars = {n: v for n, v in message.values.items() if not isinstance(v, torch.Tensor)}
        frame = Frame(
            kind=kind,
            microbatch=message.microbatch,
            marks=message.marks,
            generation=self._generation,
            tensors=tensors,
            scalars=scalars,
            residence_micros=stay_micros,
        )
        outgoing = Outgoing(frame, self.mark() if tensors else None)
        self._loop.call_soon_threadsafe(queue.put_nowait, outgoing)

    def _fail(self, failure: tuple[str, str, int]) -> None:
        if not self.failure.done() and not self._is_over:
            self.failure.set_result(failure)


def _copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _no_rings(snapshot: Snapshot) -> None:
    raise PeerError(f"round {snapshot.round} was announced to a stage without rings")


def message_of(frame: Frame) -> Message:
    """The engine's view of a frame."""
    return Message(frame.microbatch, {**frame.tensors, **frame.scalars}, frame.marks, frame.sizes)


def _taken(records: deque[T]) -> list[T]:
    """Everything that is there, out of a queue that another thread may be filling."""
    taken = []
    while records:
        taken.append(records.popleft())
    return taken


async def _chunks(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> AsyncIterator[bytes]:
    for chunk in stream_tensors(tensors, metadata):
        yield chunk

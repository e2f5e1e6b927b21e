"""Outbox of a stage: what the engine's thread puts out becomes frames, records and uploads on the network's loop."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ravnest.engine.messages import LossRecord, Message, Snapshot
from ravnest.engine.stage import Update
from ravnest.engine.telemetry.spans import Span
from ravnest.errors import PeerError
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.provider.links.link_delay import LinkDelay, ResidenceTimes
from ravnest.provider.links.pack_threads import Outgoing
from ravnest.provider.replicas.format import Keep
from ravnest.provider.stage.checkpoint_upload import CheckpointUploads, Tensors
from ravnest.provider.stage.failure import FirstFailure, StageFailure
from ravnest.provider.stage.records import StageRecords


def _no_rings(snapshot: Snapshot) -> None:
    raise PeerError(f"round {snapshot.round} was announced to a stage without rings")


def keep_nothing(replica: int, tensors: Tensors, metadata: Mapping[str, str]) -> None:
    """Drop a part of a replica: there is no order to keep it."""


@dataclass(frozen=True)
class StageHooks:
    """Receivers of a stage's state besides the neighbours. The engine's thread calls these."""

    on_keep: Keep = keep_nothing
    """Takes the stage's part of a replica. The tensors share the stage's memory, and change once it has returned."""
    on_snapshot: Callable[[Snapshot], None] = _no_rings
    """Takes the parameters for an averaging round."""
    outer_state: Callable[[], Tensors] = dict
    """Returns the state of the outer optimizer, for a checkpoint whose tensors lack it."""


class FrameOutbox:
    """The engine's Outbox for one generation of a stage.

    Each direction has its queue of frames. The queues stay short, because the root limits the microbatches in flight.
    """

    def __init__(
        self,
        generation: int,
        records: StageRecords,
        uploads: CheckpointUploads,
        failures: FirstFailure,
        hooks: StageHooks,
        mark_computed: Callable[[], torch.cuda.Event | None] = lambda: None,
    ) -> None:
        """`mark_computed` marks the moment when the device has computed what a frame carries; None: that is now."""
        self.to_next: asyncio.Queue[Outgoing] = asyncio.Queue()
        self.to_previous: asyncio.Queue[Outgoing] = asyncio.Queue()
        self.to_coordinator: asyncio.Queue[Outgoing] = asyncio.Queue()
        self.delay = LinkDelay()
        """Delay of the link to the next stage."""
        self._residence = ResidenceTimes()
        self._generation = generation
        self._records = records
        self._spans = records.spans
        self._uploads = uploads
        self._failures = failures
        self._hooks = hooks
        self._mark_computed = mark_computed
        self._loop = asyncio.get_running_loop()

    def forward(self, message: Message) -> None:
        self._spans.put_out("forward", message.microbatch)
        if message.marks.train:
            self.delay.handed_over(message.microbatch)
        self._put(self.to_next, FrameKind.FORWARD, message)

    def backward(self, message: Message) -> None:
        self._spans.put_out("backward", message.microbatch)
        self._put(self.to_previous, FrameKind.BACKWARD, message, self._residence.left_micros(message.microbatch))

    def done(self, message: Message) -> None:
        self._put(self.to_coordinator, FrameKind.DONE, message)

    def evaluated(self, message: Message) -> None:
        self._put(self.to_coordinator, FrameKind.RESULT, message)

    def trained(self, loss: LossRecord) -> None:
        self._records.trained(loss)

    def updated(self, update: Update) -> None:
        self._records.updated(update)

    def worked(self, span: Span) -> None:
        self._spans.worked(span)

    def save(self, checkpoint: int, tensors: Tensors, metadata: Mapping[str, str]) -> None:
        self._uploads.save(checkpoint, tensors, metadata)

    def keep(self, replica: int, tensors: Tensors, metadata: Mapping[str, str]) -> None:
        self._hooks.on_keep(replica, tensors, metadata)

    def snapshot(self, snapshot: Snapshot) -> None:
        self._hooks.on_snapshot(snapshot)

    def failed(self, kind: str, text: str, microbatch: int | None) -> None:
        failure = StageFailure(kind, text, -1 if microbatch is None else microbatch)
        self._loop.call_soon_threadsafe(self._failures.report, failure)

    def on_frame(self, frame: Frame) -> None:
        """A frame of a neighbouring stage has arrived: measure the link. Evaluations have no way back to measure."""
        if frame.kind is FrameKind.BACKWARD:
            self.delay.returned(frame.microbatch, frame.residence_micros)
        elif frame.marks.train:
            self._residence.arrived(frame.microbatch)

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
        outgoing = Outgoing(frame, self._mark_computed() if tensors else None)
        self._loop.call_soon_threadsafe(queue.put_nowait, outgoing)


def message_of(frame: Frame) -> Message:
    """The engine's view of a frame."""
    return Message(frame.microbatch, {**frame.tensors, **frame.scalars}, frame.marks, frame.sizes)

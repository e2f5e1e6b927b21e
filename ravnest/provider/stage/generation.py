"""One generation of a hosted stage: its worker and its links for as long as the cluster keeps its shape.

When a cluster loses a machine, the stages that are left get new neighbours. Each of them ends its generation, forgets
the microbatches in flight, and starts the next generation around the same weights. On failure:

- a link fails, or a neighbour breaks the protocol: the generation fails with the kind "link" or "neighbour";
- the worker fails, or memory is exhausted: the generation fails, and the stage cannot be kept.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import torch

from ravnest.background import BackgroundTasks
from ravnest.engine.inbox.agreement import MisfitError
from ravnest.engine.inbox.applied import Applied
from ravnest.engine.messages import Message
from ravnest.engine.stage import Stage
from ravnest.engine.telemetry.counters import Counters
from ravnest.engine.worker import StageWorker
from ravnest.errors import PeerError, RefusedError
from ravnest.graph.portable import ValueSpec
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.pacing.budget import StateBudget
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.net.v1.control_pb2 import Deploy, LinkState, ProviderMessage, Save, Strained
from ravnest.provider.links.cuda_copies import DeviceCopies
from ravnest.provider.links.frame_check import check_frame
from ravnest.provider.links.pack_threads import Outgoing, Packing
from ravnest.provider.links.stage_link import StageLink
from ravnest.provider.links.upload import upload
from ravnest.provider.stage.checkpoint_upload import CheckpointUploads, upload_name
from ravnest.provider.stage.failure import FirstFailure, StageFailure
from ravnest.provider.stage.host import Host
from ravnest.provider.stage.memory_watch import StageMemory
from ravnest.provider.stage.outbox import FrameOutbox, StageHooks, message_of
from ravnest.provider.stage.records import StageRecords
from ravnest.provider.stage.report import trace_of

CLOSE_SECONDS: Final = 0.5
_STOP_SECONDS: Final = 60.0
"""Timeout for the worker's current task when the stage is kept. A stage that is given up is not waited for."""


class Generation:
    """The worker, links and tasks of a stage between two rebuilds of its cluster. `close` or `abandon` ends it."""

    def __init__(
        self,
        order: Deploy,
        stage: Stage,
        host: Host,
        client: CoordinatorClient,
        records: StageRecords,
        hooks: StageHooks,
        applied: Applied,
        counters: Counters,
    ) -> None:
        """`applied` and `counters` go on from the generation before. PeerError where the order names a link that cannot
        be made."""
        self.number = order.generation
        self.links = [
            StageLink(neighbour, is_next, host.node, client)
            for neighbour, is_next in ((order.previous, False), (order.next, True))
            if neighbour.node
        ]
        for end in self.links:
            end.paces(host.transfers.budget)
        self._awaited = ""
        """Name of the upload that the run waits for, if there is one."""
        self._max_bytes_per_second = 0.0
        self._failures = FirstFailure()
        self._memory = StageMemory(host, recomputes=not stage.keeps_activations)
        self._uploads = CheckpointUploads(
            partial(self._upload, client, host.transfers.budget),
            records,
            self._failures,
            host.transfers,
            has_room=self._memory.has_room,
            outer_state=hooks.outer_state,
            folder=host.node.folder or Path(tempfile.gettempdir()),
        )
        self._uploads.say = host.say
        copies = DeviceCopies(stage.device)
        self._outbox = FrameOutbox(self.number, records, self._uploads, self._failures, hooks, copies.mark)
        self.worker = StageWorker(
            stage, self._outbox, host.pretence, applied=applied, counters=counters, announced=True
        )
        self._packing = Packing(2 * len(self.links), copies)
        self._records = records
        self._tasks = BackgroundTasks(lambda error: self.fail("link", str(error)))
        for end in self.links:
            records.spans.watch(end.link)
        graph = stage.graph
        self._expected: Mapping[FrameKind, Mapping[str, ValueSpec]] = {
            FrameKind.FEED: {v.name: v for v in graph.inputs},
            FrameKind.FORWARD: {v.name: v for v in graph.from_stages},
            FrameKind.BACKWARD: {v.name: v for v in (*graph.sends, *graph.lookups) if v.needs_grad},
        }

    @property
    def failure(self) -> asyncio.Future[StageFailure]:
        """Done once the generation cannot go on."""
        return self._failures.future

    @property
    def bytes_sent(self) -> int:
        return sum(end.link.bytes_sent for end in self.links)

    @property
    def bytes_received(self) -> int:
        return sum(end.link.bytes_received for end in self.links)

    def open(self, feed: ResumableLink, say: Callable[[ProviderMessage], Awaitable[None]]) -> None:
        """Start to work on whatever arrives; `say` sends a message to the coordinator."""
        self.worker.start()
        self._tasks.spawn(self._answer(feed))
        self._tasks.spawn(self._speak(say))
        for end in self.links:
            if end.is_next:
                self._tasks.spawn(self._send(self._outbox.to_next, end))
                self._tasks.spawn(self._read(end, FrameKind.BACKWARD, self.worker.receive_backward))
            else:
                self._tasks.spawn(self._send(self._outbox.to_previous, end))
                self._tasks.spawn(self._read(end, FrameKind.FORWARD, self.worker.receive_forward))

    def connect(self) -> None:
        """Start to connect to the neighbouring stages, which exist by now."""
        for end in self.links:
            self._tasks.spawn(end.run())

    def meet(self, end: StageLink) -> None:
        """Go to the relay, where the other end of this link waits."""
        self._tasks.spawn(end.meet())

    def take_feed(self, frame: Frame) -> None:
        """Take inputs or targets from the coordinator. PeerError for a frame that does not fit the stage."""
        self._check(frame, FrameKind.FEED)
        try:
            self.worker.feed(message_of(frame))
        except MisfitError as error:
            # The coordinator is trusted, so what the previous stage sent of this microbatch is wrong.
            self._accuse(next(end for end in self.links if not end.is_next), error)

    def expect_save(self, order: Save) -> None:
        """The stage is to be saved: how urgently, and how fast at most."""
        self._awaited = upload_name(order.checkpoint) if order.urgent else ""
        self._max_bytes_per_second = order.max_bytes_per_second

    def save(self, checkpoint: int) -> None:
        """Upload the stage's state to this checkpoint, before the worker's next task."""
        self.worker.save(checkpoint)

    def save_with(self, checkpoint: int, ring_state: Callable[[], Awaitable[Mapping[str, torch.Tensor]]]) -> None:
        """The same; the tensors of `ring_state` are added to the stage's own, or replace them."""

        async def save() -> None:
            self.worker.save(checkpoint, await ring_state())

        self._tasks.spawn(save())

    def trace(self, deployment: str, microbatch: int) -> None:
        """Tell the coordinator what the stage knows of a microbatch whose loss or gradients are not finite."""
        loop = asyncio.get_running_loop()

        def find() -> None:
            found = trace_of(deployment, microbatch, self.worker.diagnose(microbatch))
            loop.call_soon_threadsafe(self._records.tell, found)

        if self.worker.runs:
            self.worker.call_between_tasks(find)
        else:
            self._tasks.spawn(asyncio.to_thread(find))

    def relieve_memory(self, deployment: str) -> Strained | None:
        """Take the next step against memory pressure, if one is due; the message that tells the coordinator of it."""
        reading = self._memory.reading()
        step = self._memory.next_step(reading, self.worker.max_held())
        if step is None:
            return None
        if step.kind == "stop":
            self.fail("memory", step.reason)
            return None
        if step.kind == "recompute":
            self.worker.start_recomputing()
        return Strained(
            deployment=deployment,
            in_flight=step.in_flight,
            recomputes=step.kind == "recompute",
            free_bytes=reading.left_bytes,
            reason=step.reason,
        )

    def link_states(self) -> list[LinkState]:
        """How each link runs, for the report."""
        states = []
        for end in self.links:
            state = end.state()
            if end.is_next:
                state.delay_seconds = self._outbox.delay.low_seconds
            states.append(state)
        return states

    def fail(self, kind: str, text: str) -> None:
        """The generation cannot go on, unless it has failed or ended already."""
        self._failures.report(StageFailure(kind, text))

    def on_coordinator_gone(self) -> None:
        """The coordinator is gone, and with it the checkpoints that it wanted."""
        self._uploads.on_coordinator_gone()

    async def stop(self) -> None:
        """Stop the worker, without waiting for long. `close` follows."""
        self._end()
        await asyncio.to_thread(self.worker.stop)

    async def close(self) -> None:
        """Close the links in order, and end every task."""
        await asyncio.gather(*(end.close(CLOSE_SECONDS) for end in self.links))
        await self._end_tasks()

    async def abandon(self) -> None:
        """End the generation, so that the next one can have its stage. A caller that is cancelled may call it again."""
        self._end()
        # The links are aborted, not closed in order: the neighbours are gone or are about to do the same.
        for end in self.links:
            end.abort()
            self._records.spans.forget(end.link)
        await asyncio.to_thread(self.worker.stop, _STOP_SECONDS)
        await self._end_tasks()

    def _end(self) -> None:
        self._failures.close()
        self._uploads.close()

    async def _end_tasks(self) -> None:
        await self._tasks.close()
        self._packing.close()

    async def _upload(
        self, client: CoordinatorClient, budget: StateBudget, name: str, chunks: Callable[[], AsyncIterator[bytes]]
    ) -> None:
        transfer = budget.transfer(
            "checkpoint", urgent=name == self._awaited, max_bytes_per_second=self._max_bytes_per_second
        )
        await upload(client, name, chunks, transfer)

    async def _read(self, end: StageLink, kind: FrameKind, take: Callable[[Message], None]) -> None:
        link, check = end.link, partial(self._check, kind=kind)
        while (frame := await link.receive()) is not None:
            arrived = time.perf_counter()
            try:
                self._outbox.on_frame(frame)
                take(message_of(await self._packing.unpack(frame, end.codec, check)))
                self._records.spans.received(frame, arrived)
            except PeerError as error:
                self._accuse(end, error)
                return
            # The next frame may take long to arrive, and the values of this one belong to the worker now.
            del frame
        # The coordinator knows whether the neighbour was right to leave.
        raise PeerError(f"{link.peer} ended the link")

    def _accuse(self, end: StageLink, error: PeerError) -> None:
        """A neighbour broke the protocol: end its link with the reason, and name it to the coordinator."""
        refused = RefusedError(f"{end.link.peer} broke the protocol: {error}")
        self._failures.report(StageFailure("neighbour", str(refused), about=end.node_id))
        end.link.fail(refused)

    async def _send(self, queue: asyncio.Queue[Outgoing], end: StageLink) -> None:
        while True:
            outgoing = await queue.get()
            packed = await self._packing.pack(outgoing, end.codec)
            end.saved_bytes += packed.saved_bytes
            await end.link.send_encoded(packed.data)
            self._records.spans.handed_over(end.link, outgoing.frame)
            # Until the next frame is ready, the link alone holds the bytes, and the values are needed no more.
            del outgoing, packed

    async def _answer(self, feed: ResumableLink) -> None:
        while True:
            await feed.send((await self._outbox.to_coordinator.get()).frame)

    async def _speak(self, say: Callable[[ProviderMessage], Awaitable[None]]) -> None:
        while True:
            await say(await self._records.messages.get())

    def _check(self, frame: Frame, kind: FrameKind) -> None:
        """PeerError unless the stage may get this frame now."""
        check_frame(frame, kind, self.number, self._expected[kind])

"""One stage on this provider: fetched, built, linked to its neighbours, reported on, and taken down again."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import torch

from ravnest.engine.messages import Message
from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage
from ravnest.engine.worker import StageWorker
from ravnest.errors import GraphError, PeerError
from ravnest.graph.portable import PortableGraph, ValueSpec
from ravnest.graph.weights import WeightsReader
from ravnest.net.client import CoordinatorClient, dial_link
from ravnest.net.frames import Frame, FrameKind
from ravnest.net.link import Link
from ravnest.net.node_identity import NodeIdentity
from ravnest.net.v1.control_pb2 import ArtifactRef, Deploy, LossRecord, Report, UpdateRecord
from ravnest.provider.frame_check import check_frame
from ravnest.provider.memory import peak_bytes
from ravnest.provider.outbox import FrameOutbox, message_of

_MAX_GRAPH_BYTES = 256 << 20


class Deployment:
    """A stage at work. `failure` is done when it cannot go on; everything it started ends with `close`."""

    def __init__(self, order: Deploy, stage: Stage, outbox: FrameOutbox, baseline_memory_bytes: int) -> None:
        self.name = order.deployment
        self.generation = order.generation
        self._stage = stage
        self._outbox = outbox
        self._baseline = baseline_memory_bytes
        self._worker = StageWorker(stage, outbox)
        self._next = (order.next_address, order.next_node)
        self._links: list[Link] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = time.perf_counter()
        graph = stage.graph
        self._expected: Mapping[FrameKind, Mapping[str, ValueSpec]] = {
            FrameKind.FEED: {v.name: v for v in graph.inputs},
            FrameKind.FORWARD: {v.name: v for v in graph.receives},
            FrameKind.BACKWARD: {v.name: v for v in graph.sends if v.needs_grad},
        }

    @classmethod
    async def make(
        cls, order: Deploy, client: CoordinatorClient, device: torch.device, baseline_memory_bytes: int
    ) -> "Deployment":
        """Fetches what the order names and builds the stage; GraphError or PeerError says why it cannot be."""
        settings = StageSettings.from_json(order.settings_json)
        text = await _fetch_text(client, order.graph)
        weights, metadata = await _fetch_weights(client, order.weights)
        outbox = FrameOutbox(order.generation, client.upload, settings.record_updates)

        def build() -> Stage:
            graph = PortableGraph.from_json(text)
            stage = Stage(graph, {w.key: weights.pop(f"weight:{w.key}") for w in graph.weights}, settings, device)
            if "version" in metadata:
                stage.restore(_optimizer_state(weights), metadata)
            return stage

        try:
            stage = await asyncio.to_thread(build)
        except KeyError as error:
            raise GraphError(f"the weights of stage {order.stage} lack {error}") from None
        return cls(order, stage, outbox, baseline_memory_bytes)

    @property
    def failure(self) -> asyncio.Future[tuple[str, str, int]]:
        return self._outbox.failure

    @property
    def samples(self) -> int:
        """Samples this stage has trained on so far."""
        return self._outbox.samples

    @property
    def news(self) -> asyncio.Event:
        return self._outbox.news

    def open(self, feed: Link) -> None:
        """Begins to work on whatever comes."""
        self._worker.start()
        self._spawn(self._send(self._outbox.to_coordinator, feed))

    async def link_next(self, node: NodeIdentity) -> None:
        """Dials the stage after this one, where there is one; PeerError when it does not answer."""
        address, next_node = self._next
        if address:
            link = await dial_link(address, next_node, node)
            self._links.append(link)
            self._spawn(self._send(self._outbox.to_next, link))
            self._spawn(self._read(link, FrameKind.BACKWARD, self._worker.receive_backward))

    async def serve_previous(self, link: Link) -> None:
        """Takes activations from the stage before and gives gradients back, until the link ends."""
        self._links.append(link)
        self._spawn(self._send(self._outbox.to_previous, link))
        await self._read(link, FrameKind.FORWARD, self._worker.receive_forward)

    def take_feed(self, frame: Frame) -> None:
        """Inputs or targets from the coordinator."""
        self._check(frame, FrameKind.FEED)
        self._worker.feed(message_of(frame))

    def save(self, checkpoint: int) -> None:
        """Save the stage's state now; the coordinator asks for it when nothing is in flight."""
        self._worker.save(checkpoint)

    def report(self) -> tuple[Report, list[int]]:
        """What the stage did so far, with losses and updates since the last report; and the checkpoints saved since
        then."""
        losses, updates, saved = self._outbox.take_records()
        counters = self._worker.counters
        staleness = dict(counters.staleness)
        report = Report(
            deployment=self.name,
            updates=counters.updates,
            staleness_sum=sum(k * n for k, n in staleness.items()),
            staleness_max=max(staleness, default=0),
            staleness_counts=[staleness.get(k, 0) for k in range(min(64, max(staleness, default=-1) + 1))],
            busy_seconds=counters.busy_seconds,
            seconds=time.perf_counter() - self._started,
            peak_memory_bytes=peak_bytes(self._stage.device),
            baseline_memory_bytes=self._baseline,
            bytes_sent=sum(link.bytes_sent for link in self._links),
            bytes_received=sum(link.bytes_received for link in self._links),
            forwards=counters.forwards,
            backwards=counters.backwards,
            losses=[LossRecord(microbatch=r.microbatch, loss=r.loss, samples=r.samples) for r in losses],
            records=[
                UpdateRecord(microbatch=u.microbatch, forward_version=u.forward_version, version=u.version)
                for u in updates
            ],
        )
        return report, saved

    async def close(self) -> None:
        """Ends the worker and the links."""
        # Whoever waits for news of this stage should look for the next one, and not only at its next heartbeat.
        self.news.set()
        await asyncio.to_thread(self._worker.stop)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links:
            await link.close()

    async def _read(self, link: Link, kind: FrameKind, take: Callable[[Message], None]) -> None:
        while (frame := await link.receive()) is not None:
            self._check(frame, kind)
            take(message_of(frame))

    async def _send(self, queue: asyncio.Queue[Frame], link: Link) -> None:
        while True:
            await link.send(await queue.get())

    def _check(self, frame: Frame, kind: FrameKind) -> None:
        """PeerError unless the frame is one this stage may get now."""
        check_frame(frame, kind, self.generation, self._expected[kind])

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.failure.done():
            self.failure.set_result(("link", str(error), -1))


async def _fetch_text(client: CoordinatorClient, ref: ArtifactRef) -> bytes:
    if ref.size_bytes > _MAX_GRAPH_BYTES:
        raise GraphError(f"the stage's graph has {ref.size_bytes} bytes, more than {_MAX_GRAPH_BYTES}")
    digest, parts, size = hashlib.sha256(), [], 0
    async for chunk in client.fetch(ref.id):
        size += len(chunk)
        if size > ref.size_bytes:
            raise PeerError(f"the artifact {ref.id} is larger than the {ref.size_bytes} bytes announced")
        digest.update(chunk)
        parts.append(chunk)
    _verify(ref, digest.hexdigest())
    return b"".join(parts)


async def _fetch_weights(client: CoordinatorClient, ref: ArtifactRef) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    reader, digest = WeightsReader(ref.size_bytes), hashlib.sha256()
    async for chunk in client.fetch(ref.id):
        digest.update(chunk)
        reader.feed(chunk)
    _verify(ref, digest.hexdigest())
    return reader.finish()


def _verify(ref: ArtifactRef, found: str) -> None:
    if found != ref.sha256:
        raise PeerError(f"the artifact {ref.id} arrived damaged (its sha256 is {found[:12]}…, not {ref.sha256[:12]}…)")


def _optimizer_state(weights: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    state: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights.items():
        if name.startswith("optim:"):
            key, _, entry = name.removeprefix("optim:").rpartition(":")
            state.setdefault(key, {})[entry] = tensor
    return state

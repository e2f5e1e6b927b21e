"""One stage on this provider: fetched, built, linked to its neighbours, reported on, and taken down again.

When a cluster has lost a machine, the stages that are left get new neighbours: the deployment is followed by another
one of a later generation around the same stage, rings and counters (`renewed`). Nothing else of it goes on.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Final

import torch

from ravnest.background import BackgroundTasks
from ravnest.engine.activity import Activity as EngineActivity
from ravnest.engine.agreement import MisfitError
from ravnest.engine.applied import Applied
from ravnest.engine.messages import Message
from ravnest.engine.settings import StageSettings
from ravnest.engine.speed.pace import NO_PRETENCE, Pretence
from ravnest.engine.stage import Stage
from ravnest.engine.worker import StageWorker
from ravnest.errors import GraphError, PeerError, RefusedError
from ravnest.graph.portable import PortableGraph, ValueSpec
from ravnest.graph.weights import WeightsReader
from ravnest.net.direct_line import DirectLine
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.streams.frame_stream import Link
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.net.v1.control_pb2 import (
    Activity,
    CoordinatorMessage,
    Deploy,
    HeldStage,
    LinkState,
    LossRecord,
    Missing,
    Neighbour,
    ProviderMessage,
    Ready,
    Report,
    RingProgress,
    Strained,
    UpdateRecord,
)
from ravnest.provider.fetch.artifacts import Artifacts
from ravnest.provider.fetch.progress import FetchProgress
from ravnest.provider.links.cuda_copies import Transfers
from ravnest.provider.links.frame_check import check_frame
from ravnest.provider.links.pack_threads import Outgoing, Packing
from ravnest.provider.links.stage_link import StageLink, link_of
from ravnest.provider.links.upload import upload
from ravnest.provider.machine.memory import PROCESS_BYTES, peak_bytes, spare_bytes, stage_bytes
from ravnest.provider.machine.memory_pressure import EASY, MemoryReading, MemoryStrain
from ravnest.provider.replicas.format import Keep, Restored, with_part
from ravnest.provider.replicas.outgoing import StateTransfers
from ravnest.provider.rings.lines import RingLines, ring_generation
from ravnest.provider.rings.rings import Rings
from ravnest.provider.stage.not_finite_report import traced
from ravnest.provider.stage.outbox import FrameOutbox, message_of
from ravnest.provider.stage.spans import SpanRecorder

_MAX_GRAPH_BYTES = 256 << 20
_CLOSE_SECONDS = 0.5
_STOP_SECONDS = 60.0
"""For the task at hand of a stage that is kept. One that is given up need not end: nobody looks at it again."""
MAX_STALENESS_TOLD: Final = 4095
"""Of the distribution in a report. The largest of all is told by itself."""


class Deployment:
    """A stage at work. `failure` is done when it cannot go on; everything it started ends with `close`."""

    def __init__(
        self,
        order: Deploy,
        stage: Stage,
        outbox: FrameOutbox,
        links: list[StageLink],
        baseline_memory_bytes: int,
        pretence: Pretence = NO_PRETENCE,
        rings: Rings | None = None,
        ring_lines: RingLines | None = None,
        *,
        applied: Applied | None = None,
        before: "Deployment | None" = None,
        sending: StateTransfers | None = None,
    ) -> None:
        """`applied`: what is in the stage already; `before`: the deployment that had the stage until now; `sending`:
        where all transfers of state are told of that this provider makes."""
        self.name = order.deployment
        self.generation = order.generation
        self.on_keep: Keep = _keep_nothing if before is None else before.on_keep
        """Who takes the stage's part of a replica: see `FrameOutbox.on_keep`."""
        self._order = order
        self._before = before
        self._stage = stage
        self._outbox = outbox
        self._baseline = baseline_memory_bytes
        self._pretence = pretence
        worker = None if before is None else before._worker
        self._worker: StageWorker = StageWorker(
            stage,
            outbox,
            pretence,
            applied=applied if worker is None else worker.applied,
            counters=None if worker is None else worker.counters,
            announced=True,
        )
        self._strain = MemoryStrain(recomputes=not stage.keeps_activations)
        self._links = links
        self._rings = rings
        self._ring_lines = ring_lines
        transfers = Transfers(stage.device)
        outbox.mark = transfers.mark
        self._packing = Packing(2 * len(links), transfers)
        self.accused = ""
        """The neighbour that broke the rules, where the failure is of the kind "neighbour"."""
        self._closing = False
        self._tasks = BackgroundTasks(lambda error: self._fail("link", str(error)))
        self._started: float = time.perf_counter() if before is None else before._started
        self._past_bytes = (0, 0) if before is None else before._bytes
        self._past_overruns = 0 if before is None else before.overruns
        outbox.on_keep = self._keep
        self._sending = sending or StateTransfers()
        outbox.transfers = self._sending
        outbox.has_room = self._has_room
        self._lent_bytes: int = 0 if before is None else before._lent_bytes
        """What the owner of the machine lends, once that was told."""
        self._spans = outbox.spans
        for end in links:
            self._spans.watch(end.link)
        graph = stage.graph
        self._expected: Mapping[FrameKind, Mapping[str, ValueSpec]] = {
            FrameKind.FEED: {v.name: v for v in graph.inputs},
            FrameKind.FORWARD: {v.name: v for v in graph.receives},
            FrameKind.BACKWARD: {v.name: v for v in graph.sends if v.needs_grad},
        }

    @classmethod
    async def make(
        cls,
        order: Deploy,
        client: CoordinatorClient,
        node: NodeIdentity,
        device: torch.device,
        baseline_memory_bytes: int,
        artifacts: Artifacts,
        progress: FetchProgress,
        pretence: Pretence = NO_PRETENCE,
        part: tuple[dict[str, torch.Tensor], dict[str, str]] | None = None,
        sending: StateTransfers | None = None,
        memory_bytes: int | None = None,
    ) -> "Deployment":
        """Fetches what the order names and builds the stage; GraphError or PeerError says why it cannot be.

        `part`: tensors and metadata of a part of a replica that the stage begins with, in memory of their own. The
        weights are then those that never change, alone. `memory_bytes`: what the provider lends.
        """
        settings = StageSettings.from_json(order.settings_json)
        text = await artifacts.get(order.graph, lambda: _GraphText(order.graph.size_bytes), progress)
        reader = await artifacts.get(order.weights, lambda: WeightsReader(order.weights.size_bytes), progress)
        weights, metadata = reader.finish()
        del reader  # It holds every tensor, and the stage gives them up one by one.
        if part is not None:
            metadata = part[1]
        restored = Restored.of(weights if part is None else part[0], metadata)
        spans = SpanRecorder(settings.trace)
        outbox = FrameOutbox(order.generation, partial(upload, client), settings.record_updates, spans)

        def build() -> Stage:
            graph = PortableGraph.from_json(b"".join(text.parts))
            if part is None:
                own = {w.key: weights.pop(f"weight:{w.key}") for w in graph.weights}
            else:
                own = with_part(graph, weights, part)
            stage = Stage(graph, own, settings, device, memory_bytes)
            if "version" in metadata:
                stage.restore(restored.optimizer, metadata)
            return stage

        try:
            stage = await asyncio.to_thread(build)
        except KeyError as error:
            raise GraphError(f"the weights of stage {order.stage} lack {error}") from None
        rings = lines = None
        if order.rings:
            loop = asyncio.get_running_loop()
            rings = await asyncio.to_thread(Rings, order, stage, node.node_id, loop, outbox.tell, restored)
            outbox.on_snapshot = rings.snapshot
            outbox.beside = rings.remembered
            generation, take = ring_generation(order), rings.take
            lines = RingLines(order.ring_peers, generation, node, client, take, rings.is_wanted, rings.line_broke)
        links = _links(order, node, client)
        return cls(
            *(order, stage, outbox, links, baseline_memory_bytes, pretence, rings, lines),
            applied=restored.applied,
            sending=sending,
        )

    async def renewed(self, order: Deploy, client: CoordinatorClient, node: NodeIdentity) -> "Deployment":
        """The next deployment of the same stage, between the neighbours of this order and in its generation: all that
        is in flight is forgotten, everything else goes on. This one is over.

        PeerError where the stage of the order is not here, or has failed; then this one stays as it is.
        """
        self._check_kept(order)
        await self._let_go()
        if self._worker.runs:
            raise PeerError(f"stage {order.stage} does not come to an end with what it does; it cannot be kept")
        # Again: the last task may have failed.
        self._check_kept(order)
        self._stage.forget()
        settings = self._stage.settings
        outbox = FrameOutbox(order.generation, partial(upload, client), settings.record_updates, self._spans)
        outbox.follow(self._outbox)
        next_one = Deployment(
            order,
            self._stage,
            outbox,
            _links(order, node, client),
            self._baseline,
            self._pretence,
            self._rings,
            self._ring_lines,
            before=self,
            sending=self._sending,
        )
        limit = StageSettings.from_json(order.settings_json).in_flight if order.settings_json else self._worker.limit
        if limit is not None:
            next_one.set_limit(limit)
        return next_one

    def ready(self) -> Ready:
        """What the coordinator is told when the stage is there. Before it is opened."""
        return Ready(
            deployment=self.name,
            generation=self.generation,
            version=self._stage.version,
            applied=self._worker.applied.numbers(),
            rings=() if self._rings is None else self._rings.standings(),
        )

    @property
    def held(self) -> HeldStage:
        """What another coordinator is told of the stage."""
        own = self._order
        return HeldStage(deployment=own.deployment, stage=own.stage, stages=own.stages)

    @property
    def neighbours(self) -> set[str]:
        """Nodes that may dial in."""
        return {end.node_id for end in self._ends}

    @property
    def failure(self) -> asyncio.Future[tuple[str, str, int]]:
        return self._outbox.failure

    @property
    def samples(self) -> int:
        """Samples this stage has trained on so far."""
        return self._worker.counters.samples

    @property
    def overruns(self) -> int:
        """Pieces of work that took longer than this machine pretends."""
        return self._past_overruns + self._worker.overruns

    @property
    def news(self) -> asyncio.Event:
        return self._outbox.news

    def open(self, feed: ResumableLink, say: Callable[[ProviderMessage], Awaitable[None]]) -> None:
        """Begins to work on whatever comes; `say` tells the coordinator something."""
        if self._rings is not None and self._ring_lines is not None:
            self._rings.on_failure = lambda text: self._fail("error", text)
            self._rings.open(self._worker, self._ring_lines)
        if self._before is not None:
            # What rounds had for the stage when its worker ended, or since then.
            for work in self._before._worker.take_left():
                self._worker.between(work)
            self._before = None
        self._worker.start()
        self._tasks.spawn(self._answer(feed))
        self._tasks.spawn(self._speak(say))
        for end in self._links:
            if end.is_next:
                self._tasks.spawn(self._send(self._outbox.to_next, end))
                self._tasks.spawn(self._read(end, FrameKind.BACKWARD, self._worker.receive_backward))
            else:
                self._tasks.spawn(self._send(self._outbox.to_previous, end))
                self._tasks.spawn(self._read(end, FrameKind.FORWARD, self._worker.receive_forward))

    def link(self) -> None:
        """Begins to connect with the neighbouring stages, which are there by now."""
        for end in self._links:
            self._tasks.spawn(end.run())

    async def accept(self, peer: str, connection: Link) -> None:
        """A neighbour, or another owner of a ring, has dialled: uses its connection until that breaks."""
        await link_of(self._ends, connection.label, peer).accept(connection)

    def take_direct(self, line: DirectLine) -> None:
        """Another owner of a ring has a direct line here: takes what comes, until it ends. On a thread of its own."""
        if self._rings is not None:
            self._rings.take_all(line)

    def meet(self, name: str) -> None:
        """The neighbour at the other end of this link waits at the coordinator's relay."""
        for end in self._ends:
            if end.name == name:
                self._tasks.spawn(end.meet())

    def meet_owners(self, peers: Iterable[Neighbour], client: CoordinatorClient) -> None:
        """These are the other owners of this stage's rings from now on."""
        if self._ring_lines is not None:
            self._ring_lines.client = client
            self._ring_lines.change(peers)

    def take_feed(self, frame: Frame) -> None:
        """Inputs or targets from the coordinator."""
        self._check(frame, FrameKind.FEED)
        try:
            self._worker.feed(message_of(frame))
        except MisfitError as error:
            # The coordinator's word is the truth: what came before it, from the stage before, is what cannot be.
            self._accuse(next(end for end in self._links if not end.is_next), error)

    def set_limit(self, in_flight: int) -> None:
        """Have so many microbatches between forward and backward from now on, where this is a root."""
        self._worker.set_limit(in_flight)

    def set_threads(self, threads: int) -> None:
        """Computes with this many threads after the task that is under way."""
        # torch keeps the number for each thread that has computed: the one that computes has to set it.
        self._worker.between(lambda: torch.set_num_threads(threads))

    def save(self, checkpoint: int, anchored: bool = False) -> None:
        """Save the stage's state now, where `anchored` with the parameters of the last round."""
        if self._rings is None:
            self._worker.save(checkpoint)
        else:
            self._tasks.spawn(self._save_with(self._rings, checkpoint, anchored))

    def trace(self, microbatch: int) -> None:
        """Tell the coordinator what the stage knows of a microbatch whose loss or gradients are not finite."""

        def look() -> None:
            said = traced(self.name, microbatch, self._worker.testify(microbatch))
            loop.call_soon_threadsafe(self._outbox.tell, said)

        loop = asyncio.get_running_loop()
        if self._worker.runs:
            self._worker.between(look)
        else:
            self._tasks.spawn(asyncio.to_thread(look))

    def average(self, message: CoordinatorMessage) -> None:
        """Does what the coordinator says of rounds; PeerError for a stage without rings."""
        if self._rings is None:
            raise PeerError("the coordinator spoke of a round to a stage without rings")
        self._rings.obey(message)

    def look_at_memory(self, lent_bytes: int) -> Strained | None:
        """Does what is to be done where memory is nearly exhausted, and gives what the coordinator is to hear of it."""
        self._lent_bytes = lent_bytes
        reading = self._memory(self._stage.device)
        step = self._strain.look(reading, self._worker.max_held(), time.monotonic())
        if step is None:
            return None
        if step.kind == "stop":
            self._fail("memory", step.reason)
            return None
        if step.kind == "recompute":
            self._worker.recompute_from_now_on()
        return Strained(
            deployment=self.name,
            in_flight=step.in_flight,
            recomputes=step.kind == "recompute",
            free_bytes=reading.left_bytes,
            reason=step.reason,
        )

    def _memory(self, device: torch.device) -> MemoryReading:
        process = 0 if device.type == "cuda" else PROCESS_BYTES
        return MemoryReading(stage_bytes(device, self._baseline), spare_bytes(device), self._lent_bytes, process)

    def _has_room(self, size_bytes: int) -> bool:
        """Whether main memory is plenty after a copy of the stage's state is made."""
        if self._stage.device.type == "cuda":
            return spare_bytes(torch.device("cpu")) >= PROCESS_BYTES + 2 * size_bytes
        reading = self._memory(self._stage.device)
        return reading.left_bytes >= size_bytes + EASY * reading.short_bytes

    def report(self) -> tuple[Report, list[int]]:
        """What the stage did so far, with losses and updates since the last report; and the checkpoints saved since
        then."""
        losses, updates, saved = self._outbox.take_records()
        counters = self._worker.counters
        staleness, spent = dict(counters.staleness), dict(counters.seconds)
        under_way = self._rings.progress() if self._rings is not None else ()
        report = Report(
            deployment=self.name,
            rings=[RingProgress(round=r, ring=n, attempt=a, pieces=p) for r, n, a, p in under_way],
            updates=counters.updates,
            staleness_sum=sum(k * n for k, n in staleness.items()),
            staleness_max=max(staleness, default=0),
            staleness_counts=staleness_counts(staleness),
            busy_seconds=counters.busy_seconds,
            seconds=time.perf_counter() - self._started,
            peak_memory_bytes=peak_bytes(self._stage.device),
            baseline_memory_bytes=self._baseline,
            bytes_sent=self._bytes[0],
            bytes_received=self._bytes[1],
            links=[self._link_state(end) for end in self._links],
            forward_seconds=spent.get("forward", 0.0),
            backward_seconds=spent.get("backward", 0.0) + spent.get("weights", 0.0),
            update_seconds=spent.get("update", 0.0),
            in_flight=self._worker.limit or 0,
            flight_seconds=self._worker.flight_seconds,
            ready=self._worker.ready,
            activity=_told(self._worker.activity()),
            transfers=self._sending.told(),
            forwards=counters.forwards,
            backwards=counters.backwards,
            losses=[LossRecord(microbatch=r.microbatch, loss=r.loss, samples=r.samples) for r in losses],
            records=[
                UpdateRecord(microbatch=u.microbatch, forward_version=u.forward_version, version=u.version)
                for u in updates
            ],
            training_seconds=counters.training.seconds,
            training_busy_seconds=counters.training.busy_seconds,
            spans=self._spans.take(self._started),
        )
        return report, saved

    def left_alone(self) -> None:
        """The coordinator is gone: the stage works on what it was fed, with its neighbours, and waits."""
        self._outbox.save_no_more()

    async def close(self) -> None:
        """Ends the worker and the links."""
        self._end()
        await asyncio.to_thread(self._worker.stop)
        if self._rings is not None:
            await self._rings.close(_CLOSE_SECONDS)
        await asyncio.gather(*(end.close(_CLOSE_SECONDS) for end in self._links))
        await self._end_tasks()

    async def _let_go(self) -> None:
        """Ends everything but the stage and its rings. May be broken off, and done again."""
        self._end()
        # Not in order, as `close` does: who is at the other end is gone, or is about to do the same.
        for end in self._links:
            end.abort()
            self._spans.forget(end.link)
        await asyncio.to_thread(self._worker.stop, _STOP_SECONDS)
        await self._end_tasks()

    def _end(self) -> None:
        # Whoever waits for news of this stage should look for the next one, and not only at its next heartbeat.
        self.news.set()
        self._closing = True
        self._outbox.give_up()

    async def _end_tasks(self) -> None:
        await self._tasks.close()
        self._packing.close()

    def _check_kept(self, order: Deploy) -> None:
        """PeerError unless this is the stage that the order means, and it can go on."""
        own = self._order
        if (order.deployment, order.stage, order.stages) != (own.deployment, own.stage, own.stages):
            raise PeerError(f"stage {order.stage} of {order.deployment} is to be kept, which is not here")
        if order.graph.sha256 and order.graph.sha256 != own.graph.sha256:
            raise PeerError(f"stage {order.stage} is to be kept with another graph than it has")
        kind, text, _ = self.failure.result() if self.failure.done() else ("link", "", -1)
        if self._worker.broken or kind not in ("link", "neighbour", "not_finite"):
            raise PeerError(
                f"stage {order.stage} has failed and cannot be kept: {text or 'nobody knows what is in it'}"
            )

    def _keep(self, replica: int, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        if self._rings is not None:
            self._rings.complete(self.on_keep, replica, tensors, metadata)
        else:
            self.on_keep(replica, tensors, metadata)

    async def _save_with(self, rings: Rings, checkpoint: int, anchored: bool) -> None:
        self._worker.save(checkpoint, await rings.saved(anchored))

    async def _read(self, end: StageLink, kind: FrameKind, take: Callable[[Message], None]) -> None:
        link, check = end.link, partial(self._check, kind=kind)
        while (frame := await link.receive()) is not None:
            arrived = time.perf_counter()
            try:
                self._outbox.came(frame)
                take(message_of(await self._packing.unpack(frame, end.codec, check)))
                self._spans.received(frame, arrived)
            except PeerError as error:
                self._accuse(end, error)
                return
        # The coordinator knows whether the neighbour was right to go.
        raise PeerError(f"{link.peer} ended the link")

    def _accuse(self, end: StageLink, error: PeerError) -> None:
        """A neighbour broke the rules: it is told why, nothing more of it is taken, and the coordinator hears who."""
        refused = RefusedError(f"{end.link.peer} broke the protocol: {error}")
        if not self.failure.done():
            self.accused = end.node_id
        self._fail("neighbour", str(refused))
        end.link.fail(refused)

    def _link_state(self, end: StageLink) -> LinkState:
        state = end.state()
        if end.is_next:
            state.delay_seconds = self._outbox.delay.low_seconds
            state.usual_delay_seconds = self._outbox.delay.median_seconds
        return state

    async def _send(self, queue: asyncio.Queue[Outgoing], end: StageLink) -> None:
        while True:
            outgoing = await queue.get()
            packed = await self._packing.pack(outgoing, end.codec)
            end.saved_bytes += packed.saved_bytes
            await end.link.send_encoded(packed.data)
            self._spans.handed_over(end.link, outgoing.frame)

    async def _answer(self, feed: ResumableLink) -> None:
        while True:
            await feed.send((await self._outbox.to_coordinator.get()).frame)

    async def _speak(self, say: Callable[[ProviderMessage], Awaitable[None]]) -> None:
        while True:
            await say(await self._outbox.messages.get())

    def _check(self, frame: Frame, kind: FrameKind) -> None:
        """PeerError unless the frame is one this stage may get now."""
        check_frame(frame, kind, self.generation, self._expected[kind])

    def _fail(self, kind: str, text: str) -> None:
        if not self._closing and not self.failure.done():
            self.failure.set_result((kind, text, -1))

    @property
    def _bytes(self) -> tuple[int, int]:
        """Sent and received over all links that the stage has had."""
        sent = sum(end.link.bytes_sent for end in self._links)
        received = sum(end.link.bytes_received for end in self._links)
        return self._past_bytes[0] + sent, self._past_bytes[1] + received

    @property
    def _ends(self) -> list[StageLink]:
        """Of all links that others may dial."""
        return [*self._links, *(self._ring_lines.ends if self._ring_lines is not None else ())]


def staleness_counts(counts: Mapping[int, int]) -> list[int]:
    """How many updates had each staleness, from 0 on; those beyond what is told are counted with the last."""
    most = min(max(counts, default=-1), MAX_STALENESS_TOLD)
    told = [0] * (most + 1)
    for staleness, updates in counts.items():
        told[min(staleness, most)] += updates
    return told


def _told(activity: EngineActivity) -> Activity:
    missing = [Missing(what=m.what, microbatch=m.microbatch, count=m.count) for m in activity.missing]
    return Activity(kind=activity.kind, microbatch=activity.microbatch, seconds=activity.seconds, missing=missing)


class _GraphText:
    """The text of a graph, as it comes."""

    def __init__(self, size_bytes: int) -> None:
        if size_bytes > _MAX_GRAPH_BYTES:
            raise GraphError(f"the stage's graph has {size_bytes} bytes, more than {_MAX_GRAPH_BYTES}")
        self.parts: list[bytes] = []

    def feed(self, chunk: bytes) -> None:
        self.parts.append(chunk)


def _links(order: Deploy, node: NodeIdentity, client: CoordinatorClient) -> list[StageLink]:
    ends = ((order.previous, False), (order.next, True))
    return [StageLink(neighbour, is_next, node, client) for neighbour, is_next in ends if neighbour.node]


def _keep_nothing(replica: int, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    pass

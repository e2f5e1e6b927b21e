"""Hosted stage: one stage of a model on this provider, from its deployment until the provider gives it up.

The hosted stage has what lasts as long as the stage: the weights, the rings, the counters and the records for the next
report. Everything that depends on the neighbours is in its `generation`, which `renew` replaces when the cluster is
rebuilt with other providers for some of its stages.
"""

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial

import torch

from ravnest.engine.inbox.applied import Applied
from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage
from ravnest.engine.telemetry.counters import Counters
from ravnest.engine.telemetry.training_time import TrainingTime, warm_up_for
from ravnest.errors import PeerError
from ravnest.net.direct_line import DirectLine
from ravnest.net.frames.frames import Frame
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.streams.frame_stream import Link
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.net.v1.control_pb2 import (
    CoordinatorMessage,
    Deploy,
    HeldStage,
    LossRecord,
    Neighbour,
    ProviderMessage,
    Ready,
    Report,
    RingProgress,
    Save,
    Strained,
    UpdateRecord,
)
from ravnest.provider.links.stage_link import StageLink, link_of
from ravnest.provider.machine.memory import page_faults, peak_bytes
from ravnest.provider.replicas.format import Keep
from ravnest.provider.rings.lines import RingLines
from ravnest.provider.rings.rings import Rings
from ravnest.provider.stage.checkpoint_upload import copied
from ravnest.provider.stage.failure import StageFailure
from ravnest.provider.stage.generation import CLOSE_SECONDS, Generation
from ravnest.provider.stage.host import Host
from ravnest.provider.stage.outbox import StageHooks, keep_nothing
from ravnest.provider.stage.records import StageRecords
from ravnest.provider.stage.report import worker_report

_KEEPABLE = frozenset({"link", "neighbour", "not_finite"})
"""Kinds of failure after which the weights of a stage are still what its updates made of them."""


@dataclass(frozen=True)
class RingMembership:
    """A stage's part in averaging: its rings, and the lines to the other owners."""

    rings: Rings
    lines: RingLines


class HostedStage:
    """A stage that this provider hosts. The provider's agent drives it on the network's loop; `close` ends it."""

    def __init__(
        self,
        order: Deploy,
        stage: Stage,
        host: Host,
        client: CoordinatorClient,
        records: StageRecords,
        membership: RingMembership | None = None,
        applied: Applied | None = None,
    ) -> None:
        """`applied`: the microbatches that the weights contain already."""
        self.name = order.deployment
        self.stage = stage
        self.on_keep: Keep = keep_nothing
        """Takes the stage's part of a replica. Called on any thread; the tensors may change once it has returned."""
        self._order = order
        self._host = host
        self._records = records
        self._membership = membership
        self._applied = Applied() if applied is None else applied
        self._counters = Counters(training=TrainingTime(warm_up_for(stage.settings.in_flight)))
        self._started = time.perf_counter()
        self._past_bytes_sent = 0
        self._past_bytes_received = 0
        self._past_overruns = 0
        hooks = StageHooks(on_keep=self._keep)
        if membership is not None:
            rings = membership.rings
            rings.on_failure = self._on_rings_failure
            hooks = StageHooks(self._keep, rings.snapshot, rings.remembered)
        self._hooks = hooks
        self.generation = self._next_generation(order, client)

    async def renew(self, order: Deploy, client: CoordinatorClient) -> None:
        """Start the next generation, with the neighbours of this order. The microbatches in flight are forgotten.

        PeerError if the order names another stage, or if this one has failed; the current generation then goes on.
        """
        self._check_keepable(order)
        before = self.generation
        # The reporter wakes up and looks for the next generation before its next heartbeat is due.
        self._records.news.set()
        await before.abandon()
        if before.worker.runs:
            raise PeerError(f"stage {order.stage} cannot be kept: its worker does not finish its current task")
        # Again, because the worker's last task may have failed.
        self._check_keepable(order)
        self.stage.forget()
        self._past_bytes_sent += before.bytes_sent
        self._past_bytes_received += before.bytes_received
        self._past_overruns += before.worker.overruns
        limit = StageSettings.from_json(order.settings_json).in_flight if order.settings_json else before.worker.limit
        self.generation = self._next_generation(order, client)
        if limit is not None:
            self.generation.worker.set_limit(limit)
        if self._membership is not None:
            self._membership.rings.open(self.generation.worker, self._membership.lines)
        # Averaging rounds may have left work for the stage when its worker had ended.
        for work in before.worker.take_pending_calls():
            self.generation.worker.call_between_tasks(work)
        self._records.news.set()

    @property
    def held(self) -> HeldStage:
        """The stage, as the provider reports it to a coordinator that has been restarted."""
        own = self._order
        return HeldStage(deployment=own.deployment, stage=own.stage, stages=own.stages)

    @property
    def neighbours(self) -> set[str]:
        """The nodes that may dial in."""
        return {end.node_id for end in self._ends}

    @property
    def samples(self) -> int:
        """The number of samples that this stage has trained on."""
        return self._counters.samples

    @property
    def overruns(self) -> int:
        """The number of forwards and backwards that took longer than this machine pretends."""
        return self._past_overruns + self.generation.worker.overruns

    async def wait_for_news(self) -> None:
        """Wait until there is something new to report."""
        await self._records.news.wait()

    def ready(self) -> Ready:
        """The message that the stage is ready. Before `open`."""
        return Ready(
            deployment=self.name,
            generation=self.generation.number,
            version=self.stage.version,
            applied=self._applied.numbers(),
            rings=() if self._membership is None else self._membership.rings.standings(),
        )

    def open(self, feed: ResumableLink, say: Callable[[ProviderMessage], Awaitable[None]]) -> None:
        """Start to work on whatever arrives; `say` sends a message to the coordinator."""
        if self._membership is not None:
            self._membership.rings.open(self.generation.worker, self._membership.lines)
        self.generation.open(feed, say)

    def connect(self) -> None:
        """Start to connect to the neighbouring stages, which exist by now."""
        self.generation.connect()

    async def accept(self, peer: str, connection: Link) -> None:
        """Use the connection of a neighbour, or of another owner of a ring, until it breaks."""
        await link_of(self._ends, connection.label, peer).accept(connection)

    def take_direct(self, line: DirectLine) -> None:
        """Take what another owner of a ring sends over a direct line, until it ends. On a thread of its own."""
        if self._membership is not None:
            self._membership.rings.receiver.take_all(line)

    def meet(self, name: str) -> None:
        """Go to the coordinator's relay, where the other end of this link waits."""
        for end in self._ends:
            if end.name == name:
                self.generation.meet(end)

    def meet_owners(self, peers: Iterable[Neighbour], client: CoordinatorClient) -> None:
        """Take these as the other owners of the stage's rings from now on."""
        if self._membership is not None:
            self._membership.lines.client = client
            self._membership.lines.change(peers)

    def take_feed(self, frame: Frame) -> None:
        """Take inputs or targets from the coordinator. PeerError for a frame that does not fit the stage."""
        self.generation.take_feed(frame)

    def set_limit(self, in_flight: int) -> None:
        """Limit the microbatches between forward and backward, where this stage is a root."""
        self.generation.worker.set_limit(in_flight)

    def set_threads(self, threads: int) -> None:
        """Compute with this many threads, after the worker's current task."""
        # torch keeps the number for each thread that has computed, so the thread that computes has to set it.
        self.generation.worker.call_between_tasks(partial(torch.set_num_threads, threads))

    def save(self, order: Save) -> None:
        """Upload the stage's state to a checkpoint; if `anchored`, with the parameters of the last averaging round."""
        self.generation.expect_save(order)
        if self._membership is None:
            self.generation.save(order.checkpoint)
        else:
            self.generation.save_with(order.checkpoint, partial(self._membership.rings.saved, order.anchored))

    def trace(self, microbatch: int) -> None:
        """Tell the coordinator what the stage knows of a microbatch whose loss or gradients are not finite."""
        self.generation.trace(self.name, microbatch)

    def average(self, message: CoordinatorMessage) -> None:
        """Do what the coordinator orders about averaging rounds; PeerError for a stage without rings."""
        if self._membership is None:
            raise PeerError("the coordinator ordered a round of a stage without rings")
        self._membership.rings.obey(message)

    def relieve_memory(self) -> Strained | None:
        """Take the next step against memory pressure, if one is due; the message that tells the coordinator of it."""
        return self.generation.relieve_memory(self.name)

    def report(self) -> tuple[Report, list[int]]:
        """The state of the stage, with losses and updates since the last report; and the checkpoints that were saved
        since then."""
        losses, updates, saved = self._records.take()
        generation = self.generation
        report = worker_report(self.name, generation.worker)
        report.seconds = time.perf_counter() - self._started
        report.peak_memory_bytes = peak_bytes(self.stage.device)
        report.page_faults = page_faults()
        report.baseline_memory_bytes = self._host.baseline_bytes
        report.bytes_sent = self._past_bytes_sent + generation.bytes_sent
        report.bytes_received = self._past_bytes_received + generation.bytes_received
        report.links.extend(generation.link_states())
        report.transfers.extend(self._host.transfers.told())
        report.losses.extend(LossRecord(**asdict(loss)) for loss in losses)
        report.records.extend(
            UpdateRecord(
                microbatch=u.microbatch,
                forward_version=u.forward_version,
                version=u.version,
                lookup_version=u.lookup_version,
                rows=u.rows,
            )
            for u in updates
        )
        report.spans.extend(self._records.spans.take(self._started))
        if self._membership is not None:
            report.rings.extend(
                RingProgress(round=round, ring=ring, attempt=attempt, pieces=pieces)
                for round, ring, attempt, pieces in self._membership.rings.progress()
            )
        return report, saved

    def on_coordinator_gone(self) -> None:
        """The coordinator is gone: the stage works on what it was fed, with its neighbours, and waits."""
        self.generation.on_coordinator_gone()

    async def close(self) -> None:
        """Give the stage up: end the worker, the rings and the links."""
        self._records.news.set()
        await self.generation.stop()
        if self._membership is not None:
            await self._membership.rings.close(CLOSE_SECONDS)
        await self.generation.close()

    def _next_generation(self, order: Deploy, client: CoordinatorClient) -> Generation:
        stage, host, records = self.stage, self._host, self._records
        return Generation(order, stage, host, client, records, self._hooks, self._applied, self._counters)

    def _check_keepable(self, order: Deploy) -> None:
        """PeerError unless the order means this stage, and the stage can go on."""
        own = self._order
        if (order.deployment, order.stage, order.stages) != (own.deployment, own.stage, own.stages):
            raise PeerError(f"stage {order.stage} of {order.deployment} is to be kept, which is not here")
        if order.graph.sha256 and order.graph.sha256 != own.graph.sha256:
            raise PeerError(f"stage {order.stage} is to be kept with another graph than it has")
        failure = self.generation.failure
        failed = failure.result() if failure.done() else StageFailure("link", "")
        if self.generation.worker.broken or failed.kind not in _KEEPABLE:
            why = failed.text or "the state of its weights is unknown"
            raise PeerError(f"stage {order.stage} has failed and cannot be kept: {why}")

    def _keep(self, replica: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        if self._membership is not None:
            # The thread of the rings adds their state later, and the stage goes on meanwhile.
            self._membership.rings.complete(self.on_keep, replica, copied(tensors), dict(metadata))
        else:
            self.on_keep(replica, tensors, metadata)

    def _on_rings_failure(self, text: str) -> None:
        self.generation.fail("error", text)

    @property
    def _ends(self) -> list[StageLink]:
        """The links that other nodes may dial."""
        return [*self.generation.links, *(self._membership.lines.ends if self._membership is not None else ())]

"""A pipeline of real stages in one process: workers with their threads, fed as the coordinator feeds a cluster, with
frames of bytes between them that are checked as a provider checks them. Only the sockets are left out.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Any, Final

import torch

from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.engine.messages import LossRecord, Message, Snapshot
from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage, Update
from ravnest.engine.telemetry.spans import Span
from ravnest.engine.worker import StageWorker
from ravnest.graph.cutting.partition import split
from ravnest.graph.portable import PortableGraph, ValueSpec
from ravnest.graph.portable_reader import read_graph
from ravnest.microbatch import Marks
from ravnest.net.frames.decoding import decode
from ravnest.net.frames.encoding import encode
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.provider.links.frame_check import check_frame
from ravnest.provider.stage.outbox import message_of
from ravnest.spec import OptimizerSpec
from tests.builders import cluster_plan, stage_plan

PATIENCE_SECONDS: Final = 20.0
"""A microbatch that has not come back by then never will."""
_RATE: Final = 1.0

Batch = Mapping[str, torch.Tensor]


class HangError(AssertionError):
    """Every stage waits, and a microbatch has not been completed."""


@dataclass(frozen=True)
class Outcome:
    """Results of training and evaluation, by key or name: numbers that a cut must not change."""

    losses: tuple[float, ...]
    scores: tuple[Mapping[str, float], ...]
    """Loss and metrics of the evaluations."""
    state: Mapping[str, torch.Tensor]
    """Parameters after plain steps of their gradients, and the model's own states."""


def outcome(
    graph: PortableGraph,
    weights: Mapping[str, torch.Tensor],
    batches: Sequence[Batch],
    places: Sequence[int] = (),
    *,
    in_flight: int = 1,
    **settings: Any,
) -> Outcome:
    """Trains on each batch and evaluates on each, cut at `places`. HangError where a microbatch is never completed."""
    line = _Line(graph, weights, places, in_flight=in_flight, accumulate=in_flight, **settings)
    try:
        losses = line.train(batches)
        scores = line.evaluate(batches)
    finally:
        line.stop()
    return Outcome(losses, scores, line.state())


class _Line:
    def __init__(
        self, graph: PortableGraph, weights: Mapping[str, torch.Tensor], places: Sequence[int], **settings: Any
    ) -> None:
        # Graphs travel as JSON.
        graphs = [read_graph(part.to_json()) for part in split(graph, places)]
        self._events: Queue[tuple[str, Any]] = Queue()
        self._stages: list[Stage] = []
        self._workers: list[StageWorker] = []
        for number, part in enumerate(graphs):
            told = StageSettings(
                optimizer=OptimizerSpec("SGD", {"lr": _RATE}).to_json(), stage=number, stages=len(graphs), **settings
            )
            stage = Stage(part, {spec.key: weights[spec.key].clone() for spec in part.weights}, told)
            self._stages.append(stage)
            self._workers.append(StageWorker(stage, _Box(self, number), announced=True))
        nodes = [stage_plan(str(number), number, part) for number, part in enumerate(graphs)]
        self._fed = ClusterRun(cluster_plan(nodes, ahead=0)).inputs_of
        self._losses: dict[int, float] = {}
        self._lock = threading.Lock()
        for worker in self._workers:
            worker.start()

    def train(self, batches: Sequence[Batch]) -> tuple[float, ...]:
        """All at once: a root takes up no more than may be in flight."""
        for number, batch in enumerate(batches):
            self._feed(number, batch, train=True)
        for _ in batches:
            self._wait_for("done")
        return tuple(self._losses[number] for number in range(len(batches)))

    def evaluate(self, batches: Sequence[Batch]) -> tuple[Mapping[str, float], ...]:
        scores: dict[int, Mapping[str, float]] = {}
        for number, batch in enumerate(batches, start=1):
            self._feed(-number, batch, train=False)
            message = self._wait_for("evaluated")
            scores[number] = message.values
        return tuple(scores.values())

    def state(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for stage in self._stages:
            for name, tensor in stage.state_tensors().items():
                assert name not in found, f"{name} is in two stages"
                found[name] = tensor
        return found

    def stop(self) -> None:
        for worker in self._workers:
            worker.stop()

    def forward(self, number: int, message: Message) -> None:
        """From this stage to the next, or from the leaf to the root."""
        number = (number + 1) % len(self._stages)
        specs = {v.name: v for v in self._stages[number].graph.from_stages}
        self._workers[number].receive_forward(_travelled(FrameKind.FORWARD, message, specs))

    def backward(self, number: int, message: Message) -> None:
        """From this stage to the one before, or from the root to the leaf."""
        graph = self._stages[number - 1].graph
        specs = {v.name: v for v in (*graph.sends, *graph.lookups) if v.needs_grad}
        self._workers[number - 1].receive_backward(_travelled(FrameKind.BACKWARD, message, specs))

    def tell(self, what: str, thing: Any) -> None:
        self._events.put((what, thing))

    def trained(self, loss: LossRecord) -> None:
        self._losses[loss.microbatch] = loss.loss

    def _feed(self, number: int, batch: Batch, train: bool) -> None:
        for node, names in self._fed:
            stage = self._stages[int(node)]
            message = Message(number, {name: batch[name] for name in names}, marks=Marks(train=train, samples=1))
            self._workers[int(node)].feed(_travelled(FrameKind.FEED, message, {v.name: v for v in stage.graph.inputs}))

    def _wait_for(self, what: str) -> Message:
        try:
            found, thing = self._events.get(timeout=PATIENCE_SECONDS)
        except Empty:
            raise HangError(f"a microbatch has not been {what} within {PATIENCE_SECONDS:.0f} s") from None
        assert found == what, thing
        assert isinstance(thing, Message)
        return thing


class _Box:
    """The outbox of one stage: what it puts out is handed to its neighbours at once."""

    def __init__(self, line: _Line, number: int) -> None:
        self._line, self._number = line, number

    def forward(self, message: Message) -> None:
        self._line.forward(self._number, message)

    def backward(self, message: Message) -> None:
        self._line.backward(self._number, message)

    def trained(self, loss: LossRecord) -> None:
        self._line.trained(loss)

    def updated(self, update: Update) -> None:
        pass

    def worked(self, span: Span) -> None:
        pass

    def done(self, message: Message) -> None:
        self._line.tell("done", message)

    def evaluated(self, message: Message) -> None:
        self._line.tell("evaluated", message)

    def save(self, checkpoint: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        raise AssertionError("no checkpoint was asked for")

    def keep(self, replica: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        raise AssertionError("no replica was asked for")

    def snapshot(self, snapshot: Snapshot) -> None:
        raise AssertionError("no round was announced")

    def failed(self, kind: str, text: str, microbatch: int | None) -> None:
        self._line.tell("failed", f"stage {self._number} failed at microbatch {microbatch}: {text}")


def _travelled(kind: FrameKind, message: Message, specs: Mapping[str, ValueSpec]) -> Message:
    """The message as it comes out at the other end of a link."""
    tensors = {n: v for n, v in message.values.items() if isinstance(v, torch.Tensor)}
    scalars = {n: v for n, v in message.values.items() if not isinstance(v, torch.Tensor)}
    frame = Frame(
        kind,
        message.microbatch,
        message.marks,
        tensors=tensors,
        scalars=scalars,
    )
    arrived = decode(encode(frame))
    check_frame(arrived, kind, 0, specs)
    return message_of(arrived)

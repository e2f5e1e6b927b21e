"""Clusters in one process: real stages, workers and rings, and threads in place of the lines between owners.

Each line passes its pieces to the `take` of the receiving owner, in order, on a thread of its own, which blocks like a
real line. `hold` keeps all pieces back until `release`.
"""

import asyncio
import queue
import threading
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ravnest.averaging.settings import RingSettings
from ravnest.coordinator.run.orders import ring_order
from ravnest.engine.messages import LossRecord, Message, Snapshot
from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage, Update
from ravnest.engine.telemetry.spans import Span
from ravnest.engine.worker import StageWorker
from ravnest.errors import PeerError
from ravnest.graph.capture.capture import Captured, capture
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.microbatch import Marks
from ravnest.net.frames.frames import RingPlace
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Deploy, ProviderMessage
from ravnest.planner.plan import RingPlan
from ravnest.planner.rings.tensors import fragments, tensors_of
from ravnest.provider.rings.rings import Rings
from ravnest.spec import OptimizerSpec
from tests.e2e.jobs import CLASSES, FEATURES, batches
from tests.planner.rings.cut_rings import rings_cut_at

DEPLOYMENT, GENERATION, SECONDS = "d1", 4, 20.0


def run(test: Coroutine[Any, Any, None]) -> None:
    """Runs a test; a hang is a failure."""

    async def bounded() -> None:
        async with asyncio.timeout(SECONDS):
            await test

    asyncio.run(bounded())


@cache
def captured() -> Captured:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()),
        *(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
    )
    return capture(model, F.cross_entropy, {}, batches([8, 5]))


@cache
def places() -> tuple[int, ...]:
    """The places at which the model can be cut, with a parameter before, after and between all of them."""
    graph, found = captured().graph, list[int]()
    for place in layout(graph).cuts:
        if all(part.parameters for part in split(graph, [*found, place])):
            found.append(place)
    return tuple(found)


class Hub:
    """All lines between all owners."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, RingPlace, Tensor]] = []
        self.taken: list[Future[None]] = []
        """One future per piece that has been given to its receiver, done when the receiver has taken it."""
        self.owners: dict[str, Rings] = {}
        self._lock = threading.Condition()
        self._held: list[tuple[str, str, RingPlace, Tensor]] | None = None
        self._threads: dict[tuple[str, str], ThreadPoolExecutor] = defaultdict(lambda: ThreadPoolExecutor(1))

    def hold(self) -> None:
        with self._lock:
            self._held = []

    def release(self) -> None:
        with self._lock:
            held, self._held = self._held or [], None
            for piece in held:
                self._deliver(*piece)

    def put(self, sender: str, receiver: str, place: RingPlace, data: Tensor) -> None:
        piece = (sender, receiver, place, data.clone())
        with self._lock:
            self.sent.append(piece)
            self._lock.notify_all()
            if self._held is not None:
                self._held.append(piece)
            else:
                self._deliver(*piece)

    async def first_sent(self, *senders: str, round: int = 1, attempt: int = 1) -> None:
        """Wait until these owners have sent their own segment: one piece of the coded section and one of the plain."""

        def all_sent() -> bool:
            found = [s for s, _, p, _ in self.sent if (p.round, p.attempt, p.hop) == (round, attempt, 0)]
            return all(found.count(sender) == 2 for sender in senders)

        def wait() -> None:
            with self._lock:
                assert self._lock.wait_for(all_sent, SECONDS)

        await asyncio.to_thread(wait)

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()

    def _deliver(self, sender: str, receiver: str, place: RingPlace, data: Tensor) -> None:
        take = self.owners[receiver].receiver.take
        self.taken.append(self._threads[sender, receiver].submit(take, sender, GENERATION, place, data))


class HandLines:
    """The lines of an owner, in place of `RingLines`."""

    def __init__(self, name: str, hub: Hub) -> None:
        self._name, self._hub = name, hub

    def open(self) -> None:
        pass

    def connect(self, node_id: str) -> None:
        if node_id not in self._hub.owners:
            raise PeerError(f"{node_id} owns nothing of the rings of this stage")

    def put(self, node_id: str, place: RingPlace, data: Tensor) -> None:
        self._hub.put(self._name, node_id, place, data)

    def is_direct(self, node_id: str) -> bool:
        return True

    async def stop_dialling(self) -> None:
        pass

    async def close(self, timeout_seconds: float) -> None:
        pass


class Pipe:
    """The Outbox of a stage whose neighbours are in the same process."""

    def __init__(self) -> None:
        self.before: StageWorker | None = None
        self.after: StageWorker | None = None
        self.rings: Rings | None = None
        self.finished: queue.Queue[int] = queue.Queue()
        self.snapshots: dict[int, dict[str, Tensor]] = {}
        self.failures: list[str] = []

    def forward(self, message: Message) -> None:
        assert self.after is not None
        self.after.receive_forward(message)

    def backward(self, message: Message) -> None:
        assert self.before is not None
        self.before.receive_backward(message)

    def trained(self, loss: LossRecord) -> None:
        pass

    def updated(self, update: Update) -> None:
        pass

    def done(self, message: Message) -> None:
        self.finished.put(message.microbatch)

    def worked(self, span: Span) -> None:
        pass

    def evaluated(self, message: Message) -> None:
        pass

    def save(self, checkpoint: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        pass

    def keep(self, replica: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        pass

    def snapshot(self, snapshot: Snapshot) -> None:
        assert self.rings is not None
        self.snapshots[snapshot.round] = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
        self.rings.snapshot(snapshot)

    def failed(self, kind: str, text: str, microbatch: int | None) -> None:
        self.failures.append(text)


@dataclass
class Owner:
    name: str
    stage: Stage
    worker: StageWorker
    rings: Rings
    pipe: Pipe
    lines: HandLines
    said: "asyncio.Queue[ProviderMessage]" = field(default_factory=asyncio.Queue)

    def state(self) -> dict[str, Tensor]:
        """A copy of the stage's tensors; no microbatch may be in flight."""
        return {name: tensor.detach().clone() for name, tensor in self.stage.state_tensors().items()}

    def obey(self, **order: Any) -> None:
        self.rings.obey(CoordinatorMessage(**order))

    async def hears(self, kind: str) -> Any:
        """The next message of this owner, which must be of this kind."""
        message = await self.said.get()
        assert message.WhichOneof("body") == kind, message
        return getattr(message, kind)


class Cluster:
    """A pipeline of owners."""

    def __init__(self, owners: Sequence[Owner]) -> None:
        self.owners = owners
        self.samples = 0
        self._fed = 0

    def feed(self, count: int, *, seed: int, round: int = 0, fragment: int = 0) -> None:
        """Feed this many microbatches; the first carries the round."""
        for number, (inputs, targets) in enumerate(batches([8] * count, seed)):
            marked = {"round": round, "fragment": fragment} if number == 0 else {}
            for owner in self.owners:
                values = {"inputs": inputs, "targets": targets}
                names = [spec.name for spec in owner.stage.graph.inputs]
                if names:
                    given = {name: values[name] for name in names}
                    owner.worker.feed(Message(self._fed, given, marks=Marks(samples=len(targets), **marked)))
            self._fed += 1
            self.samples += len(targets)

    async def finished(self, count: int) -> None:
        for _ in range(count):
            await asyncio.to_thread(self.owners[0].pipe.finished.get, True, SECONDS)
        for owner in self.owners:
            # A stage sends its gradients on before it updates: a later one may be at that still.
            between = threading.Event()
            owner.worker.call_between_tasks(between.set)
            assert await asyncio.to_thread(between.wait, SECONDS)

    def state(self) -> dict[str, Tensor]:
        """The tensors of all its stages."""
        return {name: tensor for owner in self.owners for name, tensor in owner.state().items()}

    def snapshot(self, round: int) -> dict[str, Tensor]:
        return {name: t for owner in self.owners for name, t in owner.pipe.snapshots.get(round, {}).items()}


class JoinedRings:
    """Clusters that cut the model at these places. Make and close it in a running loop."""

    def __init__(
        self,
        cuts: Sequence[Sequence[int]],
        *,
        parts: int = 1,
        settings: RingSettings | None = None,
        optimizer: OptimizerSpec | None = None,
    ) -> None:
        self.hub = Hub()
        graph, weights = captured().graph, captured().weights
        rings = [(ring, tensors_of(graph, layout(graph), ring)) for ring in rings_cut_at(graph, cuts)]
        self.plans = tuple(
            RingPlan(number, part.fragment, part.ring.owners, part.tensors)
            for number, part in enumerate(fragments(rings, parts))
        )
        self.owners: dict[str, Owner] = {}
        self.clusters: list[Cluster] = []
        loop = asyncio.get_running_loop()
        optimizer = optimizer or OptimizerSpec("SGD", {"lr": 0.1})
        for c, where in enumerate(cuts):
            pipeline: list[Owner] = []
            graphs = split(graph, list(where))
            for s, part in enumerate(graphs):
                told = StageSettings(optimizer=optimizer.to_json(), stage=s, stages=len(graphs), in_flight=2)
                stage = Stage(part, {spec.key: weights[spec.key].clone() for spec in part.weights}, told)
                name, pipe = f"c{c}s{s}", Pipe()
                order = Deploy(
                    deployment=DEPLOYMENT,
                    generation=GENERATION,
                    rings=[ring_order(plan) for plan in self.plans if name in plan.owners],
                    averaging_json=(settings or RingSettings()).to_json(),
                )
                said: asyncio.Queue[ProviderMessage] = asyncio.Queue()
                made = Rings(order, stage, name, loop, said.put_nowait)
                made.on_failure = pipe.failures.append
                pipe.rings = made
                owner = Owner(name, stage, StageWorker(stage, pipe), made, pipe, HandLines(name, self.hub), said)
                if pipeline:
                    pipeline[-1].pipe.after, pipe.before = owner.worker, pipeline[-1].worker
                pipeline.append(owner)
                self.owners[name] = owner
                self.hub.owners[name] = made
            self.clusters.append(Cluster(pipeline))
        for owner in self.owners.values():
            lines: Any = owner.lines
            owner.rings.open(owner.worker, lines)
            owner.worker.start()

    async def __aenter__(self) -> "JoinedRings":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.hub.release()
        for owner in self.owners.values():
            await asyncio.to_thread(owner.worker.stop)
            await owner.rings.close(0.0)
        await asyncio.to_thread(self.hub.close)
        assert [owner.pipe.failures for owner in self.owners.values() if owner.pipe.failures] == []

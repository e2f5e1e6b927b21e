"""A swarm without machines: a real coordinator, and providers that are a few lines each, on one event loop.

A provider here does what a real one does as far as the coordinator can tell: it takes a stage, keeps it, passes
microbatches on to its neighbours, keeps parts of replicas and uploads checkpoints. Its weights are one number, of how
many microbatches are in them, which checkpoints and parts carry. In a single cluster every microbatch must find the
weights with all those before it and no other: what does not is a violation. How long everything takes is drawn from a
seed, so that a run can be repeated.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from ravnest.coordinator.access.swarm_store import SwarmState
from ravnest.coordinator.checkpoints.reader import CheckpointInfo
from ravnest.coordinator.coordinator import Coordinator
from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.feed.feeder import EpochEnd, EvalBatch, EvalEnd, TrainBatch
from ravnest.coordinator.feed.ledger import DataPosition, Ledger
from ravnest.coordinator.plan.prepared_job import PreparedJob
from ravnest.coordinator.report.progress import Progress
from ravnest.coordinator.run.checkpointer import Checkpointer
from ravnest.coordinator.run.data_walk import DataRewindError
from ravnest.coordinator.run.dispatcher import Dispatcher
from ravnest.coordinator.run.job_run import JobRun
from ravnest.coordinator.run.timeouts import Timeouts
from ravnest.coordinator.swarm.artifacts import Artifact
from ravnest.coordinator.swarm.members import Held as HeldBefore
from ravnest.coordinator.swarm.members import LentMachine, Member, Members
from ravnest.coordinator.swarm.own_line import OwnLine
from ravnest.coordinator.swarm.reachability import Reach
from ravnest.coordinator.swarm.swarm import Swarm, may_return
from ravnest.errors import PeerError, RefusedError
from ravnest.graph.portable import PortableGraph
from ravnest.graph.portable_reader import read_graph
from ravnest.graph.weights import WeightsReader, content_hash, stream_tensors
from ravnest.monitor.display import QuietDisplay
from ravnest.monitor.events import EventLog
from ravnest.monitor.metrics import MetricLog
from ravnest.monitor.run_directory import RunDirectory
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.pacing.budget import StateBudget
from ravnest.net.pacing.state_rate import StateKind
from ravnest.net.v1.control_pb2 import (
    CoordinatorMessage,
    Deploy,
    Failed,
    Forget,
    Give,
    ProviderMessage,
    Ready,
    Replicated,
    Report,
    RingJoined,
    RingStanding,
    RoundJoined,
    Saved,
    UploadPart,
)

Play = Callable[..., None]
"""Plays a scene, a coroutine that takes a Run, with a run of its own."""

PATIENCE_SECONDS = 20.0
"""Whatever takes longer hangs."""

TIMEOUTS = Timeouts(vanished_seconds=0.02, return_seconds=0.2, gather_seconds=0.2, replica_event_seconds=0.0)
"""Every replica is an event."""


class NoPartError(PeerError):
    """A stage cannot begin with the part that it should."""


class Machine(Member):
    """A member that is there for as long as its provider is."""

    here = True

    @property
    def present(self) -> bool:
        return self.here

    def fail(self, error: PeerError) -> None:
        self.here = False
        super().fail(error)


@dataclass
class State:
    """What is in a stage: so many microbatches, those before the deployment and these since."""

    base: int = 0
    applied: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.base + len(self.applied)

    def copy(self) -> "State":
        return State(self.base, list(self.applied))


@dataclass
class Held:
    """A stage that a provider has."""

    order: Deploy
    graph: PortableGraph
    state: State
    taken: set[int] = field(default_factory=set)
    summed: list[int] = field(default_factory=list)
    """Whose gradients wait for others to be applied with them."""
    fed: dict[int, Frame] = field(default_factory=dict)
    received: dict[int, Frame] = field(default_factory=dict)


class Provider:
    """One of the swarm. `kill` ends it as SIGKILL does; its disk stays."""

    def __init__(self, swarm: "SimulatedSwarm", node_id: str) -> None:
        self.swarm = swarm
        self.node_id = node_id
        self.uploading: set[str] = set()
        """The parts that it uploads, by the name of the upload."""
        self.parts: dict[tuple[str, int], State] = {}
        self.codings: list[str] = []
        """How it was told to code its parts, in order."""
        self.holder = ""
        self.held: Held | None = None
        self.arriving: dict[tuple[str, int], asyncio.Future[State]] = {}
        self.given: dict[tuple[str, int], State] = {}
        """What came before it was waited for."""
        self.member = Machine(node_id, "", LentMachine("cpu", 8 << 30, 1))
        self.member.reach = Reach("", "simulated")
        self.obeys: Callable[[CoordinatorMessage], bool] = lambda message: True
        """Whether it does what it is told."""
        self.standings: list[RingStanding] = []
        """What it says of its rings when it is asked to keep its stage."""
        self.passes: Callable[[Frame], bool] = lambda frame: True
        """Whether it takes what it is fed."""
        self._queue: asyncio.Queue[Callable[[], Any]] = asyncio.Queue()
        self._tasks = {asyncio.create_task(self._work()), asyncio.create_task(self._report())}

    @property
    def alive(self) -> bool:
        return self.member.here

    def do(self, work: Callable[[], Any]) -> None:
        """Does this once what came before is done."""
        if self.alive:
            self._queue.put_nowait(work)

    def say(self, **body: Any) -> None:
        events = self.swarm.events
        if self.alive and events is not None:
            events.said(self.node_id, ProviderMessage(**body))

    def kill(self) -> None:
        self.swarm.kill(self.node_id)

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _work(self) -> None:
        while True:
            work = await self._queue.get()
            await self.swarm.hop()
            try:
                result = work()
                if asyncio.iscoroutine(result):
                    await result
            except Exception as error:
                self.swarm.violations.append(f"{self.node_id}: {error!r}")

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            if self.held is not None:
                self.say(report=Report(deployment=self.held.order.deployment))

    def spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.swarm.violations.append(f"{self.node_id}: {task.exception()!r}")

    # What the coordinator says.

    async def obey(self, message: CoordinatorMessage) -> None:
        if not self.obeys(message):
            return
        kind = message.WhichOneof("body")
        if kind == "deploy":
            try:
                await self._deploy(message.deploy)
            except PeerError as error:
                order, kind = message.deploy, "no_part" if isinstance(error, NoPartError) else "deploy"
                failed = Failed(deployment=order.deployment, kind=kind, message=str(error), microbatch=-1)
                failed.generation = order.generation
                self.say(failed=failed)
        elif kind == "replicate":
            self.holder = message.replicate.holder.node
            self.codings.append(message.replicate.coding)
        elif kind == "forget":
            self._forget(message.forget)
        elif kind == "give":
            self._give(message.give)
        elif kind == "upload_part":
            self.spawn(self._upload_part(message.upload_part))
        elif kind == "save":
            self.spawn(self._save(message.save.checkpoint))
        elif kind == "average":
            self._join_round(message.average.round)
        elif kind == "stop":
            self.swarm.kill(self.node_id)

    def _join_round(self, number: int) -> None:
        """It has nothing to average."""
        if self.held is not None:
            rings = [RingJoined(ring=ring.ring, refusal="simulated") for ring in self.held.order.rings]
            joined = RoundJoined(deployment=self.held.order.deployment, round=number, rings=rings)
            self.say(round_joined=joined)

    async def _deploy(self, order: Deploy) -> None:
        if order.keep:
            held = self.held
            if held is None or (held.order.deployment, held.order.stage) != (order.deployment, order.stage):
                raise PeerError("a stage is to be kept that is not here")
            self.held = Held(order, held.graph, held.state)
        else:
            self.held = None
            self.held = Held(order, self.swarm.graph(order), await self._begin_with(order))
        applied = self.held.state.applied[-4096:]
        ready = Ready(deployment=order.deployment, generation=order.generation, applied=applied, rings=self.standings)
        self.say(ready=ready)
        self.say(report=Report(deployment=order.deployment))

    async def _begin_with(self, order: Deploy) -> State:
        if order.donors:
            counts = set()
            for each in order.donors:
                state = await self._part((each.key, each.replica), each.giver.node)
                # A coordinator that was restarted may not know the hash.
                if each.sha256 not in ("", _sha256(self.swarm.kept[each.key], state)):
                    raise NoPartError("it is not the part that its owner kept")
                counts.add(state.count)
            assert len(counts) == 1, "all parts of a replica are of one moment"
            return State(counts.pop())
        if not order.part_key:
            return State(self.swarm.count_in(order))
        key = order.part_key, order.part_replica
        state = self._as_kept(order, await self._part(key, order.giver.node))
        self.parts[key] = state.copy()
        return state

    async def _part(self, key: tuple[str, int], giver: str) -> State:
        if not giver:
            if key not in self.parts:
                raise NoPartError(f"there is no part {key} here")
            return self.parts[key].copy()
        if key in self.given:
            return self.given.pop(key)
        self.arriving[key] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(0.3 if self.swarm.providers[giver].alive else 0.0):
                return await self.arriving[key]
        except TimeoutError:
            raise NoPartError("it did not come") from None

    def _as_kept(self, order: Deploy, state: State) -> State:
        if order.part_sha256 != _sha256(self.swarm.graph(order), state):
            raise NoPartError("it is not the part that its owner kept")
        return state

    def _give(self, order: Give) -> None:
        key, to = (order.key, order.replica), self.swarm.providers[order.to.node]
        future = to.arriving.get(key)
        if key in self.parts and to.alive:
            if future is not None and not future.done():
                future.set_result(self.parts[key].copy())
            else:
                to.given[key] = self.parts[key].copy()

    def _forget(self, order: Forget) -> None:
        for key, replica in list(self.parts):
            keep = order.of or order.keep
            if replica in order.pinned:
                continue
            if (key in order.of or not order.of) and (key not in keep or replica < order.before):
                del self.parts[key, replica]

    async def _upload_part(self, order: UploadPart) -> None:
        state = self.parts.get((order.key, order.replica))
        if state is None:
            failed = Failed(
                deployment=order.key, kind="part", message="there is none here", microbatch=-1, replica=order.replica
            )
            self.say(failed=failed)
            return
        if order.name in self.uploading:
            return
        self.uploading.add(order.name)
        try:
            await self._upload(order.name, state)
        finally:
            self.uploading.discard(order.name)

    async def _save(self, checkpoint: int) -> None:
        if self.held is not None:
            await self._upload(f"checkpoint-{checkpoint}", self.held.state.copy())
            self.say(saved=Saved(deployment=self.held.order.deployment, checkpoint=checkpoint))

    async def _upload(self, name: str, state: State) -> None:
        stage = int(name.rpartition("-")[2]) if name.startswith("part-") else None
        graph = self.swarm.graph_of(stage) if stage is not None and self.held is None else None
        if graph is None:
            assert self.held is not None
            graph = self.held.graph if stage in (None, self.held.order.stage) else self.swarm.graph_of(stage or 0)
        data = b"".join(bytes(chunk) for chunk in stream_tensors(*_tensors(graph, state)))
        await self.swarm.hop()
        events = self.swarm.events
        if self.alive and events is not None:
            with contextlib.suppress(RefusedError):
                await events.uploaded(self.node_id, name, _chunks(data))

    # Microbatches.

    def feed(self, frame: Frame) -> None:
        held = self.held
        if held is None or frame.generation < held.order.generation or not self.passes(frame):
            return
        self._take(held, frame, held.fed)

    def forward(self, frame: Frame) -> None:
        held = self.held
        if held is not None and frame.generation == held.order.generation:
            self._take(held, frame, held.received)

    def _take(self, held: Held, frame: Frame, where: dict[int, Frame]) -> None:
        number = frame.microbatch
        if number in where or number in held.taken:
            self.swarm.violations.append(f"{self.node_id} got microbatch {number} again")
            return
        where[number] = frame
        needs = [held.fed]
        needs += [held.received] if held.order.stage else []
        if any(number not in each for each in needs):
            return
        for each in needs:
            each.pop(number)
        held.taken.add(number)
        if held.order.stage + 1 < held.order.stages:
            self._to(held.order.next.node, "forward", frame)
        elif frame.marks.train:
            self.backward(frame)
        else:
            self.swarm.evaluated.append((number, held.state.count))
            self._return(FrameKind.RESULT, frame, {"loss": 0.0})

    def backward(self, frame: Frame) -> None:
        held = self.held
        if held is None or frame.generation != held.order.generation:
            return
        if held.order.stage:
            self._to(held.order.previous.node, "backward", frame)
        if frame.microbatch not in held.state.applied:
            self._apply(held, frame)
        if not held.order.stage:
            self._return(FrameKind.DONE, frame, {})

    def _apply(self, held: Held, frame: Frame) -> None:
        held.summed.append(frame.microbatch)
        if len(held.summed) == json.loads(held.order.settings_json)["accumulate"] or frame.marks.flush:
            for microbatch in held.summed:
                self._add(held.state, microbatch)
            held.summed.clear()
        if frame.marks.round:
            self._join_round(frame.marks.round)
        if frame.marks.replica:
            self.spawn(self._replicate(held, frame.marks.replica, held.state.copy()))
        if frame.marks.checkpoint:
            self.spawn(self._save_as(held, frame.marks.checkpoint, held.state.copy()))

    def _add(self, state: State, microbatch: int) -> None:
        if self.swarm.in_order and state.count != microbatch:
            has = f"weights with {state.count} microbatches"
            self.swarm.violations.append(f"{self.node_id} applied microbatch {microbatch} to {has}")
        state.applied.append(microbatch)

    async def _save_as(self, held: Held, checkpoint: int, state: State) -> None:
        await self._upload(f"checkpoint-{checkpoint}", state)
        self.say(saved=Saved(deployment=held.order.deployment, checkpoint=checkpoint))

    async def _replicate(self, held: Held, replica: int, state: State) -> None:
        key, sha256 = held.order.key, _sha256(held.graph, state)
        self.swarm.kept[key] = held.graph
        self.parts[key, replica] = state
        await self.swarm.hop()
        holder = self.swarm.providers.get(self.holder)
        if holder is not None and holder.alive:
            holder.parts[key, replica] = state.copy()
        name = self.holder if holder is not None and holder.alive else ""
        error = "the holder is gone" if self.holder and not name else ""
        said = Replicated(key=key, replica=replica, holder=name, size_bytes=100, error=error, sha256=sha256)
        self.say(replicated=said)

    def _to(self, node_id: str, what: str, frame: Frame) -> None:
        other = self.swarm.providers[node_id]
        if other.alive:
            other.do(partial(getattr(other, what), frame))

    def _return(self, kind: FrameKind, frame: Frame, scalars: Mapping[str, float]) -> None:
        back = Frame(kind=kind, microbatch=frame.microbatch, generation=frame.generation, scalars=scalars)
        self.swarm.returned(self.node_id, back)


class SimulatedSwarm:
    """As much of a Swarm as a run needs."""

    def __init__(self, seed: int = 0) -> None:
        self.members = Members()
        self.events: Coordinator | None = None
        self.state: SwarmState | None = None
        self.most: int | None = None
        self.host = ""
        self.generation = 0
        self.artifacts: dict[str, Artifact] = {}
        self.line = OwnLine(StateBudget.unlimited())
        self.waits_for_all = True
        self.providers: dict[str, Provider] = {}
        self.orders: dict[str, Deploy] = {}
        self.links: Mapping[str, Collection[str]] = {}
        self.violations: list[str] = []
        self.evaluated: list[tuple[int, int]] = []
        """Which evaluation batch the leaf had, and how many microbatches were in its weights."""
        self.in_order = True
        self.on_feed: Callable[[], Any] = lambda: None
        """Called whenever a stage is fed something."""
        self.on_tell: Callable[[str, str], Any] = lambda node_id, kind: None
        """Called with everything that is said to a provider, before it hears it."""
        self.kept: dict[str, PortableGraph] = {}
        """By the key of a stage of which parts are kept."""
        self._graphs: dict[int, PortableGraph] = {}
        self._random = random.Random(seed)
        self._numbers = 0

    async def hop(self) -> None:
        """As long as a message takes."""
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(0)

    def join(self, node_id: str, parts: Mapping[tuple[str, int], State] | None = None) -> Provider:
        """A provider comes, or comes back with what it has on its disk."""
        provider = self.providers[node_id] = Provider(self, node_id)
        provider.parts = dict(parts or {})
        provider.member.parts = dict.fromkeys(provider.parts, "")
        self.members.put(provider.member)
        self.orders.pop(node_id, None)
        if self.events is not None:
            self.events.joined(provider.member)
        self.members.changes.notify()
        return provider

    def begin_again(self) -> None:
        """Another coordinator is here. Whoever is alive joins it with what it holds and has on its disk."""
        self.events, self.generation, self.artifacts, self.orders = None, 0, {}, {}
        self.members = Members()
        for provider in self.providers.values():
            if not provider.alive:
                continue
            provider.member = Machine(
                provider.node_id, "", LentMachine("cpu", 8 << 30, 1), parts=dict.fromkeys(provider.parts, "")
            )
            provider.member.reach = Reach("", "simulated")
            if provider.held is not None:
                order = provider.held.order
                provider.member.held = HeldBefore(order.deployment, order.stage, order.stages)
            self.members.put(provider.member)

    def kill(self, node_id: str, reason: str = "it was killed") -> None:
        provider = self.providers[node_id]
        if provider.alive:
            provider.member.fail(PeerError(reason))
            self._gone(provider, reason)

    def dismiss(self, node_id: str, error: RefusedError) -> None:
        provider = self.providers.get(node_id)
        if provider is not None and provider.alive:
            provider.member.fail(error)
            self._gone(provider, str(error))

    def _gone(self, provider: Provider, reason: str) -> None:
        provider.end()
        if self.events is not None:
            self.events.vanished(provider.node_id, reason)
        self.members.changes.notify()

    def end(self) -> None:
        for provider in self.providers.values():
            provider.end()

    def graph(self, order: Deploy) -> PortableGraph:
        text = b"".join(self.artifacts[order.graph.id].open(0))
        graph = self._graphs[order.stage] = read_graph(text)
        return graph

    def graph_of(self, stage: int) -> PortableGraph:
        return self._graphs[stage]

    def count_in(self, order: Deploy) -> int:
        """How many microbatches are in the weights that an order names."""
        artifact = self.artifacts[order.weights.id]
        reader = WeightsReader(artifact.size_bytes)
        for chunk in artifact.open(0):
            reader.feed(chunk)
        tensors, metadata = reader.finish()
        if "version" not in metadata:
            return 0
        counts = {int(tensors[f"weight:{spec.key}"].flatten()[0]) for spec in self.graph(order).parameters}
        assert len(counts) == 1, "all parameters of a stage are of one moment"
        return counts.pop()

    # What a coordinator wants of a swarm.

    async def tell(self, node_id: str, message: CoordinatorMessage) -> None:
        self.on_tell(node_id, str(message.WhichOneof("body")))
        if not self.members[node_id].present:
            raise PeerError(f"{node_id} is gone")
        if message.HasField("deploy"):
            self.orders[node_id] = message.deploy
        provider = self.providers[node_id]
        provider.do(partial(provider.obey, message))
        await self.hop()

    async def feed_frame(self, node_id: str, frame: Frame) -> None:
        if not self.members[node_id].present:
            raise PeerError(f"{node_id} is gone")
        provider = self.providers[node_id]
        provider.do(partial(provider.feed, frame))
        self.on_feed()
        await self.hop()

    def returned(self, node_id: str, frame: Frame) -> None:
        order = self.orders.get(node_id)
        if self.events is None or order is None or frame.generation < order.generation:
            return
        allowed, reason = may_return(node_id, order, frame)
        assert allowed, reason
        try:
            self.events.returned(node_id, frame)
        except RefusedError as error:
            self.violations.append(str(error))
            self.dismiss(node_id, error)

    async def reaches(self, members: Sequence[Member]) -> dict[str, Reach]:
        await self.hop()
        return {member.node_id: Reach("", "simulated") for member in members}

    @property
    def open_to_more(self) -> bool:
        return self.most is None

    def allow_relays(self, links: Mapping[str, frozenset[str]], state: Mapping[str, StateKind] | None = None) -> None:
        self.links = links

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers


class Run:
    """A run of a simulated swarm, and the requester that feeds it."""

    def __init__(self, prepared: PreparedJob, folder: Path, seed: int = 0, timeouts: Timeouts = TIMEOUTS) -> None:
        self.prepared = prepared
        self.saved: CheckpointInfo | None = None
        """The last checkpoint of a run that has finished."""
        self._timeouts = timeouts
        self.swarm = SimulatedSwarm(seed)
        directory = RunDirectory.open(folder, job_name="simulated", resume=False)
        self.emitted: list[dict[str, Any]] = []
        self.on_event: dict[str, Callable[[str], None]] = {}
        """By kind, what happens at the next event of that kind; it gets the reason."""
        log = EventLog(directory.events_path)
        emit = log.emit

        def noted(kind: str, reason: str, /, **values: Any) -> None:
            self.emitted.append({"kind": kind, "reason": reason, **values})
            if react := self.on_event.pop(kind, None):
                asyncio.get_running_loop().call_soon(react, reason)
            emit(kind, reason, **values)

        log.emit = noted  # type: ignore[method-assign]
        metrics = MetricLog(directory.metrics_path)
        self.place = DataPosition()
        self._opened = (metrics, log, directory)
        self._begin()
        self.at: dict[int, Callable[[], None]] = {}
        """What happens once so many microbatches have been fed."""

    def _begin(self) -> None:
        metrics, log, directory = self._opened
        self.ledger = Ledger()
        self.progress = Progress("simulated", 1, self.ledger)
        self.coordinator = Coordinator(
            cast(Swarm, self.swarm), directory, log, metrics, self.progress, QuietDisplay(), self._timeouts
        )

    def remember(self) -> None:
        """From now on the coordinator leaves behind what the next one wants to know."""
        self.swarm.state = SwarmState(self._opened[2].path / "store.sqlite")

    def note(self) -> None:
        """Notes how the run stands, as is done every few seconds."""
        self.deployment.note()

    async def begin_again(self, providers: int, clusters: int = 1) -> None:
        """The coordinator is killed and started again, without a checkpoint; its providers stay as they are."""
        await self.coordinator.close()
        await self.begin_again_with_those(providers, clusters)

    async def begin_again_with_those(self, providers: int | None, clusters: int = 1) -> None:
        """A coordinator is started, after the end of the one before, for the providers that are alive."""
        self.swarm.begin_again()
        self._begin()
        await self.coordinator.start()
        await self.deploy(providers, clusters)
        self.place = self.ledger.applied

    async def __aenter__(self) -> "Run":
        await self.coordinator.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.coordinator.close()
        self.swarm.end()
        if self.swarm.state is not None:
            self.swarm.state.close()
        self._opened[0].close(1.0)
        self._opened[1].close()
        self._opened[2].close()

    @property
    def deployment(self) -> Deployment:
        """The current deployment."""
        assert self.coordinator.deployment is not None
        return self.coordinator.deployment

    @property
    def dispatcher(self) -> Dispatcher:
        return self._job_run.dispatcher

    @property
    def checkpointer(self) -> Checkpointer:
        return self._job_run.checkpointer

    @property
    def _job_run(self) -> JobRun:
        assert self.coordinator.job_run is not None
        return self.coordinator.job_run

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.emitted]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of this kind, in order."""
        return [event for event in self.emitted if event["kind"] == kind]

    def stages(self) -> list[str]:
        """Who holds the stages, in order."""
        return list(self.deployment.stage_of)

    async def deploy(self, providers: int | None, clusters: int | None = 1) -> None:
        await within(self.coordinator.deploy(self.prepared, providers, clusters, 1, 2))

    async def event(self, kind: str) -> None:
        """Returns when there has been such an event."""
        await self.until(lambda: kind in self.kinds())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds; raises what made training impossible meanwhile."""

        async def look() -> None:
            while not condition():
                await self.coordinator.check()
                await asyncio.sleep(0.01)

        await within(look())

    async def replicas(self, clusters: int = 1) -> None:
        """Returns when these clusters of the current deployment have a complete replica."""
        of = self.deployment
        await self.until(lambda: all(of.replicas.newest(each) is not None for each in of.clusters.all[:clusters]))

    async def feed(self, total: int) -> None:
        """Feeds microbatches until there have been so many."""
        await within(self._feed(total))

    async def train(self, total: int, evaluate: int = 0) -> None:
        """Feeds so many microbatches, then evaluates on a few, and finishes; goes back where the run does."""
        await within(self._train(total, evaluate))

    async def _feed(self, total: int) -> None:
        while self.place.microbatches < total:
            if work := self.at.pop(self.place.microbatches, None):
                work()
            item = self._item(self.place)
            try:
                await self.coordinator.take(item)
                self.place = item.after
            except DataRewindError as back:
                self.place = back.place

    async def _train(self, total: int, evaluate: int) -> None:
        while True:
            await self._feed(total)
            try:
                await self.coordinator.take(EpochEnd(self.place, total, None))
                for number in range(evaluate):
                    await self.coordinator.take(EvalBatch(-1 - number, self._tensors, 8))
                if evaluate:
                    await self.coordinator.take(EvalEnd())
                if work := self.at.pop(-1, None):
                    work()
                self.saved = await self.coordinator.finish()
                return
            except DataRewindError as back:
                self.place = back.place

    @property
    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return self.prepared.captured.sample

    def _item(self, place: DataPosition) -> TrainBatch:
        number, accumulate = place.microbatches + 1, self.prepared.job.pipeline.accumulate
        updates, left = divmod(number, accumulate)
        after = DataPosition(position=number, microbatches=number, updates=updates, samples=8 * number)
        return TrainBatch(place.microbatches, self._tensors, 8, after, left == 0)

    def check(self, total: int) -> None:
        """Nothing was lost, and nothing done twice or out of order."""
        assert self.swarm.violations == [], self.swarm.violations[:5]
        counts = self.ledger.counts()
        assert (counts["fed"], counts["completed"], counts["lost"], counts["applied_twice"]) == (total, total, 0, 0)
        if self.swarm.in_order:
            held = [self.swarm.providers[node].held for node in self.stages()]
            assert [each.state.count if each is not None else None for each in held] == [total] * len(held)


async def within(work: Any, seconds: float = PATIENCE_SECONDS) -> Any:
    async with asyncio.timeout(seconds):
        return await work


def _tensors(graph: PortableGraph, state: State) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    tensors = {f"param:{spec.key}": torch.zeros(spec.shape, dtype=spec.dtype) for spec in graph.parameters}
    for tensor in tensors.values():
        tensor.fill_(state.count)
    tensors |= {f"buffer:{spec.key}": torch.zeros(spec.shape, dtype=spec.dtype) for spec in graph.states}
    groups: dict[str, Any] = {"values": {}, "groups": []}
    return tensors, {"version": str(state.count), "optimizer": json.dumps(groups), "schedule": "null"}


def _sha256(graph: PortableGraph, state: State) -> str:
    return content_hash(stream_tensors(*_tensors(graph, state)))


async def _chunks(data: bytes) -> AsyncIterator[bytes]:
    yield data

"""A stage's part in averaging: takes snapshots, joins rounds, runs attempts, and brings what came of them to the stage.

The coordinator decides who takes part and what counts. Until it says that an attempt counts, nothing of it is in the
stage: the mean lies in memory of its own. What happens on failure:

- a piece breaks the rules, or the line fails for good: the coordinator is told, with who is to blame, and tries again
  without that one;
- this owner is left out: what it has learnt stays, and goes into the next round.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from ravnest.averaging.outer.outer import outer_named
from ravnest.averaging.ring_reduce import Piece
from ravnest.averaging.ring_state import Change, Contribution, RingState
from ravnest.averaging.settings import RingSettings
from ravnest.averaging.vector import Entry, RingVector
from ravnest.codecs.codec import codec_named
from ravnest.engine.messages import Snapshot
from ravnest.engine.moments import moment_names
from ravnest.engine.stage import Stage
from ravnest.engine.worker import StageWorker
from ravnest.errors import GraphError, PeerError, RavnestError
from ravnest.net.frames import Frame, FrameKind, RingPlace
from ravnest.net.v1.control_pb2 import (
    Average,
    CoordinatorMessage,
    Deploy,
    ProviderMessage,
    Ring,
    RingApplied,
    RingBegin,
    RingCatchUp,
    RingFailed,
    RingJoined,
    RingReduced,
    RoundJoined,
)
from ravnest.provider.ring_attempt import RingAttempt, as_bytes, as_values
from ravnest.provider.ring_links import RingLinks

_DONATION_VALUES = 1 << 18
"""Of an anchor that is given to an owner that was left out, in one piece."""


@dataclass
class _Taken:
    """What this owner brings into a round."""

    round: int
    version: int
    samples: int
    contribution: Contribution
    counters: list[int]


@dataclass
class _Owned:
    """A ring, and how this owner stands in it."""

    ring: Ring
    state: RingState
    samples: int = 0
    """Trained on by this stage at the snapshot of the last round that counted."""
    taken: _Taken | None = None
    attempt: RingAttempt | None = None
    running: asyncio.Task[None] | None = None
    agreed: tuple[int, ...] = ()
    """The largest of each counter, of all that take part."""
    over: int = 0
    """The last round of which nothing more is awaited."""
    donor: str = ""
    catches_up_to: int = 0
    donated: list[torch.Tensor] = field(default_factory=list)

    def stands_before(self, place: RingPlace) -> bool:
        """Whether this piece is of an attempt, or of a donation, that this owner has not been told of yet."""
        if place.round <= self.over:
            return False
        if self.taken is None or place.round > self.taken.round:
            return True
        if place.donation:
            return not self.donor
        return self.attempt is None or place.attempt > self.attempt.number

    def is_awaited(self, place: RingPlace) -> bool:
        if self.taken is None or place.round != self.taken.round or place.round <= self.over:
            return False
        if place.donation:
            return bool(self.donor)
        return self.attempt is not None and self.attempt.number == place.attempt


class Rings:
    """The rings of one stage. All methods but `snapshot` belong to the network's loop."""

    def __init__(
        self,
        order: Deploy,
        stage: Stage,
        loop: asyncio.AbstractEventLoop,
        tell: Callable[[ProviderMessage], None],
    ) -> None:
        """Copies the stage's parameters, which takes a moment. GraphError where the order does not fit the stage."""
        self._deployment = order.deployment
        self._generation = order.generation
        self._stage = stage
        self._tell = tell
        self._settings = RingSettings.from_json(order.averaging_json)
        tensors = stage.state_tensors()
        self._owned = {ring.ring: _Owned(ring, self._state(ring, tensors)) for ring in order.rings}
        self._worker: StageWorker | None = None
        self._links: RingLinks | None = None
        self._loop = loop
        self._thread = ThreadPoolExecutor(1, "ravnest-rings")
        self._orders: asyncio.Queue[CoordinatorMessage] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self.on_failure: Callable[[str], None] = lambda text: None
        """Called when averaging fails in a way that nobody else is to blame for."""

    def open(self, worker: StageWorker, links: RingLinks) -> None:
        """Begins to take part."""
        self._worker, self._links = worker, links
        links.open()
        self._spawn(self._obey())

    def obey(self, message: CoordinatorMessage) -> None:
        """Does what the coordinator says of rounds, one after the other."""
        self._orders.put_nowait(message)

    def snapshot(self, snapshot: Snapshot) -> None:
        """Takes what the round averages out of the stage. On the thread that owns torch."""
        rings = [owned for owned in self._owned.values() if snapshot.fragment in (0, owned.ring.fragment + 1)]
        flat = {owned.ring.ring: _flat(owned.state.vector, snapshot.tensors) for owned in rings}
        counters = {owned.ring.ring: _counters(owned.ring, snapshot.tensors) for owned in rings}
        self._loop.call_soon_threadsafe(
            lambda: self._spawn(self._join(snapshot.round, snapshot.version, snapshot.samples, flat, counters))
        )

    def anchors(self) -> dict[str, torch.Tensor]:
        """The parameters as all clusters have them since the last round, by their names in the stage's state."""
        return {
            name: view.clone()
            for owned in self._owned.values()
            for name, view in owned.state.vector.parameter_views(owned.state.anchor).items()
        }

    def progress(self) -> list[tuple[int, int, int, int]]:
        """Of every attempt under way: round, ring, attempt, and how many pieces have come."""
        return [
            (owned.taken.round, number, owned.attempt.number, owned.attempt.reduce.progress)
            for number, owned in self._owned.items()
            if owned.taken is not None and owned.attempt is not None
        ]

    async def take(self, peer: str, frame: Frame) -> None:
        """A piece has come. One that is early waits here, and holds its sender back; one that is late is dropped."""
        place, data = frame.piece, frame.tensors.get("data")
        assert place is not None
        owned = self._owned.get(place.ring)
        if owned is None or data is None or data.dtype != torch.uint8 or data.dim() != 1 or len(frame.tensors) > 1:
            raise PeerError(f"a piece of ring {place.ring} came, which cannot be")
        async with self._changed:
            await self._changed.wait_for(lambda: not owned.stands_before(place))
        if not owned.is_awaited(place):
            return
        if place.donation:
            await self._take_donation(owned, peer, place, data)
        elif owned.attempt is not None:
            if peer != owned.attempt.before:
                raise PeerError(f"it sent a piece of ring {place.ring}, whose owner before this one it is not")
            owned.attempt.take(Piece(place.hop, place.segment, place.chunk, data))

    async def close(self, timeout_seconds: float) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for owned in self._owned.values():
            await self._end_attempt(owned)
        if self._links is not None:
            await self._links.close(timeout_seconds)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _state(self, ring: Ring, tensors: Mapping[str, torch.Tensor]) -> RingState:
        names = [f"param:{key}" for key in ring.parameters]
        plain = [f"buffer:{key}" for key in ring.buffers]
        missing = [
            name for name in (*names, *plain, *(f"buffer:{key}" for key in ring.counters)) if name not in tensors
        ]
        if missing:
            raise GraphError(f"ring {ring.ring} has {missing[0][:80]!r}, which this stage does not have")
        shapes = {name: tuple(tensors[name].shape) for name in (*names, *plain)}
        if self._settings.optimizer_state:
            for moment in moment_names(self._stage.settings.optimizer_spec()):
                for key in ring.parameters:
                    shapes[name := f"optim:{key}:{moment}"] = shapes[f"param:{key}"]
                    plain.append(name)
        vector = RingVector(
            [Entry(name, shapes[name]) for name in names], [Entry(name, shapes[name]) for name in plain]
        )
        settings = self._settings
        outer = outer_named(settings.outer, settings.outer_rate, settings.outer_momentum)
        return RingState(vector, _flat(vector, tensors), outer, codec_named(settings.codec))

    async def _obey(self) -> None:
        while True:
            message = await self._orders.get()
            kind = message.WhichOneof("body")
            if kind == "average":
                self._average(message.average)
                continue
            order = getattr(message, str(kind))
            owned = self._owned.get(order.ring)
            if owned is None or owned.taken is None or owned.taken.round != order.round:
                # Of a round before its snapshot here, or after this owner was left out of it.
                if owned is not None and kind == "ring_abort":
                    await self._over(owned, order.round)
                continue
            if kind == "ring_begin":
                await self._begin(owned, message.ring_begin)
            elif kind == "ring_catch_up":
                await self._catch_up(owned, message.ring_catch_up)
            elif kind == "ring_commit":
                await self._commit(owned, message.ring_commit.attempt)
            elif kind == "ring_abort":
                await self._over(owned, order.round)

    def _average(self, order: Average) -> None:
        assert self._worker is not None
        self._worker.snapshot(order.round, order.fragment)

    async def _join(
        self,
        round: int,
        version: int,
        samples: int,
        flat: Mapping[int, torch.Tensor],
        counters: Mapping[int, list[int]],
    ) -> None:
        joined = []
        for number, values in flat.items():
            owned = self._owned[number]
            await self._over(owned, round - 1)
            contribution = await self._in_thread(owned.state.contribute, values)
            owned.taken = _Taken(round, version, samples, contribution, counters[number])
            joined.append(
                RingJoined(
                    ring=number,
                    samples=samples - owned.samples,
                    norm=contribution.norm if contribution.finite else 0.0,
                    finite=contribution.finite,
                    committed=owned.state.committed,
                    counters=counters[number],
                )
            )
        await self._note_change()
        self._tell(ProviderMessage(round_joined=RoundJoined(deployment=self._deployment, round=round, rings=joined)))

    async def _begin(self, owned: _Owned, order: RingBegin) -> None:
        assert self._links is not None and owned.taken is not None
        await self._end_attempt(owned)
        links, taken = self._links, owned.taken
        nodes = [member.node for member in order.members]
        index = order.index
        after, before = nodes[(index + 1) % len(nodes)], nodes[index - 1]
        weights, norms = [m.weight for m in order.members], [m.norm for m in order.members]
        reduce = await self._in_thread(owned.state.reduce, taken.contribution, weights, index, norms)

        async def send(piece: Piece) -> None:
            place = RingPlace(taken.round, order.ring, order.attempt, piece.hop, piece.segment, piece.chunk)
            await links.send(after, self._frame(place, piece.data))

        owned.agreed = tuple(order.counters)
        owned.attempt = RingAttempt(order.attempt, before, reduce, send, self._in_thread)
        try:
            links.want(after)
            links.want(before)
        except PeerError as error:
            self._tell(ProviderMessage(ring_failed=self._failed(owned, "", str(error))))
            return
        owned.running = asyncio.create_task(self._reduce(owned, owned.attempt))
        await self._note_change()

    async def _reduce(self, owned: _Owned, attempt: RingAttempt) -> None:
        assert owned.taken is not None
        try:
            await attempt.run()
            digest = await self._in_thread(lambda: attempt.reduce.digest)
        except Exception as error:
            blamed = attempt.before if isinstance(error, PeerError) else ""
            text = str(error) if isinstance(error, RavnestError) else f"{type(error).__name__}: {error}"
            self._tell(ProviderMessage(ring_failed=self._failed(owned, blamed, text)))
            return
        reduced = RingReduced(
            deployment=self._deployment,
            round=owned.taken.round,
            ring=owned.ring.ring,
            attempt=attempt.number,
            digest=digest,
            bytes_sent=attempt.bytes_sent,
        )
        self._tell(ProviderMessage(ring_reduced=reduced))

    async def _commit(self, owned: _Owned, attempt: int) -> None:
        taken, done = owned.taken, owned.attempt
        if taken is None or done is None or done.number != attempt or not done.reduce.done:
            return
        change = await self._in_thread(owned.state.commit, taken.round, taken.contribution, done.reduce)
        owned.samples = taken.samples
        agreed = owned.agreed
        await self._over(owned, taken.round)
        self._apply(owned, taken, change, agreed)

    def _apply(self, owned: _Owned, taken: _Taken, change: Change, agreed: Sequence[int]) -> None:
        assert self._worker is not None
        stage = self._stage
        applied = RingApplied(deployment=self._deployment, round=taken.round, ring=owned.ring.ring)

        def apply() -> None:
            unchanged = stage.version == taken.version and stage.is_between_updates
            counters = _counted(owned.ring, stage.state_tensors(), taken.counters, agreed)
            stage.shift({**change.adds, **counters}, change.becomes if unchanged else None, change.not_negative)
            self._loop.call_soon_threadsafe(self._tell, ProviderMessage(ring_applied=applied))

        self._worker.between(apply)

    async def _catch_up(self, owned: _Owned, order: RingCatchUp) -> None:
        assert self._links is not None and self._worker is not None
        self._links.want(order.node)
        if order.donate:
            self._spawn(self._donate(owned, order))
            return
        owned.donor, owned.catches_up_to, owned.donated = order.node, order.committed, []
        await self._note_change()

    async def _donate(self, owned: _Owned, order: RingCatchUp) -> None:
        assert self._links is not None
        values = await self._in_thread(owned.state.donation)
        pieces = values.split(_DONATION_VALUES)
        for number, piece in enumerate(pieces):
            place = RingPlace(order.round, order.ring, chunk=number, donation=True, last=number == len(pieces) - 1)
            try:
                await self._links.send(order.node, self._frame(place, as_bytes(piece)))
            except PeerError:
                # Whoever waits for it is late then, and left out.
                return

    async def _take_donation(self, owned: _Owned, peer: str, place: RingPlace, data: torch.Tensor) -> None:
        values = as_values(data)
        if peer != owned.donor or place.chunk != len(owned.donated) or values.numel() > _DONATION_VALUES:
            raise PeerError(f"it sent a piece of an anchor of ring {place.ring} that is not awaited")
        owned.donated.append(values)
        if sum(map(torch.Tensor.numel, owned.donated)) > 2 * owned.state.vector.coded_values:
            raise PeerError(f"it sent more than the anchor of ring {place.ring}")
        if not place.last:
            return
        assert owned.taken is not None and self._worker is not None
        donation, owned.donated, owned.donor = torch.cat(owned.donated), [], ""
        change = await self._in_thread(owned.state.catch_up, owned.catches_up_to, donation)
        self._worker.between(lambda: self._stage.shift(change.adds))
        caught_up = RingReduced(
            deployment=self._deployment, round=owned.taken.round, ring=owned.ring.ring, caught_up=True
        )
        self._tell(ProviderMessage(ring_reduced=caught_up))

    async def _over(self, owned: _Owned, round: int) -> None:
        """Nothing more of rounds up to this one is awaited."""
        owned.over = max(owned.over, round)
        if owned.taken is not None and owned.taken.round <= owned.over:
            owned.taken, owned.agreed, owned.donor, owned.donated = None, (), "", []
            await self._end_attempt(owned)
        await self._note_change()
        if self._links is not None and all(each.taken is None for each in self._owned.values()):
            await self._links.rest()

    async def _end_attempt(self, owned: _Owned) -> None:
        running, attempt = owned.running, owned.attempt
        owned.running = owned.attempt = None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        if attempt is not None:
            await attempt.close()

    def _failed(self, owned: _Owned, blamed: str, reason: str) -> RingFailed:
        taken, attempt = owned.taken, owned.attempt
        return RingFailed(
            deployment=self._deployment,
            round=0 if taken is None else taken.round,
            ring=owned.ring.ring,
            attempt=0 if attempt is None else attempt.number,
            blamed=blamed,
            reason=reason,
            progress=0 if attempt is None else attempt.reduce.progress,
        )

    def _frame(self, place: RingPlace, data: torch.Tensor) -> Frame:
        return Frame(FrameKind.RING, 0, generation=self._generation, tensors={"data": data}, piece=place)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self._loop.run_in_executor(self._thread, function, *arguments)

    async def _note_change(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.on_failure(f"averaging failed: {type(error).__name__}: {error}")


def _flat(vector: RingVector, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The ring's tensors in one; an optimizer keeps nothing before its first update, which is as good as zeros."""
    missing = {entry.name: torch.zeros(entry.shape) for entry in vector.plain if entry.name not in tensors}
    return vector.flatten({**tensors, **missing})


def _counter_names(ring: Ring) -> list[str]:
    return [f"buffer:{key}" for key in ring.counters]


def _counters(ring: Ring, tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """All counters of the ring, one after the other."""
    return [int(value) for name in _counter_names(ring) for value in tensors[name].flatten().tolist()]


def _counted(
    ring: Ring, tensors: Mapping[str, torch.Tensor], own: Sequence[int], agreed: Sequence[int]
) -> dict[str, torch.Tensor]:
    """What each counter is behind the largest of all that took part."""
    behind = torch.tensor([most - mine for most, mine in zip(agreed, own, strict=True)], dtype=torch.int64)
    names = _counter_names(ring)
    parts = torch.split(behind, [tensors[name].numel() for name in names])
    return {name: part.reshape(tensors[name].shape) for name, part in zip(names, parts, strict=True)}

"""A stage's part in averaging: takes snapshots, joins rounds, runs attempts, and brings what came of them to the stage.

The coordinator decides who takes part and what counts. Until it says that an attempt counts, nothing of it is in the
stage: the mean lies in memory of its own. What happens on failure:

- a piece breaks the rules, or a line breaks: the coordinator is told, with who is to blame, and begins another attempt;
- this owner is left out: what it has learned stays, and goes into the next round.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from ravnest.averaging.ring_reduce import Piece
from ravnest.averaging.segments import RingPosition
from ravnest.averaging.settings import RingSettings
from ravnest.background import BackgroundTasks
from ravnest.engine.messages import Snapshot
from ravnest.engine.stage import Stage
from ravnest.engine.worker import StageWorker
from ravnest.errors import PeerError, RavnestError
from ravnest.net.direct_line import DirectLine
from ravnest.net.frames.frames import RingPlace
from ravnest.net.v1.control_pb2 import (
    CoordinatorMessage,
    Deploy,
    ProviderMessage,
    RingApplied,
    RingBegin,
    RingCatchUp,
    RingFailed,
    RingJoined,
    RingReduced,
    RingStanding,
    RoundJoined,
)
from ravnest.provider.replicas.format import Keep, Restored, RingStand, rings_in_words
from ravnest.provider.rings.attempt import RingAttempt
from ravnest.provider.rings.lines import RingLines, ring_generation
from ravnest.provider.rings.owned_ring import JoinedRound, OwnedRing, Shift, counted, counters_of, flat

_DONATION_VALUES = 1 << 18
"""Of an anchor that is given to an owner that was left out, in one piece."""


class Rings:
    """The rings of one stage. All methods but `snapshot`, `take` and `is_wanted` belong to the network's loop."""

    def __init__(
        self,
        order: Deploy,
        stage: Stage,
        node_id: str,
        loop: asyncio.AbstractEventLoop,
        tell: Callable[[ProviderMessage], None],
        restored: Restored | None = None,
    ) -> None:
        """Copies the stage's parameters, which takes a moment. GraphError where the order does not fit the stage.

        `restored`: what is known of rings from before, in a run that is resumed or of a stage that is taken over.
        """
        self._deployment = order.deployment
        self._generation = ring_generation(order)
        self._stage = stage
        self._node_id = node_id
        self._loop = loop
        self._tell = tell
        settings, tensors = RingSettings.from_json(order.averaging_json), stage.state_tensors()
        optimizer = stage.settings.optimizer_spec()
        # Plans count the memory of a round, which is that of one fragment; between rounds there may be as much.
        keeps = len({ring.fragment for ring in order.rings}) == 1 and not settings.optimizer_state
        self._owned = {
            ring.ring: OwnedRing.of(ring, settings, optimizer, tensors, restored or Restored(), keeps)
            for ring in order.rings
        }
        self._worker: StageWorker | None = None
        self._lines: RingLines | None = None
        self._thread = ThreadPoolExecutor(1, "ravnest-rings")
        self._orders: asyncio.Queue[CoordinatorMessage] = asyncio.Queue()
        self._tasks = BackgroundTasks(self._averaging_failed)
        self._joining = 0
        """Snapshots that have been taken and not been joined with yet."""
        self._changed = threading.Condition()
        """Held by whoever looks at a ring from another thread than the loop's, or changes one."""
        self._closed = False
        self.on_failure: Callable[[str], None] = lambda text: None
        """Called when averaging fails in a way that nobody else is to blame for."""

    def open(self, worker: StageWorker, lines: RingLines) -> None:
        """Begins to take part; or goes on, where the stage has another worker now."""
        begins = self._worker is None
        self._worker, self._lines = worker, lines
        if begins:
            lines.open()
            self._tasks.spawn(self._obey())

    def obey(self, message: CoordinatorMessage) -> None:
        """Does what the coordinator says of rounds, one after the other."""
        self._orders.put_nowait(message)

    def snapshot(self, snapshot: Snapshot) -> None:
        """Takes what the round averages out of the stage. On the thread that owns torch."""
        rings = [owned for owned in self._owned.values() if snapshot.fragment in (0, owned.ring.fragment + 1)]
        values = {owned.number: flat(owned.state.vector, snapshot.tensors) for owned in rings}
        counters = {owned.number: counters_of(owned.ring, snapshot.tensors) for owned in rings}
        shifted = {owned.number: owned.shifted for owned in rings}
        taken = (snapshot.round, snapshot.version, snapshot.samples, values, counters, shifted)

        def begin() -> None:
            # Counted here, in the order in which the stage has come to it: see `_shifted`.
            self._joining += 1
            self._tasks.spawn(self._join(*taken))

        self._loop.call_soon_threadsafe(begin)

    def complete(self, part: Keep, replica: int, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        """Adds what a part of a replica has of rings to a copy of the stage's state, and gives it to `part`. On the
        thread that owns torch, which does not wait for it."""
        shifted = {owned.number: owned.shifted for owned in self._owned.values()}
        samples = int(metadata["samples"])

        def work() -> None:
            stands = {}
            for owned in self._owned.values():
                owned.complete(tensors, shifted[owned.number])
                stands[owned.number] = RingStand(owned.state.committed, max(0, samples - owned.samples))
            part(replica, tensors, {**metadata, "rings": rings_in_words(stands)})

        with contextlib.suppress(RuntimeError):  # It is closed, and nobody keeps anything any more.
            # On the thread where rounds are counted, as it was when the copy was made or later: never in between.
            self._thread.submit(work)

    async def saved(self, anchored: bool) -> dict[str, torch.Tensor]:
        """What a checkpoint has beside the stage's own state: what the outer optimizer remembers of each parameter
        (`outer:KEY`). With `anchored` also, in place of the stage's own, the parameters as all clusters have them since
        the last round (`param:KEY`)."""

        # On the thread where rounds are counted: never in the middle of one.
        copies: dict[str, torch.Tensor] = await self._in_thread(self._copied, anchored)
        return copies

    def remembered(self) -> dict[str, torch.Tensor]:
        """The same without `anchored`, for one that waits: of a cluster that is alone by now, and is saved with a
        microbatch. On the thread that owns torch; nothing where the rings are closed."""
        try:
            copying = self._thread.submit(self._copied, False)
        except RuntimeError:
            return {}
        try:
            return copying.result()
        except CancelledError:
            return {}

    def progress(self) -> list[tuple[int, int, int, int]]:
        """Of every attempt under way: round, ring, attempt, and how many pieces have come."""
        return [
            (owned.joined.round, number, owned.attempt.number, owned.attempt.reduce.progress)
            for number, owned in self._owned.items()
            if owned.joined is not None and owned.attempt is not None
        ]

    def standings(self) -> list[RingStanding]:
        """How this owner stands in each ring, for a coordinator that has not seen its rounds."""
        return [
            RingStanding(
                ring=number,
                committed=owned.state.committed,
                round=max(owned.over, 0 if owned.joined is None else owned.joined.round),
                reduced=0 if owned.joined is None or owned.decided.is_set() else owned.joined.round,
            )
            for number, owned in self._owned.items()
        ]

    def take_all(self, line: DirectLine) -> None:
        """Takes what comes over a direct line, until it ends or breaks the rules. On a thread of the line's own."""
        reached: dict[int, RingPlace] = {}
        try:
            while (piece := line.receive(partial(self._room, line.peer))) is not None:
                generation, place, data = piece
                reached[place.ring] = place
                self.take(line.peer, generation, place, data)
            ended = partial(self._line_ended, line.peer, list(reached.values()))
        except PeerError as error:
            ended = partial(self.line_broke, line.peer, str(error))
        if not self._closed:
            self._loop.call_soon_threadsafe(ended)

    def take(self, peer: str, generation: int, place: RingPlace, data: torch.Tensor) -> None:
        """A piece has come. One that is early waits here, and holds its sender back; one that is late is dropped.

        PeerError for one that cannot be. On any thread but the loop's.
        """
        owned = self._owned.get(place.ring)
        if generation != self._generation or owned is None or data.dtype != torch.uint8 or data.dim() != 1:
            raise PeerError(f"a piece of ring {place.ring} came from {peer}, which cannot be")
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not owned.stands_before(place))
            if self._closed or not owned.awaits(place):
                return
            if place.donation:
                donated = owned.donation(peer, place, data)
                if donated is not None:
                    self._loop.call_soon_threadsafe(lambda: self._tasks.spawn(self._caught_up(owned, peer, donated)))
                return
            attempt = owned.attempt
        assert attempt is not None
        if peer != attempt.before:
            raise PeerError(f"{peer} sent a piece of ring {place.ring}, whose owner before this one it is not")
        attempt.take(Piece(place.hop, place.segment, place.chunk, data))

    def _room(self, peer: str, generation: int, place: RingPlace, size_bytes: int) -> torch.Tensor | None:
        """Where the bytes of a piece go that is about to be received; one that is early waits until that is known.

        Only who may send it has a place in what is being reduced: the others' pieces are refused when they are taken.
        """
        owned = self._owned.get(place.ring)
        if owned is None or generation != self._generation:
            return None
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not owned.stands_before(place))
            attempt = owned.attempt if not self._closed and owned.awaits(place) else None
        if place.donation:
            return torch.empty(size_bytes, dtype=torch.uint8)
        if attempt is None or peer != attempt.before:
            return None
        return attempt.room(place.hop, place.segment, place.chunk, size_bytes)

    def is_wanted(self, place: RingPlace) -> bool:
        """Whether a piece that is to be sent is still of use: its attempt has not been given up. On any thread."""
        owned = self._owned[place.ring]
        with self._changed:
            attempt = owned.attempt
            if self._closed or owned.joined is None or owned.joined.round != place.round:
                return False
            return place.donation or (attempt is not None and attempt.number == place.attempt)

    def line_broke(self, peer: str, reason: str) -> None:
        """A line broke, or brought what breaks the rules: attempts that need it cannot go on."""
        for owned in self._owned.values():
            if owned.joined is not None and owned.attempt is not None and peer in (owned.attempt.before, owned.after):
                owned.attempt.close()
                self._fail(owned, owned.attempt.number, "", reason, again=True)

    def _line_ended(self, peer: str, reached: Sequence[RingPlace]) -> None:
        """A direct line has ended after these pieces. Its sender may think that it has sent more: what is not complete
        will not be, and need not be waited for until time is up."""
        reason = f"the direct line from {peer} ended"
        for place in reached:
            owned = self._owned.get(place.ring)
            if owned is None or not owned.awaits(place):
                continue
            if place.donation:
                self._fail(owned, 0, peer, reason)
            elif owned.attempt is not None and not owned.attempt.reduce.done:
                owned.attempt.close()
                self._fail(owned, place.attempt, "", reason, again=True)

    async def close(self, timeout_seconds: float) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        await self._tasks.close()
        if self._lines is not None:
            await self._lines.close(timeout_seconds)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _copied(self, anchored: bool) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for state in [owned.state for owned in self._owned.values()]:
            for name, view in state.outer_views().items():
                found[f"outer:{name.removeprefix('param:')}"] = view.clone()
            if anchored:
                found |= {name: view.clone() for name, view in state.vector.parameter_views(state.anchor).items()}
        return found

    async def _obey(self) -> None:
        while True:
            message = await self._orders.get()
            kind = message.WhichOneof("body")
            if kind == "average":
                assert self._worker is not None
                self._worker.snapshot(message.average.round, message.average.fragment)
                continue
            order = getattr(message, str(kind))
            owned = self._owned.get(order.ring)
            if owned is None:
                continue
            if kind == "ring_abort":
                await self._over(owned, order.round)
            elif owned.joined is None or owned.joined.round != order.round:
                # Of a round that this owner was left out of.
                continue
            elif kind == "ring_begin":
                await self._begin(owned, owned.joined, message.ring_begin)
            elif kind == "ring_catch_up":
                await self._catch_up(owned, message.ring_catch_up)
            elif kind == "ring_commit":
                await self._commit(owned, owned.joined, message.ring_commit.attempt)

    async def _join(
        self,
        round: int,
        version: int,
        samples: int,
        values: Mapping[int, torch.Tensor],
        counters: Mapping[int, list[int]],
        shifted: Mapping[int, int],
    ) -> None:
        joined = []
        for number, snapshot in values.items():
            owned = self._owned[number]
            # Whoever has the mean of a round hears what becomes of it, if late, and before anything of the next. Until
            # then nobody knows what is new in the snapshot: what counted already would count once more.
            await owned.decided.wait()
            await self._over(owned, round - 1)
            if round <= owned.over:
                # The others have not waited.
                continue
            contribution = await self._in_thread(owned.contribute, snapshot, counters[number], shifted[number])
            with self._changed:
                owned.joined = JoinedRound(round, version, samples, contribution, counters[number])
                self._changed.notify_all()
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
        self._joining -= 1
        for owned in self._owned.values():
            self._let_go(owned)
        self._tell(ProviderMessage(round_joined=RoundJoined(deployment=self._deployment, round=round, rings=joined)))

    async def _begin(self, owned: OwnedRing, joined: JoinedRound, order: RingBegin) -> None:
        assert self._lines is not None
        lines, number = self._lines, order.attempt
        nodes = [member.node for member in order.members]
        after, before = nodes[(order.index + 1) % len(nodes)], nodes[order.index - 1]
        weights, norms = [m.weight for m in order.members], [m.norm for m in order.members]
        position = RingPosition(order.index, weights, norms)
        reduce = await self._in_thread(owned.state.reduce, joined.contribution, position)

        def send(piece: Piece) -> None:
            place = RingPlace(joined.round, order.ring, number, piece.hop, piece.segment, piece.chunk)
            lines.put(after, place, piece.data)

        def ended(error: Exception | None) -> None:
            self._loop.call_soon_threadsafe(lambda: self._ended(owned, attempt, error))

        attempt = RingAttempt(number, before, reduce, send, ended)
        try:
            lines.want(after)
            lines.want(before)
        except PeerError as error:
            self._fail(owned, number, self._node_id, str(error))
            return
        with self._changed:
            if owned.attempt is not None:
                owned.attempt.close()
            owned.attempt, owned.after, owned.agreed = attempt, after, tuple(order.counters)
            owned.decided.set()
            self._changed.notify_all()
        await self._in_thread(attempt.start)

    def _ended(self, owned: OwnedRing, attempt: RingAttempt, error: Exception | None) -> None:
        """An attempt has the mean, or cannot have it."""
        if owned.attempt is not attempt or owned.joined is None:
            return
        if error is not None:
            # What breaks the rules came from the owner before; whatever else it is, it happened here.
            blamed = attempt.before if isinstance(error, PeerError) else self._node_id
            text = str(error) if isinstance(error, RavnestError) else f"{type(error).__name__}: {error}"
            self._fail(owned, attempt.number, blamed, text)
            return
        owned.decided.clear()
        reduced = RingReduced(
            deployment=self._deployment,
            round=owned.joined.round,
            ring=owned.number,
            attempt=attempt.number,
            digest=attempt.reduce.digest,
            bytes_sent=attempt.bytes_sent,
            direct=self._lines is not None and self._lines.is_direct(owned.after),
        )
        self._tell(ProviderMessage(ring_reduced=reduced))

    async def _commit(self, owned: OwnedRing, joined: JoinedRound, number: int) -> None:
        attempt = owned.attempt
        if attempt is None or attempt.number != number or not attempt.reduce.done:
            return
        shift = await self._in_thread(owned.commit, joined, attempt.reduce)
        owned.samples = joined.samples
        await self._over(owned, joined.round)
        self._apply(owned, joined, shift)

    def _apply(self, owned: OwnedRing, joined: JoinedRound, shift: Shift) -> None:
        assert self._worker is not None
        stage, change = self._stage, shift.change
        applied = RingApplied(deployment=self._deployment, round=joined.round, ring=owned.number)

        def apply() -> None:
            unchanged = stage.version == joined.version and stage.is_between_updates
            counters = counted(owned.ring, stage.state_tensors(), shift.counters)
            stage.shift({**change.adds, **counters}, change.becomes if unchanged else None, change.not_negative)
            owned.shifted += 1
            self._loop.call_soon_threadsafe(self._shifted, owned, ProviderMessage(ring_applied=applied))

        self._worker.call_between_tasks(apply)

    def _shifted(self, owned: OwnedRing, message: ProviderMessage | None) -> None:
        """A shift is in the stage."""
        owned.known_shifted += 1
        self._let_go(owned)
        if message is not None:
            self._tell(message)

    def _let_go(self, owned: OwnedRing) -> None:
        # A snapshot that was taken before a shift has been counted before anything is heard of that shift.
        if not self._joining and not self._closed:
            self._thread.submit(owned.forget_shifts, owned.known_shifted)

    async def _catch_up(self, owned: OwnedRing, order: RingCatchUp) -> None:
        assert self._lines is not None
        self._lines.want(order.node)
        if not order.donate:
            with self._changed:
                owned.expect_donation(order.node, order.committed)
                self._changed.notify_all()
            return
        values = await self._in_thread(owned.state.donation)
        pieces = torch.split(values, _DONATION_VALUES)
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            place = RingPlace(order.round, order.ring, chunk=number, donation=True, last=last)
            self._lines.put(order.node, place, piece.view(torch.uint8))

    async def _caught_up(self, owned: OwnedRing, donor: str, donated: torch.Tensor) -> None:
        assert self._worker is not None
        if owned.joined is None:
            return
        round = owned.joined.round
        try:
            shift = await self._in_thread(owned.catch_up, donated)
        except PeerError as error:
            self._fail(owned, 0, donor, str(error))
            return

        def apply() -> None:
            self._stage.shift(shift.change.adds)
            owned.shifted += 1
            self._loop.call_soon_threadsafe(self._shifted, owned, None)

        self._worker.call_between_tasks(apply)
        caught_up = RingReduced(deployment=self._deployment, round=round, ring=owned.number, caught_up=True)
        self._tell(ProviderMessage(ring_reduced=caught_up))

    async def _over(self, owned: OwnedRing, round: int) -> None:
        """Nothing more of rounds up to this one is awaited."""
        with self._changed:
            owned.forget(round)
            self._changed.notify_all()
        if self._lines is not None and all(each.joined is None for each in self._owned.values()):
            await self._lines.rest()

    def _fail(self, owned: OwnedRing, attempt: int, blamed: str, reason: str, again: bool = False) -> None:
        """Tells the coordinator that this owner cannot go on with an attempt."""
        failed = RingFailed(
            deployment=self._deployment,
            round=0 if owned.joined is None else owned.joined.round,
            ring=owned.number,
            attempt=attempt,
            blamed=blamed,
            reason=reason,
            again=again,
        )
        self._tell(ProviderMessage(ring_failed=failed))

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self._loop.run_in_executor(self._thread, function, *arguments)

    def _averaging_failed(self, error: BaseException) -> None:
        self.on_failure(f"averaging failed: {type(error).__name__}: {error}")

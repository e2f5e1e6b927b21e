"""A stage's part in averaging: it takes snapshots, joins rounds, runs attempts and applies what the coordinator
commits.

The coordinator decides who takes part and what counts. Until it commits an attempt, the mean lies in memory of its own
and the stage is unchanged. On failure:

- an invalid piece or a broken line: this owner reports it with the node to blame, and the coordinator begins another
  attempt;
- this owner is left out: what it has learned stays in the stage and goes into the next round.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import torch

from ravnest.averaging.ring_reduce import Piece
from ravnest.averaging.segments import RingPosition
from ravnest.averaging.settings import RingSettings
from ravnest.background import BackgroundTasks
from ravnest.codecs.codec import codec_named
from ravnest.engine.messages import Snapshot
from ravnest.engine.stage import Stage
from ravnest.engine.worker import StageWorker
from ravnest.errors import PeerError, error_text
from ravnest.net.frames.frames import RingPlace
from ravnest.net.v1.control_pb2 import (
    CoordinatorMessage,
    Deploy,
    ProviderMessage,
    RingBegin,
    RingCatchUp,
    RingCommit,
    RingJoined,
    RingStanding,
)
from ravnest.provider.replicas.format import Keep, Restored, RingStand, rings_in_words
from ravnest.provider.rings.attempt import RingAttempt
from ravnest.provider.rings.donation import Donation
from ravnest.provider.rings.lines import RingLines, ring_generation
from ravnest.provider.rings.owned_ring import CurrentAttempt, JoinedRound, OwnedRing, RingSnapshot
from ravnest.provider.rings.receiver import PieceReceiver
from ravnest.provider.rings.reports import RingReports
from ravnest.provider.rings.ring_tensors import counter_tensors, counters_of, flat
from ravnest.provider.rings.shifts import Shift

DONATION_VALUES: Final = 1 << 14
"""Values in one piece of a donation: 64 KiB, so that no piece keeps a slow line busy for long."""


class Rings:
    """The rings of one stage. Methods belong to the network's loop unless they say otherwise."""

    def __init__(
        self,
        order: Deploy,
        stage: Stage,
        node_id: str,
        loop: asyncio.AbstractEventLoop,
        tell: Callable[[ProviderMessage], None],
        restored: Restored | None = None,
    ) -> None:
        """Copies the stage's parameters, which takes a moment. GraphError if the order does not fit the stage.

        `restored`: state of the rings in a resumed run, or of a stage that another provider held before.
        """
        self._stage = stage
        self._node_id = node_id
        self._loop = loop
        self._reports = RingReports(order.deployment, tell)
        settings, tensors = RingSettings.from_json(order.averaging_json), stage.state_tensors()
        optimizer = stage.settings.optimizer_spec()
        # Plans count the memory of one fragment during a round; between rounds, keeping that much is within the plan.
        keeps = len({ring.fragment for ring in order.rings}) == 1 and not settings.optimizer_state
        self._owned = {
            ring.ring: OwnedRing.of(ring, settings, optimizer, tensors, restored or Restored(), keeps)
            for ring in order.rings
        }
        self.receiver = PieceReceiver(self._owned, ring_generation(order), self._reports, loop, self._on_donated)
        """Takes the pieces that come over the lines."""
        self._handlers: Mapping[str, Callable[[OwnedRing, JoinedRound, Any], Any]] = {
            "ring_begin": self._begin,
            "ring_catch_up": self._catch_up,
            "ring_commit": self._commit,
        }
        self._worker: StageWorker | None = None
        self._lines: RingLines | None = None
        self._thread = ThreadPoolExecutor(1, "ravnest-rings")
        self._orders: asyncio.Queue[CoordinatorMessage] = asyncio.Queue()
        self._tasks = BackgroundTasks(self._on_error)
        self._joining = 0
        """Snapshots that have been taken and have not joined a round yet."""
        self._is_closed = False
        self.on_failure: Callable[[str], None] = lambda text: None
        """Called when averaging fails through an error of this provider's own."""

    def open(self, worker: StageWorker, lines: RingLines) -> None:
        """Begin to take part; or continue with another worker of the stage."""
        begins = self._worker is None
        self._worker, self._lines = worker, lines
        if begins:
            lines.open()
            self._tasks.spawn(self._obey_all())

    def obey(self, message: CoordinatorMessage) -> None:
        """Queue an order of the coordinator about rounds; orders are carried out one after the other."""
        self._orders.put_nowait(message)

    def snapshot(self, snapshot: Snapshot) -> None:
        """Join a round with a snapshot of the stage. On the thread that owns torch."""
        rings = [owned for owned in self._owned.values() if snapshot.fragment in (0, owned.ring.fragment + 1)]
        parts = {
            owned.number: RingSnapshot(
                flat(owned.state.vector, snapshot.tensors), counters_of(owned.ring, snapshot.tensors), owned.shifted
            )
            for owned in rings
        }
        joining = partial(self._join, snapshot.round, snapshot.version, snapshot.samples, parts)

        def begin() -> None:
            # Counted on the loop, which hears of snapshots and shifts in the stage's own order: see `_forget_shifts`.
            self._joining += 1
            self._tasks.spawn(joining())

        self._loop.call_soon_threadsafe(begin)

    def complete(self, part: Keep, replica: int, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        """Add the rings' state to a copy of the stage's state, and pass it to `part` for a replica. On the thread that
        owns torch, which does not wait for it."""
        shifted = {owned.number: owned.shifted for owned in self._owned.values()}
        samples = int(metadata["samples"])

        def work() -> None:
            stands = {}
            for owned in self._owned.values():
                owned.complete(tensors, shifted[owned.number])
                stands[owned.number] = RingStand(owned.state.committed, max(0, samples - owned.samples))
            part(replica, tensors, {**metadata, "rings": rings_in_words(stands)})

        with contextlib.suppress(RuntimeError):  # The rings are closed, and the replica is not needed any more.
            # On the thread that commits rounds, so that the copy is never completed in the middle of a commit.
            self._thread.submit(work)

    async def saved(self, anchored: bool) -> dict[str, torch.Tensor]:
        """The rings' part of a checkpoint: the outer optimizer's state of each parameter (`outer:KEY`). With `anchored`
        also the anchors (`param:KEY`), which replace the stage's own parameters."""
        copies: dict[str, torch.Tensor] = await self._in_thread(self._copied, anchored)
        return copies

    def remembered(self) -> dict[str, torch.Tensor]:
        """`saved` without `anchored`, for a cluster that is alone and saves with a microbatch. On the thread that owns
        torch, which waits for it. Empty if the rings are closed."""
        try:
            return self._thread.submit(self._copied, False).result()
        except (RuntimeError, CancelledError):
            return {}

    def progress(self) -> list[tuple[int, int, int, int]]:
        """Every current attempt as round, ring, number of the attempt, and pieces received; 0 is the number of a
        donation that is on its way to this owner."""
        found = []
        for number, owned in self._owned.items():
            if (joined := owned.joined) is None:
                continue
            if joined.attempt is not None:
                found.append((joined.round, number, joined.attempt.run.number, joined.attempt.run.reduce.progress))
            elif (donation := joined.donation) is not None:
                found.append((joined.round, number, 0, donation.received))
        return found

    def standings(self) -> list[RingStanding]:
        """The position of this owner in each ring, for a coordinator that did not run the rounds so far."""
        found = []
        for number, owned in self._owned.items():
            round = 0 if owned.joined is None else owned.joined.round
            reduced = 0 if owned.decided.is_set() else round
            standing = RingStanding(
                ring=number, committed=owned.state.committed, round=max(owned.over, round), reduced=reduced
            )
            found.append(standing)
        return found

    async def close(self, timeout_seconds: float) -> None:
        self._is_closed = True
        self.receiver.close()
        await self._tasks.close()
        if self._lines is not None:
            await self._lines.close(timeout_seconds)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _copied(self, anchored: bool) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for owned in self._owned.values():
            found |= owned.outer_tensors()
            if anchored:
                found |= owned.anchor_tensors()
        return found

    async def _obey_all(self) -> None:
        while True:
            message = await self._orders.get()
            kind = str(message.WhichOneof("body"))
            if kind == "average":
                assert self._worker is not None
                self._worker.snapshot(message.average.round, message.average.fragment)
                continue
            order = getattr(message, kind)
            owned = self._owned.get(order.ring)
            if owned is None:
                continue
            if kind == "ring_abort":
                await self._end_rounds(owned, order.round)
            elif owned.joined is not None and owned.joined.round == order.round:
                # An owner that was left out of a round ignores the other orders of it.
                await self._handlers[kind](owned, owned.joined, order)

    async def _join(self, round: int, version: int, samples: int, parts: Mapping[int, RingSnapshot]) -> None:
        reports = []
        for number, part in parts.items():
            owned = self._owned[number]
            # If this owner has the mean of the previous round, it waits for the coordinator's decision about it. Until
            # then it cannot tell which part of the snapshot that mean already contains.
            await owned.decided.wait()
            await self._end_rounds(owned, round - 1)
            if round <= owned.over:
                # The round began without this owner.
                continue
            contribution = await self._in_thread(owned.contribute, part)
            with self.receiver.changing():
                owned.joined = JoinedRound(round, version, samples, contribution, part.counters)
            report = RingJoined(
                ring=number,
                samples=samples - owned.samples,
                norm=contribution.norm if contribution.finite else 0.0,
                finite=contribution.finite,
                committed=owned.state.committed,
                counters=part.counters,
            )
            reports.append(report)
        self._joining -= 1
        for owned in self._owned.values():
            self._forget_shifts(owned)
        self._reports.joined(round, reports)

    async def _begin(self, owned: OwnedRing, joined: JoinedRound, order: RingBegin) -> None:
        assert self._lines is not None
        lines, number = self._lines, order.attempt
        nodes = [member.node for member in order.members]
        after, before = nodes[(order.index + 1) % len(nodes)], nodes[order.index - 1]
        weights, norms = [m.weight for m in order.members], [m.norm for m in order.members]
        position = RingPosition(order.index, weights, norms)
        try:
            codec = codec_named(order.codec) if order.codec else None
        except PeerError as error:
            # A newer coordinator may know codecs that this provider does not.
            self._reports.failed(owned, number, self._node_id, str(error))
            return
        pieces = owned.piece_values(len(nodes), order.piece_values)
        reduce = await self._in_thread(owned.state.reduce, joined.contribution, position, pieces, codec)

        def send(piece: Piece) -> None:
            place = RingPlace(joined.round, order.ring, number, piece.hop, piece.segment, piece.chunk)
            lines.put(after, place, piece.data)

        def on_end(error: Exception | None) -> None:
            self._loop.call_soon_threadsafe(self._on_attempt_end, owned, joined, attempt, error)

        attempt = RingAttempt(number, before, reduce, send, on_end)
        try:
            lines.connect(after)
            lines.connect(before)
        except PeerError as error:
            self._reports.failed(owned, number, self._node_id, str(error))
            return
        with self.receiver.changing():
            if joined.attempt is not None:
                joined.attempt.run.close()
            joined.attempt = CurrentAttempt(attempt, after, tuple(order.counters))
            joined.is_urgent = order.urgent
            owned.decided.set()
        await self._in_thread(attempt.start)

    def _on_attempt_end(
        self, owned: OwnedRing, joined: JoinedRound, attempt: RingAttempt, error: Exception | None
    ) -> None:
        """An attempt has the mean, or cannot have it."""
        if owned.joined is not joined or joined.attempt is None or joined.attempt.run is not attempt:
            return
        if error is not None:
            # An invalid piece came from the previous owner; any other error happened here.
            blamed = attempt.before if isinstance(error, PeerError) else self._node_id
            text = error_text(error)
            self._reports.failed(owned, attempt.number, blamed, text)
            return
        owned.decided.clear()
        is_direct = self._lines is not None and self._lines.is_direct(joined.attempt.after)
        self._reports.reduced(joined.round, owned.number, attempt, is_direct)

    async def _commit(self, owned: OwnedRing, joined: JoinedRound, order: RingCommit) -> None:
        attempt = joined.attempt
        if attempt is None or attempt.run.number != order.attempt or not attempt.run.reduce.done:
            return
        shift = await self._in_thread(owned.commit, joined, attempt.counters, attempt.run.reduce)
        owned.samples = joined.samples
        await self._end_rounds(owned, joined.round)
        self._apply(owned, shift, joined.version, partial(self._reports.applied, joined.round, owned.number))

    def _apply(self, owned: OwnedRing, shift: Shift, version: int, on_applied: Callable[[], None] | None) -> None:
        """Shift the stage between two microbatches, towards an anchor that has moved since the stage had `version`."""
        assert self._worker is not None
        stage, update = self._stage, shift.update

        def apply() -> None:
            is_unchanged = stage.version == version and stage.is_between_updates
            own = stage.state_tensors(with_packed=False)
            counters = counter_tensors(owned.ring, own, shift.counters) if shift.counters else {}
            becomes = update.becomes if is_unchanged else None
            stage.shift({**update.adds, **counters}, becomes, update.not_negative)
            owned.shifted += 1
            self._loop.call_soon_threadsafe(self._on_shifted, owned, on_applied)

        self._worker.call_between_tasks(apply)

    def _on_shifted(self, owned: OwnedRing, on_applied: Callable[[], None] | None) -> None:
        owned.known_shifted += 1
        self._forget_shifts(owned)
        if on_applied is not None:
            on_applied()

    def _forget_shifts(self, owned: OwnedRing) -> None:
        # The loop hears of a snapshot before it hears of a shift that the snapshot lacks.
        if not self._joining and not self._is_closed:
            self._thread.submit(owned.shifts.forget, owned.known_shifted)

    async def _catch_up(self, owned: OwnedRing, joined: JoinedRound, order: RingCatchUp) -> None:
        assert self._lines is not None
        self._lines.connect(order.node)
        if not order.donate:
            # The donation has the anchor and the outer state, each as long as the coded section.
            donation = Donation(order.node, order.committed, 2 * owned.state.vector.coded_values)
            with self.receiver.changing():
                joined.donation = donation
            return
        with self.receiver.changing():
            joined.is_urgent = order.urgent
        values = await self._in_thread(owned.state.donation)
        pieces = torch.split(values, DONATION_VALUES)
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            place = RingPlace(order.round, order.ring, chunk=number, donation=True, last=last)
            self._lines.put(order.node, place, piece.view(torch.uint8))

    def _on_donated(self, owned: OwnedRing, donation: Donation) -> None:
        self._tasks.spawn(self._take_donation(owned, donation))

    async def _take_donation(self, owned: OwnedRing, donation: Donation) -> None:
        joined = owned.joined
        if joined is None:
            return
        try:
            shift = await self._in_thread(owned.catch_up, donation.committed, donation.values)
        except PeerError as error:
            self._reports.failed(owned, 0, donation.donor, str(error))
            return
        self._apply(owned, shift, joined.version, None)
        self._reports.caught_up(joined.round, owned.number)

    async def _end_rounds(self, owned: OwnedRing, round: int) -> None:
        """Rounds up to this one are over for this owner."""
        with self.receiver.changing():
            owned.forget(round)
        if self._lines is not None and all(each.joined is None for each in self._owned.values()):
            await self._lines.stop_dialling()

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a call on the rings' own thread, which changes the state of the rings."""
        return await self._loop.run_in_executor(self._thread, function, *arguments)

    def _on_error(self, error: BaseException) -> None:
        self.on_failure(f"averaging failed: {type(error).__name__}: {error}")

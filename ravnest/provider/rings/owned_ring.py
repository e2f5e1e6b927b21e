"""One ring as one of its owners sees it: what is kept of it, and how far the round at hand is."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from ravnest.averaging.outer.outer import outer_named
from ravnest.averaging.ring_reduce import RingReduce
from ravnest.averaging.ring_state import Contribution, RingState, TensorUpdate
from ravnest.averaging.settings import RingSettings
from ravnest.averaging.vector import Entry, RingVector
from ravnest.codecs.codec import codec_named
from ravnest.engine.weights.moments import moment_names
from ravnest.errors import GraphError, PeerError
from ravnest.net.frames.frames import RingPlace
from ravnest.net.v1.control_pb2 import Ring
from ravnest.provider.replicas.format import Restored, RingStand
from ravnest.provider.rings.attempt import RingAttempt
from ravnest.spec import OptimizerSpec


@dataclass
class JoinedRound:
    """What this owner brings into a round."""

    round: int
    version: int
    """Of the stage, when the snapshot was taken."""
    samples: int
    """That the stage had trained on by then."""
    contribution: Contribution
    counters: list[int]


@dataclass(frozen=True, slots=True)
class Shift:
    """What a round that counted, or catching up, changes in the stage, beside an anchor that has moved already."""

    change: TensorUpdate
    counters: tuple[int, ...] = ()
    """What each counter was behind."""


@dataclass
class OwnedRing:
    """A ring, and how this owner stands in it."""

    ring: Ring
    state: RingState
    samples: int = 0
    """Trained on by this stage at the snapshot of the last round that counted."""
    joined: JoinedRound | None = None
    attempt: RingAttempt | None = None
    after: str = ""
    """Who this owner sends to in the attempt."""
    agreed: tuple[int, ...] = ()
    """The largest of each counter, of all that take part."""
    over: int = 0
    """The last round of which nothing more is awaited."""
    donor: str = ""
    catches_up_to: int = 0
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    """Not set while this owner has the mean of an attempt and has not heard whether that counts."""
    shifted: int = 0
    """How many shifts are in the stage. On the thread that owns torch."""
    known_shifted: int = 0
    """How many of them the network's loop has heard of."""
    _made: int = 0
    """How many shifts there have been, in the stage or on their way there. On the rings' own thread."""
    _shifts: list[Shift] = field(default_factory=list)
    """The last of them. On the rings' own thread."""
    _donated: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        ring: Ring,
        settings: RingSettings,
        optimizer: OptimizerSpec,
        tensors: Mapping[str, torch.Tensor],
        restored: Restored,
        keeps_memory: bool = False,
    ) -> Self:
        """The ring of a stage with these tensors, as deployed; GraphError where it lacks some of the ring's.

        `restored`: what the outer optimizer remembered of the stage's parameters in a run that is resumed, and where
        another owner stood whose part of a replica this stage begins with. `keeps_memory`: see `RingState`.
        """
        names = [f"param:{key}" for key in ring.parameters]
        plain = [f"buffer:{key}" for key in ring.buffers]
        missing = [name for name in (*names, *plain, *_counter_names(ring)) if name not in tensors]
        if missing:
            raise GraphError(f"ring {ring.ring} has {missing[0][:80]!r}, which this stage does not have")
        shapes = {name: tuple(tensors[name].shape) for name in (*names, *plain)}
        for moment in moment_names(optimizer) if settings.optimizer_state else ():
            for key in ring.parameters:
                shapes[name := f"optim:{key}:{moment}"] = shapes[f"param:{key}"]
                plain.append(name)
        vector = RingVector([Entry(n, shapes[n]) for n in names], [Entry(n, shapes[n]) for n in plain])
        outer = outer_named(settings.outer, settings.outer_rate, settings.outer_momentum)
        if outer.keeps_state and any(key in restored.outer for key in ring.parameters):
            outer.state = _remembered(vector, ring, restored.outer)
        values = flat(vector, tensors)
        if ring.ring in restored.rings:
            lacking = [key for key in ring.parameters if key not in restored.anchors]
            if lacking:
                raise GraphError(f"a part of a replica lacks the anchor of {lacking[0][:80]!r}")
            values[: vector.coded_values] = _remembered(vector, ring, restored.anchors)
        stand = restored.rings.get(ring.ring, RingStand())
        owned = cls(ring, RingState(vector, values, outer, codec_named(settings.codec), keeps_memory))
        owned.state.committed = stand.committed
        # What it had trained on by then counts into the next round, though this stage counts from now on.
        owned.samples = -stand.samples
        owned.decided.set()
        return owned

    @property
    def number(self) -> int:
        return self.ring.ring

    def stands_before(self, place: RingPlace) -> bool:
        """Whether this piece is of an attempt, or of a donation, that this owner has not been told of yet."""
        if place.round <= self.over:
            return False
        if self.joined is None or place.round > self.joined.round:
            return True
        if place.donation:
            return not self.donor
        return self.attempt is None or place.attempt > self.attempt.number

    def awaits(self, place: RingPlace) -> bool:
        if self.joined is None or place.round != self.joined.round or place.round <= self.over:
            return False
        if place.donation:
            return bool(self.donor)
        return self.attempt is not None and self.attempt.number == place.attempt

    def expect_donation(self, donor: str, committed: int) -> None:
        """The anchor after this round is on its way from another owner."""
        self.donor, self.catches_up_to, self._donated = donor, committed, []

    def donation(self, peer: str, place: RingPlace, data: torch.Tensor) -> torch.Tensor | None:
        """A piece of the anchor has come; all of it, once this was the last. PeerError for one that is not awaited."""
        if peer != self.donor or place.chunk != len(self._donated) or data.numel() % 4:
            raise PeerError(f"{peer} sent a piece of an anchor of ring {place.ring} that is not awaited")
        self._donated.append(data.view(torch.float32))
        if sum(piece.numel() for piece in self._donated) > 2 * self.state.vector.coded_values:
            raise PeerError(f"{peer} sent more than the anchor of ring {place.ring}")
        if not place.last:
            return None
        whole, self._donated, self.donor = torch.cat(self._donated), [], ""
        return whole

    def forget(self, round: int) -> None:
        """Nothing more of rounds up to this one is awaited."""
        self.over = max(self.over, round)
        if self.joined is None or self.joined.round <= self.over:
            if self.attempt is not None:
                self.attempt.close()
            self.joined = self.attempt = None
            self.after, self.agreed, self.donor, self._donated = "", (), "", []
            self.decided.set()

    # On the rings' own thread, like all that changes the state.

    def commit(self, joined: JoinedRound, reduce: RingReduce) -> Shift:
        """An attempt counts: how the stage is to follow the anchor."""
        behind = tuple(most - own for most, own in zip(self.agreed, joined.counters, strict=True))
        return self._moved(Shift(self.state.commit(joined.round, joined.contribution, reduce), behind))

    def catch_up(self, donated: torch.Tensor) -> Shift:
        """Takes over another owner's anchor: how the stage is to follow it. PeerError where it does not fit."""
        return self._moved(Shift(self.state.catch_up(self.catches_up_to, donated)))

    def contribute(self, snapshot: torch.Tensor, counters: list[int], shifted: int) -> Contribution:
        """What this owner has learned since the anchor, from a snapshot of a stage that had so many of the shifts.

        One is taken between two microbatches, whenever that is, and word that the round before counts may come later.
        So what the snapshot lacks is made up for: a difference from the new anchor must not hold what is in that
        anchor already.
        """
        views = self.state.vector.views(snapshot)
        for missing in self._lacking(shifted):
            for name, add in missing.change.adds.items():
                views[name].add_(add)
                if name in missing.change.not_negative:
                    views[name].clamp_(min=0)
            for index, behind in enumerate(missing.counters):
                counters[index] += behind
        return self.state.contribute(snapshot)

    def complete(self, tensors: dict[str, torch.Tensor], shifted: int) -> None:
        """Makes a copy of the stage's state, which had so many of the shifts, go with this ring's anchor, and adds that
        and what the outer optimizer remembers."""
        for missing in self._lacking(shifted):
            adds = {**missing.change.adds, **counted(self.ring, tensors, missing.counters)}
            for name, add in adds.items():
                if name in tensors:
                    tensors[name].add_(add.to(tensors[name].dtype))
                    if name in missing.change.not_negative:
                        tensors[name].clamp_(min=0)
        for name, view in self.state.vector.parameter_views(self.state.anchor).items():
            tensors[f"anchor:{name.removeprefix('param:')}"] = view.clone()
        for name, view in self.state.outer_views().items():
            tensors[f"outer:{name.removeprefix('param:')}"] = view.clone()

    def forget_shifts(self, shifted: int) -> None:
        """No snapshot waits that could lack one of the first so many."""
        del self._shifts[: max(0, len(self._shifts) - (self._made - shifted))]

    def _lacking(self, shifted: int) -> list[Shift]:
        """Those that a stage which had so many does not have."""
        lacking = self._made - shifted
        assert lacking <= len(self._shifts)
        return self._shifts[len(self._shifts) - lacking :]

    def _moved(self, shift: Shift) -> Shift:
        self._shifts.append(shift)
        self._made += 1
        return shift


def flat(vector: RingVector, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The ring's tensors in one; an optimizer keeps nothing before its first update, which is as good as zeros."""
    missing = {entry.name: torch.zeros(entry.shape) for entry in vector.plain if entry.name not in tensors}
    return vector.flatten({**tensors, **missing})


def counters_of(ring: Ring, tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """All counters of the ring, one after the other."""
    return [int(value) for name in _counter_names(ring) for value in tensors[name].flatten().tolist()]


def counted(ring: Ring, tensors: Mapping[str, torch.Tensor], behind: Sequence[int]) -> dict[str, torch.Tensor]:
    """What each counter is behind the largest of all that took part, in the shapes of the counters."""
    names = _counter_names(ring)
    parts = torch.split(torch.tensor(behind, dtype=torch.int64), [tensors[name].numel() for name in names])
    return {name: part.reshape(tensors[name].shape) for name, part in zip(names, parts, strict=True)}


def _remembered(vector: RingVector, ring: Ring, saved: Mapping[str, torch.Tensor]) -> torch.Tensor:
    state = torch.zeros(vector.coded_values)
    views = vector.parameter_views(state)
    for key in ring.parameters:
        view, tensor = views[f"param:{key}"], saved.get(key)
        if tensor is None:
            continue
        if tensor.shape != view.shape or tensor.dtype != torch.float32 or not torch.isfinite(tensor).all():
            raise GraphError(f"what rounds are to remember of {key[:80]!r} does not fit that parameter")
        view.copy_(tensor)
    return state


def _counter_names(ring: Ring) -> list[str]:
    return [f"buffer:{key}" for key in ring.counters]

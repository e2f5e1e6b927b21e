"""A ring as one of its owners sees it: the state that lasts, and the round that the owner has joined."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import torch

from ravnest.averaging.outer.outer import outer_named
from ravnest.averaging.ring_reduce import RingReduce
from ravnest.averaging.ring_state import Contribution, RingState
from ravnest.averaging.segments import default_piece_values
from ravnest.averaging.settings import RingSettings
from ravnest.codecs.codec import codec_named
from ravnest.engine.weights.moments import moment_names
from ravnest.errors import GraphError
from ravnest.net.frames.frames import RingPlace
from ravnest.net.v1.control_pb2 import Ring
from ravnest.provider.replicas.format import Restored, RingStand
from ravnest.provider.rings.attempt import RingAttempt
from ravnest.provider.rings.donation import Donation
from ravnest.provider.rings.ring_tensors import counter_tensors, flat, restored_parameters, ring_vector
from ravnest.provider.rings.shifts import Shift, ShiftLog
from ravnest.spec import OptimizerSpec


@dataclass(frozen=True, slots=True)
class RingSnapshot:
    """A ring's part of a snapshot of the stage."""

    values: torch.Tensor
    counters: list[int]
    shifted: int
    """The number of shifts that the stage had made by then."""


@dataclass(slots=True)
class CurrentAttempt:
    """The attempt that runs now, or the last one of the round."""

    run: RingAttempt
    after: str
    """The owner that this one sends to."""
    counters: tuple[int, ...]
    """For each counter the largest value of all members."""


@dataclass(slots=True)
class JoinedRound:
    """A round that this owner has joined."""

    round: int
    version: int
    """The version of the stage when the snapshot was taken."""
    samples: int
    """The samples that the stage had trained on by then."""
    contribution: Contribution
    counters: list[int]
    attempt: CurrentAttempt | None = None
    donation: Donation | None = None
    """The donation that this owner waits for, if any."""
    is_urgent: bool = False
    """Whether training stands still until the round is over, so that its pieces are not held back."""


@dataclass
class OwnedRing:
    """A ring, and the progress of this owner in it."""

    ring: Ring
    state: RingState
    samples: int = 0
    """The samples that this stage had trained on at the snapshot of the last round that counted."""
    joined: JoinedRound | None = None
    over: int = 0
    """The last round that is over for this owner."""
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    """Not set while this owner has the mean of an attempt and waits for the coordinator's decision about it."""
    shifted: int = 0
    """The number of shifts in the stage. Belongs to the thread that owns torch."""
    known_shifted: int = 0
    """The number of those that the network's loop knows of."""
    shifts: ShiftLog = field(default_factory=ShiftLog)
    """Belongs to the rings' own thread."""

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
        """The ring of a stage with these tensors, as deployed; GraphError if the stage lacks one of them.

        `restored`: the outer optimizer's state in a resumed run, and the anchor of another owner if this stage begins
        with that owner's replica. `keeps_memory`: see `RingState`.
        """
        vector = ring_vector(ring, tensors, moment_names(optimizer) if settings.optimizer_state else ())
        outer = outer_named(settings.outer, settings.outer_rate, settings.outer_momentum)
        if outer.keeps_state and any(key in restored.outer for key in ring.parameters):
            outer.state = restored_parameters(vector, ring, restored.outer)
        values = flat(vector, tensors)
        if ring.ring in restored.rings:
            lacking = [key for key in ring.parameters if key not in restored.anchors]
            if lacking:
                raise GraphError(f"a part of a replica lacks the anchor of {lacking[0][:80]!r}")
            values[: vector.coded_values] = restored_parameters(vector, ring, restored.anchors)
        stand = restored.rings.get(ring.ring, RingStand())
        owned = cls(ring, RingState(vector, values, outer, codec_named(settings.codec), keeps_memory))
        owned.state.committed = stand.committed
        # This stage counts its samples from 0, and the next round includes those of the replica since its anchor.
        owned.samples = -stand.samples
        owned.decided.set()
        return owned

    @property
    def number(self) -> int:
        return self.ring.ring

    def piece_values(self, members: int, max_values: int) -> int:
        """The number of values in a piece of a reduce with this many members; `max_values` 0: the default."""
        values = self.state.vector.values
        return (
            default_piece_values(values, members, max_values) if max_values else default_piece_values(values, members)
        )

    def is_early(self, place: RingPlace) -> bool:
        """Whether this piece belongs to an attempt or a donation that this owner has not been told of yet."""
        if place.round <= self.over:
            return False
        if self.joined is None or place.round > self.joined.round:
            return True
        if place.donation:
            return self.joined.donation is None
        attempt = self.joined.attempt
        return attempt is None or place.attempt > attempt.run.number

    def awaits(self, place: RingPlace) -> bool:
        """Whether this piece belongs to the current attempt or donation."""
        if self.joined is None or place.round != self.joined.round or place.round <= self.over:
            return False
        if place.donation:
            return self.joined.donation is not None
        attempt = self.joined.attempt
        return attempt is not None and attempt.run.number == place.attempt

    def forget(self, round: int) -> None:
        """Rounds up to this one are over: await nothing more of them."""
        self.over = max(self.over, round)
        if self.joined is None or self.joined.round <= self.over:
            if self.joined is not None and self.joined.attempt is not None:
                self.joined.attempt.run.close()
            self.joined = None
            self.decided.set()

    # The methods below change or read the state of the ring, and belong to the rings' own thread.

    def commit(self, joined: JoinedRound, counters: tuple[int, ...], reduce: RingReduce) -> Shift:
        """Move the anchor by a committed round; returns how the stage follows it."""
        behind = tuple(largest - own for largest, own in zip(counters, joined.counters, strict=True))
        return self.shifts.append(Shift(self.state.commit(joined.round, joined.contribution, reduce), behind))

    def catch_up(self, committed: int, donated: torch.Tensor) -> Shift:
        """Take over another owner's anchor; returns how the stage follows it. PeerError if the donation does not
        fit."""
        return self.shifts.append(Shift(self.state.catch_up(committed, donated)))

    def contribute(self, snapshot: RingSnapshot) -> Contribution:
        """This owner's contribution to a round. Uses up the values and completes the counters of the snapshot."""
        views = self.state.vector.views(snapshot.values)
        for missing in self.shifts.after(snapshot.shifted):
            missing.add_to(views)
            for index, behind in enumerate(missing.counters):
                snapshot.counters[index] += behind
        return self.state.contribute(snapshot.values)

    def complete(self, tensors: dict[str, torch.Tensor], shifted: int) -> None:
        """Bring a copy of the stage's state, which contains this many shifts, up to the anchor, and add the anchor and
        the outer optimizer's state to it."""
        for missing in self.shifts.after(shifted):
            missing.add_to(tensors)
            if missing.counters:
                for name, behind in counter_tensors(self.ring, tensors, missing.counters).items():
                    tensors[name].add_(behind.to(tensors[name].dtype))
        tensors |= self.outer_tensors()
        tensors |= {f"anchor:{name.removeprefix('param:')}": tensor for name, tensor in self.anchor_tensors().items()}

    def anchor_tensors(self) -> dict[str, torch.Tensor]:
        """Copies of the anchor, by the names of the stage's parameters."""
        views = self.state.vector.parameter_views(self.state.anchor)
        return {name: view.clone() for name, view in views.items()}

    def outer_tensors(self) -> dict[str, torch.Tensor]:
        """Copies of the outer optimizer's state, by the names that checkpoints and replicas use."""
        return {f"outer:{n.removeprefix('param:')}": view.clone() for n, view in self.state.outer_views().items()}

"""What an owner keeps of one ring between rounds: the anchor, the outer optimizer's state, what encoding lost.

The anchor is the parameters after the last committed round, bit for bit the same at all members. A member contributes
how far it has come from there; a commit moves the anchor by one step that all compute alike, and gives the local
change: where the step differs from the member's own way. Adding that to the parameters of now keeps what was learned
since.

Nothing here changes except in `commit` and `catch_up`. A round that fails leaves no trace, and the next contribution
holds everything learned since the anchor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ravnest.averaging.norms import carried_norm, norm
from ravnest.averaging.outer.outer import Outer
from ravnest.averaging.ring_reduce import RingReduce
from ravnest.averaging.vector import RingVector
from ravnest.codecs.codec import Codec
from ravnest.errors import PeerError


@dataclass(slots=True)
class Contribution:
    """What one member brings into a round; all attempts of the round use the same."""

    values: Tensor
    """Differences from the anchor, then plain values. A commit takes its memory over."""
    norm: float
    """The length of the coded section."""
    finite: bool
    """Whether all values are, of both sections. What is not must not go into a round."""
    spent: bool = False


@dataclass(frozen=True, slots=True)
class TensorUpdate:
    """What a commit, or catching up, does to the tensors of now. Apply it before the next snapshot is taken."""

    adds: dict[str, Tensor]
    """By name and in shape: to be added to the tensors of now."""
    becomes: dict[str, Tensor] | None = None
    """What the tensors are exactly where nothing changed since the snapshot; lies in the ring's own memory, so copy."""
    not_negative: frozenset[str] = field(default_factory=frozenset)
    """Tensors without a negative value here and in the mean (variances, second moments): where one has none before
    `adds` is added it must not get any, so clamp it at zero."""


class RingState:
    """One member's state of one ring. Not thread-safe."""

    def __init__(
        self, vector: RingVector, values: Tensor, outer: Outer, codec: Codec, keeps_memory: bool = False
    ) -> None:
        """`values`: the ring's tensors as deployed, flat; the same in all clusters. Taken over.

        With `keeps_memory` the mean of the next round is made in the memory of the last one, where that counted:
        fresh memory from the system costs as much as a pass over it.
        """
        assert values.numel() == vector.values
        self.vector = vector
        self.outer = outer
        self.codec = codec
        self.committed = 0
        """The round of the last commit, 0 at first."""
        # A slice would keep the memory of the plain section alive.
        self.anchor = values[: vector.coded_values].clone() if vector.plain else values
        self._residual: Tensor | None = None
        self._carried = 0.0
        self._keeps_memory = keeps_memory
        self._memory: Tensor | None = None
        """Of the last mean that counted. Everybody had it by then: nothing is sent from there, or received there."""

    def outer_views(self) -> dict[str, Tensor]:
        """What the outer optimizer remembers of each parameter, in its shape; empty where it remembers nothing."""
        return {} if self.outer.state is None else self.vector.parameter_views(self.outer.state)

    def contribute(self, snapshot: Tensor) -> Contribution:
        """What this member has learned since the anchor, from a flat snapshot of its tensors, which is taken over."""
        assert snapshot.numel() == self.vector.values
        coded = snapshot[: self.vector.coded_values].sub_(self.anchor)
        length = norm(coded)
        finite = math.isfinite(length) and math.isfinite(norm(snapshot[self.vector.coded_values :]))
        return Contribution(snapshot, length, finite)

    def reduce(
        self,
        contribution: Contribution,
        weights: Sequence[float],
        index: int,
        norms: Sequence[float] | None,
        piece_values: int | None = None,
    ) -> RingReduce:
        """A fresh attempt. Where `norms` grants this member less than its difference has, it is clipped to that."""
        assert not contribution.spent
        scale = 1.0
        if norms is not None and norms[index] < contribution.norm * (1 - 1e-6):
            scale = norms[index] / contribution.norm
        # Given away: of an attempt that fails, pieces may come and go when the next one has long begun.
        memory, self._memory = self._memory, None
        return RingReduce(
            contribution.values,
            self.vector.coded_values,
            weights,
            index,
            self.codec,
            norms=norms,
            residual=self._residual,
            piece_values=piece_values,
            scale=scale,
            carried=self._carried,
            memory=memory,
        )

    def commit(self, round: int, contribution: Contribution, done: RingReduce) -> TensorUpdate:
        """Takes the step of a reduced round. Uses up the contribution and the result; both were this ring's own."""
        assert done.done and not contribution.spent
        contribution.spent = True
        coded = self.vector.coded_values
        own, mean = contribution.values, done.result
        kept = self._not_negative(own, mean)
        step = self.outer.step(mean[:coded])
        self.anchor.add_(step)
        torch.sub(step, own[:coded], out=own[:coded])
        torch.sub(mean[coded:], own[coded:], out=own[coded:])
        self.committed = round
        self._residual = done.next_residual
        self._carried = carried_norm(self.codec, self._carried, done.declared)
        plain = mean[coded:]
        if self._keeps_memory:
            self._memory, plain = mean, plain.clone()
        becomes = {**self.vector.parameter_views(self.anchor), **self.vector.plain_views(plain)}
        return TensorUpdate(self.vector.views(own), becomes, kept)

    def donation(self) -> Tensor:
        """The anchor and, where there is one, the outer state: for a member that missed a commit."""
        if self.outer.state is None:
            return self.anchor.clone()
        return torch.cat((self.anchor, self.outer.state))

    def catch_up(self, committed: int, donation: Tensor) -> TensorUpdate:
        """Takes over where a current member stands; what was learned here stays on top of it, and so does a
        contribution that was made before. PeerError, and nothing changed: the donation does not fit or is not finite.
        """
        coded = self.vector.coded_values
        sizes = {coded, 2 * coded} if self.outer.keeps_state else {coded}
        if donation.dtype != torch.float32 or donation.dim() != 1 or donation.numel() not in sizes:
            raise PeerError(
                f"to catch up, a ring of {coded} values was sent {donation.numel()} as {donation.dtype}; "
                f"with the outer optimizer {self.outer.name!r} there must be {' or '.join(map(str, sorted(sizes)))}"
            )
        if not math.isfinite(norm(donation)):
            raise PeerError("what was sent to catch up holds values that are not finite")
        moved = torch.sub(donation[:coded], self.anchor)
        self.anchor.copy_(donation[:coded])
        self.outer.state = donation[coded:].clone() if donation.numel() > coded else None
        self.committed = committed
        return TensorUpdate(self.vector.parameter_views(moved))

    def _not_negative(self, own: Tensor, mean: Tensor) -> frozenset[str]:
        coded = self.vector.coded_values
        means = self.vector.plain_views(mean[coded:])
        return frozenset(
            name
            for name, values in self.vector.plain_views(own[coded:]).items()
            if values.numel() and float(values.min()) >= 0.0 and float(means[name].min()) >= 0.0
        )

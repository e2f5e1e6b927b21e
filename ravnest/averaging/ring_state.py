"""State of one owner in one ring between rounds: the anchor, the outer optimizer's state and the encoding errors.

The anchor is the parameters after the last committed round, the same to the bit at all members. A member contributes
its difference from the anchor. A commit moves the anchor by a step that all members compute in the same way, and
returns how the member's own tensors must change: by the step minus the member's own difference. Adding that change to
the current parameters keeps what the member learned since the snapshot.

Only `commit` and `catch_up` change the state. A round that fails leaves no trace, and the next contribution holds
everything learned since the anchor.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ravnest.averaging.norms import next_residual_norm, norm
from ravnest.averaging.outer.outer import Outer
from ravnest.averaging.ring_reduce import ErrorFeedback, RingReduce
from ravnest.averaging.segments import RingPosition
from ravnest.averaging.vector import RingVector
from ravnest.codecs.codec import Codec
from ravnest.errors import PeerError


@dataclass(slots=True)
class Contribution:
    """A member's input to a round, the same for all attempts of the round."""

    values: Tensor
    """Differences from the anchor, then plain values. A commit takes the memory over."""
    norm: float
    """The length of the coded section."""
    finite: bool
    """Whether all values of both sections are finite. A contribution that is not must not go into a round."""
    spent: bool = False
    """Whether a commit has used it up."""


@dataclass(frozen=True, slots=True)
class TensorUpdate:
    """Change of a stage's tensors by a commit or by catching up. Apply it before the next snapshot is taken."""

    adds: dict[str, Tensor]
    """Differences to add to the current tensors, by name and in their shape."""
    becomes: dict[str, Tensor] | None = None
    """The exact new values for a stage that has not changed since the snapshot. They lie in the ring's memory: copy
    them."""
    not_negative: frozenset[str] = field(default_factory=frozenset)
    """Tensors without a negative value here and in the mean (variances, second moments). Rounding must not make them
    negative: clamp them at zero after adding."""


class RingState:
    """One member's state of one ring. Not thread-safe."""

    def __init__(
        self, vector: RingVector, values: Tensor, outer: Outer, codec: Codec, keeps_memory: bool = False
    ) -> None:
        """`values`: the ring's tensors as deployed, flat, the same in all clusters; this object takes them over.

        With `keeps_memory`, the mean of a round is computed in the memory of the last committed mean, because new
        memory from the system costs as much as a pass over it.
        """
        assert values.numel() == vector.values
        self.vector = vector
        self.outer = outer
        self.codec = codec
        self.committed = 0
        """The round of the last commit; 0 before the first."""
        # A slice would keep the memory of the plain section in use.
        self.anchor = values[: vector.coded_values].clone() if vector.plain else values
        self._feedback = ErrorFeedback()
        self._keeps_memory = keeps_memory
        self._memory: Tensor | None = None
        """Memory of the last committed mean. All members had the mean by then, so no line reads or writes it."""

    def outer_views(self) -> dict[str, Tensor]:
        """The outer optimizer's state of each parameter, in its shape; empty while it has none."""
        return {} if self.outer.state is None else self.vector.parameter_views(self.outer.state)

    def contribute(self, snapshot: Tensor) -> Contribution:
        """The difference of a flat snapshot of this member's tensors from the anchor. Takes the snapshot over."""
        assert snapshot.numel() == self.vector.values
        coded = snapshot[: self.vector.coded_values].sub_(self.anchor)
        length = norm(coded)
        finite = math.isfinite(length) and math.isfinite(norm(snapshot[self.vector.coded_values :]))
        return Contribution(snapshot, length, finite)

    def reduce(
        self,
        contribution: Contribution,
        position: RingPosition,
        piece_values: int | None = None,
        codec: Codec | None = None,
    ) -> RingReduce:
        """A new attempt. A contribution that is longer than its declared norm in `position` is clipped to it. `codec`:
        that of this attempt, the same at all members; None: the ring's own."""
        assert not contribution.spent
        scale, norms = 1.0, position.norms
        if norms is not None and norms[position.index] < contribution.norm * (1 - 1e-6):
            scale = norms[position.index] / contribution.norm
        # The attempt keeps the memory for good: when it fails, its pieces may still come and go during the next one.
        memory, self._memory = self._memory, None
        return RingReduce(
            contribution.values,
            self.vector.coded_values,
            position,
            codec or self.codec,
            feedback=self._feedback,
            piece_values=piece_values,
            scale=scale,
            memory=memory,
        )

    def commit(self, round: int, contribution: Contribution, done: RingReduce) -> TensorUpdate:
        """Take the step of a reduced round. Uses up the contribution and the memory of the result."""
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
        # A codec without feedback leaves the residual as it was, for a later round with another codec.
        bound = self._feedback.norm
        if done.codec.feedback:
            bound = next_residual_norm(done.codec, bound, done.position.declared_length)
        self._feedback = ErrorFeedback(done.next_residual, bound)
        plain = mean[coded:]
        if self._keeps_memory:
            self._memory, plain = mean, plain.clone()
        becomes = {**self.vector.parameter_views(self.anchor), **self.vector.plain_views(plain)}
        return TensorUpdate(self.vector.views(own), becomes, kept)

    def donation(self) -> Tensor:
        """The anchor and, if there is one, the outer state, for a member that missed a commit."""
        if self.outer.state is None:
            return self.anchor.clone()
        return torch.cat((self.anchor, self.outer.state))

    def catch_up(self, committed: int, donation: Tensor) -> TensorUpdate:
        """Take over the anchor and the outer state of a member that has the commits. The member's own difference from
        the anchor stays as it is, and so does a contribution made before.

        PeerError, with nothing changed, if the donation does not fit or is not finite.
        """
        coded = self.vector.coded_values
        sizes = {coded, 2 * coded} if self.outer.keeps_state else {coded}
        if donation.dtype != torch.float32 or donation.dim() != 1 or donation.numel() not in sizes:
            raise PeerError(
                f"to catch up, a ring of {coded} values was sent {donation.numel()} as {donation.dtype}; "
                f"with the outer optimizer {self.outer.name!r} there must be {' or '.join(map(str, sorted(sizes)))}"
            )
        if not math.isfinite(norm(donation)):
            raise PeerError("the values sent to catch up are not finite")
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

"""Reports of an owner to the coordinator about the rounds of its rings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ravnest.net.v1.control_pb2 import (
    ProviderMessage,
    RingApplied,
    RingFailed,
    RingJoined,
    RingReduced,
    RoundJoined,
)
from ravnest.provider.rings.attempt import RingAttempt
from ravnest.provider.rings.owned_ring import OwnedRing


@dataclass(frozen=True, slots=True)
class RingReports:
    """Sends the reports of one deployment's stage. Belongs to the network's loop."""

    deployment: str
    tell: Callable[[ProviderMessage], None]

    def joined(self, round: int, rings: Sequence[RingJoined]) -> None:
        """This owner has joined a round with these rings."""
        self.tell(ProviderMessage(round_joined=RoundJoined(deployment=self.deployment, round=round, rings=rings)))

    def reduced(self, round: int, ring: int, attempt: RingAttempt, is_direct: bool) -> None:
        """An attempt has the mean."""
        message = RingReduced(
            deployment=self.deployment,
            round=round,
            ring=ring,
            attempt=attempt.number,
            digest=attempt.reduce.digest,
            bytes_sent=attempt.bytes_sent,
            direct=is_direct,
        )
        self.tell(ProviderMessage(ring_reduced=message))

    def caught_up(self, round: int, ring: int) -> None:
        """This owner has the donor's anchor."""
        message = RingReduced(deployment=self.deployment, round=round, ring=ring, caught_up=True)
        self.tell(ProviderMessage(ring_reduced=message))

    def applied(self, round: int, ring: int) -> None:
        """The mean of a committed round is in the stage."""
        self.tell(ProviderMessage(ring_applied=RingApplied(deployment=self.deployment, round=round, ring=ring)))

    def failed(self, owned: OwnedRing, attempt: int, blamed: str, reason: str) -> None:
        """This owner cannot finish an attempt (0: a catch-up) because of the node that it blames."""
        self._tell_failed(owned, attempt, blamed, reason, again=False)

    def line_broke(self, owned: OwnedRing, attempt: int, reason: str) -> None:
        """A line broke in the middle of an attempt; the same members may try again."""
        self._tell_failed(owned, attempt, "", reason, again=True)

    def _tell_failed(self, owned: OwnedRing, attempt: int, blamed: str, reason: str, again: bool) -> None:
        failed = RingFailed(
            deployment=self.deployment,
            round=0 if owned.joined is None else owned.joined.round,
            ring=owned.number,
            attempt=attempt,
            blamed=blamed,
            reason=reason,
            again=again,
        )
        self.tell(ProviderMessage(ring_failed=failed))

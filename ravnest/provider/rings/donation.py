"""Receipt of a donation: the anchor and the outer optimizer's state, sent by an owner that has the newest round."""

import torch

from ravnest.errors import PeerError
from ravnest.net.frames.frames import RingPlace


class Donation:
    """A donation that is on its way to this owner."""

    def __init__(self, donor: str, committed: int, max_values: int) -> None:
        self.donor = donor
        self.committed = committed
        """The round of the anchor."""
        self.values: torch.Tensor | None = None
        """The whole donation, once its last piece has come."""
        self._max_values = max_values
        self._pieces: list[torch.Tensor] = []
        self._count = 0

    @property
    def received(self) -> int:
        """The number of pieces that have come so far."""
        return len(self._pieces)

    def take(self, peer: str, place: RingPlace, data: torch.Tensor) -> bool:
        """Take the next piece; returns whether it was the last. PeerError for a piece that is not the next one, comes
        from another node, or makes the donation too long."""
        if peer != self.donor or place.chunk != len(self._pieces) or data.numel() % 4:
            raise PeerError(f"{peer} sent a piece of an anchor of ring {place.ring} that is not awaited")
        self._pieces.append(data.view(torch.float32))
        self._count += self._pieces[-1].numel()
        if self._count > self._max_values:
            raise PeerError(f"{peer} sent more than the anchor of ring {place.ring}")
        if place.last:
            self.values, self._pieces = torch.cat(self._pieces), []
        return place.last

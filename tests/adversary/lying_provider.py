"""A provider that lies in rings: `ravnest join`, but for what it says of its share and for the pieces it sends.

It tells one lie after the other, each until it is found out, and is honest after that. A deployment for which the file
that RAVNEST_LATE names is there is an honest one, whose control line is slow once.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ravnest.averaging.ring_state import Contribution, RingState
from ravnest.cli.main import main
from ravnest.net.frames.frames import RingPlace
from ravnest.net.v1.control_pb2 import CoordinatorMessage, ProviderMessage
from ravnest.provider.rings.lines import RingLines
from ravnest.provider.rings.rings import Rings

FAR = 1e3
"""How far beyond what anybody learns each of its parameters is."""
LATE_SECONDS = 1.0


LIES = ("more samples", "not finite", "too short", "far away", "far away, and says it is not", "")
_caught = 0
"""How many of them have been found out. Not all can be in any round: nobody judges who has trained on nothing."""


def the_lie() -> str:
    return "" if hears_late() else LIES[_caught]


def hears_late() -> bool:
    return Path(os.environ["RAVNEST_LATE"]).exists()


def _learn_from(message: CoordinatorMessage) -> None:
    """Goes on to the next lie, once this one is found out."""
    global _caught
    kind, reason = message.WhichOneof("body"), message.ring_abort.reason
    bounded = kind == "ring_commit" and the_lie() == "more samples"
    left_out = kind == "ring_abort" and ("says:" in reason or "is left out" in reason)
    if the_lie() and (bounded or left_out):
        _caught += 1


def _lie_about_its_share() -> None:
    made = Rings.__init__

    def make(
        self: Rings,
        order: Any,
        stage: Any,
        node_id: Any,
        loop: Any,
        tell: Callable[[ProviderMessage], None],
        *more: Any,
    ) -> None:

        def lie(message: ProviderMessage) -> None:
            if the_lie() == "more samples" and message.WhichOneof("body") == "round_joined":
                for ring in message.round_joined.rings:
                    ring.samples = 1000 * ring.samples + 1000
            tell(message)

        made(self, order, stage, node_id, loop, lie, *more)

    Rings.__init__ = make  # type: ignore[method-assign]


def _lie_about_its_difference() -> None:
    contribute = RingState.contribute

    def lie(self: RingState, snapshot: torch.Tensor) -> Contribution:
        if the_lie() in ("far away", "far away, and says it is not"):
            snapshot[: self.vector.coded_values].add_(FAR)
        found = contribute(self, snapshot)
        if the_lie() == "far away, and says it is not":
            found.norm = 0.01
        return found

    RingState.contribute = lie  # type: ignore[method-assign]


def _lie_in_pieces() -> None:
    put = RingLines.put
    lies: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "not finite": lambda data: torch.full_like(data, 255),
        "too short": lambda data: data[:-4].clone(),
    }

    def lie(self: RingLines, node_id: str, place: RingPlace, data: torch.Tensor) -> None:
        put(self, node_id, place, data if place.donation else lies.get(the_lie(), lambda data: data)(data))

    RingLines.put = lie  # type: ignore[method-assign]


def _hear_late() -> None:
    """No lie, but a line that is slow once, in the middle of it: what the coordinator says comes late, and in order."""
    obey = Rings.obey
    held: dict[int, list[CoordinatorMessage] | None] = {}

    def later(self: Rings, message: CoordinatorMessage) -> None:
        _learn_from(message)
        waiting = held.get(id(self))
        if waiting is not None:
            waiting.append(message)
        elif hears_late() and message.WhichOneof("body") == "ring_commit" and id(self) not in held:
            held[id(self)] = [message]
            self._loop.call_later(LATE_SECONDS, release, self)
        else:
            obey(self, message)

    def release(self: Rings) -> None:
        for message in held[id(self)] or ():
            obey(self, message)
        held[id(self)] = None

    Rings.obey = later  # type: ignore[method-assign]


if __name__ == "__main__":
    _lie_about_its_share()
    _lie_about_its_difference()
    _lie_in_pieces()
    _hear_late()
    sys.exit(main())

"""Pieces wait for their turn on the line, except those of a round that training stands still for."""

import asyncio
import queue
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from ravnest.net.frames.frames import Frame, RingPlace
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.v1.control_pb2 import Neighbour
from ravnest.provider.rings.lines import RingLines
from tests.provider.rings.wanting import Wanting

SECONDS = 20.0
BACKGROUND, URGENT = 2, 3
"""Rounds: see `Wanting.is_urgent`."""


def test_each_piece_waits_for_its_turn_unless_its_round_is_urgent(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: queue.Queue[None] = queue.Queue()
    asked: queue.Queue[int] = queue.Queue()

    class Turns:
        """A transfer whose turns the test gives; an urgent one takes none."""

        def __init__(self, urgent: bool) -> None:
            self._urgent = urgent

        def wait_turn(self, size_bytes: int, is_over: Callable[[], bool]) -> None:
            if not self._urgent:
                asked.put(size_bytes)
                turns.get(timeout=SECONDS)

    class Budget:
        def transfer(self, kind: str, *, urgent: bool = False) -> Turns:
            assert kind == "round"
            return Turns(urgent)

    async def test() -> None:
        linked: asyncio.Queue[RingPlace | None] = asyncio.Queue()

        async def over_the_link(frame: Frame) -> None:
            linked.put_nowait(frame.piece)

        # Without an address for direct lines.
        peer, nothing = Neighbour(node="b"), cast(Any, None)
        wanting = Wanting(lambda peer: None)
        lines = RingLines([peer], 1, NodeIdentity.new(), nothing, cast(Any, wanting), cast(Any, Budget()))
        [end] = lines.ends
        monkeypatch.setattr(end.link, "send", over_the_link)
        places = [RingPlace(BACKGROUND, 0, chunk=0), RingPlace(URGENT, 0, chunk=1), RingPlace(BACKGROUND, 0, chunk=2)]
        for size, place in enumerate(places, start=100):
            lines.put("b", place, torch.ones(size, dtype=torch.uint8))
        assert await asyncio.to_thread(asked.get, True, SECONDS) == 100
        assert linked.empty(), "it is not its turn"
        turns.put(None)
        # The second one asks for no turn, and the third one waits.
        assert [await linked.get(), await linked.get()] == places[:2]
        assert await asyncio.to_thread(asked.get, True, SECONDS) == 102
        assert linked.empty() and asked.empty()
        turns.put(None)
        assert await linked.get() == places[2]
        await lines.close(1.0)

    async def bounded() -> None:
        async with asyncio.timeout(SECONDS):
            await test()

    asyncio.run(bounded())

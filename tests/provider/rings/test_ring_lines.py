"""Lines between owners of a ring: direct where they can be had, links where not, and direct again after a while."""

import asyncio
import queue
from typing import Any, cast

import pytest
import torch

from ravnest.coordinator.access.admission import Admission
from ravnest.net.direct_line import DirectLine
from ravnest.net.direct_server import DirectServer
from ravnest.net.frames.frames import Frame, RingPlace
from ravnest.net.identity.identity import Identity
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.v1.control_pb2 import Neighbour
from ravnest.provider.rings import direct_line_retries as direct_tries
from ravnest.provider.rings.direct_line_retries import FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS, DirectLineRetries
from ravnest.provider.rings.lines import RingLines
from tests.provider.rings.wanting import Wanting

SECONDS = 20.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_that_failed_is_tried_again_in_a_later_round_after_a_pause_that_grows() -> None:
    clock = Clock()
    tries = DirectLineRetries(clock)
    assert tries.is_due(1)
    pauses, round = list[float](), 1
    for _ in range(10):
        tries.failed(round)
        failed = clock.now
        assert not tries.is_due(round), "the pieces of a round do not change over to another line"
        while not tries.is_due(round := round + 1):
            clock.now += 1.0
            assert not tries.is_due(round), "it is decided once a round"
        pauses.append(clock.now - failed)
    assert pauses[:4] == [FIRST_PAUSE_SECONDS * factor for factor in (1, 2, 4, 8)]
    assert max(pauses) == pauses[-1] == LAST_PAUSE_SECONDS


def test_a_line_that_breaks_with_the_first_piece_of_a_round_is_not_tried_again_in_it() -> None:
    clock = Clock()
    tries = DirectLineRetries(clock)
    assert tries.is_due(1)
    tries.carried(1)
    tries.failed(2)
    clock.now += FIRST_PAUSE_SECONDS
    assert not tries.is_due(2) and tries.is_due(3)


def test_a_line_that_outlives_a_round_has_its_failures_forgotten() -> None:
    clock = Clock()
    tries = DirectLineRetries(clock)
    for round in (1, 2, 3):
        clock.now += LAST_PAUSE_SECONDS
        assert tries.is_due(round)
        # It broke in the middle of the round that it was dialled for.
        tries.carried(round)
        tries.failed(round)
    clock.now += 4 * FIRST_PAUSE_SECONDS
    assert tries.is_due(4)
    tries.carried(4)
    tries.carried(5)
    tries.failed(5)
    clock.now += FIRST_PAUSE_SECONDS
    assert not tries.is_due(5) and tries.is_due(6)


def _nodes(*names: str) -> list[NodeIdentity]:
    admission = Admission.in_memory()
    nodes = [NodeIdentity.new() for _ in names]
    for name, node in zip(names, nodes, strict=True):
        identity = Identity("invite", admission.invite("127.0.0.1", 1).token.id)
        node.adopt(admission.join(identity, node.request(), name).certificate, admission.authority.certificate)
    return nodes


def test_pieces_go_over_the_link_after_a_direct_line_broke_and_in_a_later_round_over_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(direct_tries, "FIRST_PAUSE_SECONDS", 0.0)
    ours, theirs = _nodes("a", "b")
    came: queue.Queue[tuple[DirectLine, RingPlace]] = queue.Queue()

    def take(line: DirectLine) -> None:
        while (piece := line.receive()) is not None:
            came.put((line, piece[1]))

    data = torch.ones(1 << 16, dtype=torch.uint8)
    server = DirectServer(theirs, lambda _: True, take)
    address = f"127.0.0.1:{server.start('127.0.0.1', 0)}"

    async def test() -> None:
        broken: asyncio.Queue[str] = asyncio.Queue()
        linked: asyncio.Queue[RingPlace | None] = asyncio.Queue()

        async def over_the_link(frame: Frame) -> None:
            linked.put_nowait(frame.piece)

        def put(round: int, chunk: int = 0) -> RingPlace:
            place = RingPlace(round, 0, chunk=chunk)
            lines.put("b", place, data)
            return place

        peer = Neighbour(node="b", direct_address=address)
        lines = RingLines([peer], 1, ours, cast(Any, None), Wanting(broken.put_nowait))
        [end] = lines.ends
        monkeypatch.setattr(end.link, "send", over_the_link)
        sent = put(1)
        first, place = await asyncio.to_thread(came.get, True, SECONDS)
        assert place == sent and lines.is_direct("b")
        first.close()
        chunk = 0
        while broken.empty():
            put(2, chunk)
            chunk += 1
            await asyncio.sleep(0)
        assert broken.get_nowait() == "b"
        sent = put(2, chunk)
        while await linked.get() != sent:
            pass
        assert not lines.is_direct("b")
        sent = put(3)
        while (arrived := await asyncio.to_thread(came.get, True, SECONDS))[1].round != 3:
            pass
        assert arrived[1] == sent and arrived[0] is not first and lines.is_direct("b")
        assert linked.empty()
        await lines.close(1.0)

    async def bounded() -> None:
        async with asyncio.timeout(SECONDS):
            await test()

    try:
        asyncio.run(bounded())
    finally:
        server.stop()

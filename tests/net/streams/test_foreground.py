"""A link that carries the foreground tells the budget of every byte once, however its connections end."""

import asyncio

import pytest
import torch

from ravnest.errors import PeerError
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.pacing.traffic_limit import TRAFFIC
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.net.v1.control_pb2 import Failed, ProviderMessage
from tests.net.secure_ends import run
from tests.net.streams.pipes import Pipe
from tests.swarms.connected import connected_swarm


class Counted:
    """Counts what a link tells."""

    def __init__(self) -> None:
        self.waiting = self.sent = 0
        self.deliveries: list[int] = []

    def queued(self, size_bytes: int) -> None:
        assert size_bytes > 0
        self.waiting += size_bytes

    def written(self, size_bytes: int) -> None:
        assert size_bytes > 0
        self.waiting -= size_bytes
        self.sent += size_bytes

    def delivered(self, size_bytes: int, seconds: float) -> None:
        assert seconds >= 0
        self.deliveries.append(size_bytes)

    def dropped(self, size_bytes: int) -> None:
        self.waiting -= size_bytes


@pytest.mark.parametrize("breaks", [3, 10**9])
def test_bytes_wait_until_they_are_written_or_their_connection_breaks(breaks: int) -> None:
    async def test() -> None:
        near, far = ResumableLink("far"), ResumableLink("near")
        counted = near.foreground = Counted()
        a, b = Pipe.pair(breaks)
        carrying = [asyncio.create_task(link.carry(end)) for link, end in ((near, a), (far, b))]  # type: ignore[arg-type]
        for number in range(10):
            await near.send(Frame(FrameKind.FORWARD, number, tensors={"x": torch.zeros(50_000)}))
        if breaks < 10:
            await asyncio.gather(*carrying, return_exceptions=True)
        else:
            for _ in range(10):
                await far.receive()
            while near.unconfirmed:
                await asyncio.sleep(0.001)
            assert len(counted.deliveries) == 10 and counted.sent > 2_000_000
        near.fail(PeerError("over"))
        far.fail(PeerError("over"))
        await asyncio.gather(*carrying, return_exceptions=True)
        assert counted.waiting == 0 and counted.sent == a.bytes_sent

    asyncio.run(asyncio.wait_for(test(), 20.0))


def test_every_stream_counts_towards_the_traffic_of_the_process() -> None:
    async def test() -> None:
        before = TRAFFIC.sent.total_bytes, TRAFFIC.received.total_bytes
        async with connected_swarm() as swarm:
            provider = await swarm.provider("anna")
            await provider.session.control.send(ProviderMessage(failed=Failed(message="x" * 400_000)))
            while provider.session.control.link.unconfirmed:
                await asyncio.sleep(0.001)
        assert TRAFFIC.sent.total_bytes - before[0] > 400_000
        assert TRAFFIC.received.total_bytes - before[1] > 400_000

    run(test())

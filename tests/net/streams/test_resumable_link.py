"""Frames arrive once and in order, however often the connection under a link breaks."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.errors import PeerError
from ravnest.net.frames.encoding import encode
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.streams.backoff import BackoffLimits
from ravnest.net.streams.resumable_link import ResumableLink
from tests.net.streams.pipes import Pipe


def _frame(number: int) -> Frame:
    return Frame(FrameKind.FORWARD, number, tensors={"x": torch.full((3,), float(number))})


async def _exchange(breaks: list[int], counts: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Both ends send while connections break after `breaks` frames each; what each end got."""
    # Long pauses between retries would be most of the time of the test.
    near, far = ResumableLink("far", backoff_limits=BackoffLimits(0.001, 0.01)), ResumableLink("near")
    tasks: list[asyncio.Task[None]] = []
    pending = list(breaks)

    async def dial() -> Pipe:
        a, b = Pipe.pair(pending.pop() if pending else 10**9)
        tasks.append(asyncio.create_task(_quietly(lambda: far.carry(b))))
        return a

    async def talk(link: ResumableLink, count: int, expected: int) -> list[int]:
        async def send() -> None:
            for number in range(count):
                await link.send(_frame(number))

        sending = asyncio.create_task(send())
        got: list[int] = []
        while len(got) < expected:
            frame = await link.receive()
            assert frame is not None
            assert frame.tensors["x"][0] == frame.microbatch
            got.append(frame.microbatch)
        await sending
        return got

    dialling = asyncio.create_task(_quietly(lambda: near.keep_dialling(dial)))
    got = await asyncio.gather(talk(near, counts[0], counts[1]), talk(far, counts[1], counts[0]))
    await near.close()
    assert await far.receive() is None
    await asyncio.gather(dialling, *tasks)
    return got[0], got[1]


async def _quietly(work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except PeerError:
        return


@settings(max_examples=40)
@given(breaks=st.lists(st.integers(1, 30), max_size=6), counts=st.tuples(st.integers(0, 40), st.integers(0, 40)))
def test_every_frame_arrives_once_and_in_order_whatever_breaks(breaks: list[int], counts: tuple[int, int]) -> None:
    async def main() -> tuple[list[int], list[int]]:
        async with asyncio.timeout(60):
            return await _exchange(breaks, counts)

    near, far = asyncio.run(main())
    assert near == list(range(counts[1])) and far == list(range(counts[0]))


def test_each_frame_is_told_when_its_bytes_are_written_and_again_where_they_are_sent_again() -> None:
    async def main() -> list[tuple[int, int]]:
        link, far = ResumableLink("far"), ResumableLink("near")
        told: list[tuple[int, int]] = []
        connection = 0
        link.on_written = lambda numbers: told.extend((connection, number) for number in numbers)
        for breaks_after in (4, 10**9):
            connection += 1
            a, b = Pipe.pair(breaks_after)
            tasks = [
                asyncio.create_task(_quietly(lambda end=end, pipe=pipe: end.carry(pipe)))
                for end, pipe in ((link, a), (far, b))
            ]
            if connection == 1:
                for number in range(3):
                    await link.send(_frame(number))
                    assert link.frames_sent == number + 1
                await asyncio.wait(tasks)
            else:
                got = [await far.receive() for _ in range(3)]
                assert [frame.microbatch for frame in got if frame is not None] == [0, 1, 2]
                a.abort()
                await asyncio.wait(tasks)
        return told

    told = asyncio.run(main())
    # The first connection broke with its fourth message: two of each end said the counts.
    assert [number for connection, number in told if connection == 1] == [0]
    again = [number for connection, number in told if connection == 2]
    assert again[-1] == 2 and again == sorted(set(again))


def test_a_peer_that_confirms_more_than_it_was_sent_loses_the_link() -> None:
    async def main() -> None:
        link = ResumableLink("liar")
        a, b = Pipe.pair(10**9)
        carrying = asyncio.create_task(link.carry(a))
        await b.receive()
        await b.send_encoded(encode(Frame(FrameKind.RESUME, 5)))
        with pytest.raises(PeerError, match="confirms 5 frames"):
            await carrying
        with pytest.raises(PeerError, match="the link is given up"):
            await link.send(_frame(0))
        with pytest.raises(PeerError, match="the link is given up"):
            await link.receive()

    asyncio.run(main())


def test_a_link_without_a_connection_holds_its_sender_back() -> None:
    async def main() -> int:
        link = ResumableLink("absent", window_bytes=10_000)
        sent = 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                while True:
                    await link.send(_frame(sent))
                    sent += 1
        return sent

    # A small frame counts with more than its bytes.
    assert 10_000 // 512 <= asyncio.run(main()) <= 10_000 // len(encode(_frame(0)))


def test_a_new_connection_takes_over_from_one_that_is_dead_without_knowing() -> None:
    async def main() -> None:
        near, far = ResumableLink("far"), ResumableLink("near")
        old, lost = Pipe.pair(10**9)
        first = asyncio.create_task(_quietly(lambda: near.carry(old)))
        await lost.receive()
        await lost.send_encoded(encode(Frame(FrameKind.RESUME, 0)))
        await near.until_connected()
        a, b = Pipe.pair(10**9)
        second = asyncio.create_task(_quietly(lambda: near.carry(a)))
        other = asyncio.create_task(_quietly(lambda: far.carry(b)))
        await near.send(_frame(1))
        frame = await far.receive()
        assert frame is not None and frame.microbatch == 1
        assert near.connections == 2
        near.fail(PeerError("enough"))
        far.fail(PeerError("enough"))
        await asyncio.gather(first, second, other)

    asyncio.run(main())


def test_what_was_sent_may_change_under_the_sender_at_once() -> None:
    async def main() -> None:
        near, far = ResumableLink("far"), ResumableLink("near")
        tensor = torch.zeros(3)
        await near.send(Frame(FrameKind.FEED, 1, tensors={"x": tensor}))
        tensor.fill_(7.0)
        a, b = Pipe.pair(10**9)
        carrying = [
            asyncio.create_task(_quietly(lambda: near.carry(a))),
            asyncio.create_task(_quietly(lambda: far.carry(b))),
        ]
        frame = await far.receive()
        assert frame is not None and frame.tensors["x"].tolist() == [0.0, 0.0, 0.0]
        for link in (near, far):
            link.fail(PeerError("enough"))
        await asyncio.gather(*carrying)

    asyncio.run(main())


def test_a_link_that_the_other_end_has_ended_takes_nothing_more() -> None:
    async def main() -> None:
        near, far = ResumableLink("far"), ResumableLink("near")
        a, b = Pipe.pair(10**9)
        carrying = [
            asyncio.create_task(_quietly(lambda: near.carry(a))),
            asyncio.create_task(_quietly(lambda: far.carry(b))),
        ]
        await far.close()
        assert await near.receive() is None
        with pytest.raises(PeerError, match="has ended the link"):
            await near.send(_frame(1))
        await asyncio.gather(*carrying)

    asyncio.run(main())

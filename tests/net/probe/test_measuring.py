"""Measurement of a connection: the results match the line, and no caller can make the other side send without limit."""

import asyncio
from collections import deque
from collections.abc import Callable

import pytest

from ravnest.errors import PeerError
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.probe.call_rate import CALLS_PER_MINUTE
from ravnest.net.probe.measuring import (
    MAX_BYTES,
    MAX_LONG_SECONDS,
    MAX_SECONDS,
    MESSAGE_BYTES,
    Arrival,
    LinkSpeed,
    measure_link,
    needed_seconds,
    settled_rate,
)
from ravnest.net.rpc.client import CoordinatorClient, measure_peer
from ravnest.net.streams.frame_stream import Control
from ravnest.net.v1.control_pb2 import MeasureReply, MeasureRequest
from tests.net.slow_line import slow_line
from tests.net.swarm_ends import BEFORE, CALLED, OTHER, a_node, coordinator, echo, provider, run


def test_the_rate_is_that_of_the_later_half() -> None:
    slow_start = [Arrival(0.0, 0), Arrival(0.5, 100), Arrival(1.0, 500), Arrival(1.1, 800), Arrival(1.2, 1000)]
    assert settled_rate(slow_start) == pytest.approx(2500)
    assert settled_rate([Arrival(0.0, 0), Arrival(2.0, 1000)]) == pytest.approx(500)
    assert settled_rate([Arrival(0.0, 0), Arrival(2.0, 600), Arrival(2.0, 1000)]) == pytest.approx(500)


def test_the_figures_are_those_of_the_line() -> None:
    async def test() -> None:
        async with coordinator() as (ends, _), slow_line(ends.port, 500_000, 2_000_000, 0.03) as port:
            client = CoordinatorClient(f"127.0.0.1:{port}", a_node(ends.admission, "far").tls_keys(), "far")
            try:
                # A machine that is busy makes a line look slower now and then, and never faster.
                speeds: list[LinkSpeed] = []
                while len(speeds) < CALLS_PER_MINUTE and not seen_whole(speeds):
                    speeds.append(await client.measure())
            finally:
                await client.close()
            assert seen_whole(speeds), speeds
            for speed in speeds:
                assert speed.round_trip_seconds >= 0.06
                # The overhead of TLS and HTTP/2 is not counted.
                assert speed.up_bytes_per_second < 520_000 and speed.down_bytes_per_second < 2_080_000

    def seen_whole(speeds: list[LinkSpeed]) -> bool:
        return (
            min((speed.round_trip_seconds for speed in speeds), default=1.0) < 0.12
            and max(speed.up_bytes_per_second for speed in speeds) > 350_000
            and max(speed.down_bytes_per_second for speed in speeds) > 1_400_000
        )

    run(test())


def test_a_slow_line_is_measured_in_the_time_it_is_given() -> None:
    async def test() -> None:
        async with coordinator() as (ends, _), slow_line(ends.port, 40_000, 60_000, 0.01) as port:
            client = CoordinatorClient(f"127.0.0.1:{port}", a_node(ends.admission, "far").tls_keys(), "far")
            try:
                began = asyncio.get_running_loop().time()
                speed = await client.measure()
                took = asyncio.get_running_loop().time() - began
            finally:
                await client.close()
            assert took < 6
            assert 28_000 < speed.up_bytes_per_second < 48_000
            assert 42_000 < speed.down_bytes_per_second < 72_000

    run(test())


def test_any_node_of_the_swarm_may_measure_a_provider_and_only_the_stage_before_may_link() -> None:
    async def test() -> None:
        async with provider(echo) as (handler, address):
            handler.server.neighbours = {BEFORE.node_id}
            speed = await measure_peer(address, CALLED.node_id, OTHER)
            assert 0 < speed.round_trip_seconds < 1
            assert min(speed.up_bytes_per_second, speed.down_bytes_per_second) > 1e6

    run(test())


def test_a_stranger_may_not_measure_a_provider() -> None:
    async def test() -> None:
        async with coordinator() as (elsewhere, _), provider(echo) as (_, address):
            for stranger in (a_node(elsewhere.admission, "stranger"), NodeIdentity.new()):
                with pytest.raises(PeerError, match="does not belong to this swarm"):
                    await measure_peer(address, CALLED.node_id, stranger)

    run(test())


def test_the_holder_of_an_invite_may_measure_while_it_could_join() -> None:
    async def test() -> None:
        async with coordinator() as (ends, _):
            invite = ends.admission.invite("127.0.0.1", ends.port, uses=1)
            joiner = ends.joiner(invite)
            assert (await joiner.measure()).down_bytes_per_second > 0
            assert ends.admission.tokens.tokens()[-1].uses_left == 1
            ends.admission.tokens.redeem(invite.token.id, "a key", "anna", 0.0)
            with pytest.raises(PeerError, match="has been used up; ask the requester"):
                await joiner.measure()

    run(test())


async def opened(client: CoordinatorClient) -> Control[MeasureRequest, MeasureReply]:
    return await client.open_measuring()


def wanting_more(each: int) -> MeasureRequest:
    return MeasureRequest(want_bytes=each)


def sending_more(each: int) -> MeasureRequest:
    return MeasureRequest(data=bytes(each))


@pytest.mark.parametrize("request_of", [wanting_more, sending_more])
def test_no_caller_gets_more_than_the_bytes_of_one_measurement(request_of: Callable[[int], MeasureRequest]) -> None:
    async def test() -> None:
        async with coordinator() as (_, client):
            control = await opened(client)
            for _ in range(MAX_BYTES // MESSAGE_BYTES):
                await control.send(request_of(MESSAGE_BYTES))
                assert await control.receive() is not None
            await control.send(request_of(1))
            with pytest.raises(PeerError, match=f"measuring ends after {MAX_BYTES} bytes each way"):
                await control.receive()
            control.abort()

    run(test())


@pytest.mark.parametrize("request_of", [wanting_more, sending_more])
def test_a_message_that_asks_for_too_much_at_once_is_refused(request_of: Callable[[int], MeasureRequest]) -> None:
    async def test() -> None:
        async with coordinator() as (_, client):
            control = await opened(client)
            await control.send(request_of(MESSAGE_BYTES + 1))
            with pytest.raises(PeerError, match=f"in messages of up to {MESSAGE_BYTES}"):
                await control.receive()
            control.abort()

    run(test())


def test_pings_end_too() -> None:
    async def test() -> None:
        async with coordinator() as (_, client):
            control = await opened(client)

            async def ping() -> None:
                while True:
                    await control.send(MeasureRequest(ping=1))

            pinging = asyncio.create_task(ping())
            with pytest.raises(PeerError, match="measuring ends after"):
                while await control.receive() is not None:
                    pass
            with pytest.raises(PeerError):
                await pinging
            control.abort()

    run(test())


def test_two_who_measure_at_once_take_turns() -> None:
    async def test() -> None:
        async with coordinator() as (ends, client):
            first, second = await opened(client), await opened(ends.client(a_node(ends.admission, "ben").tls_keys()))
            for control in (first, second):
                await control.send(MeasureRequest(ping=7))
                assert (await control.receive()) == MeasureReply(pong=7)
            await first.send(MeasureRequest(turn=True))
            assert (await first.receive()) == MeasureReply(turn=True)
            await second.send(MeasureRequest(turn=True))
            waiting = asyncio.create_task(second.receive())
            await first.send(MeasureRequest(want_bytes=5))
            assert len((await first.receive()).data) == 5
            assert not waiting.done()
            first.abort()
            assert (await waiting) == MeasureReply(turn=True)
            second.abort()

    run(test())


class Replies:
    """The other end of a measurement, which answers what a test says."""

    peer = "the other side"

    def __init__(self, *replies: MeasureReply | None) -> None:
        self.replies = deque(replies)

    async def send(self, message: MeasureRequest) -> None:
        pass

    async def receive(self) -> MeasureReply | None:
        return self.replies.popleft()

    async def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


@pytest.mark.parametrize(
    "replies",
    [
        (None,),
        (MeasureReply(turn=True),),
        (*[MeasureReply(pong=1)] * 5, MeasureReply(turn=True), MeasureReply(taken_bytes=1 << 30)),
        (*[MeasureReply(pong=1)] * 5, MeasureReply(turn=True), MeasureReply(taken_bytes=0)),
    ],
)
def test_answers_that_make_no_sense_are_an_error(replies: tuple[MeasureReply | None, ...]) -> None:
    async def test() -> None:
        with pytest.raises(PeerError, match="the other side answered"):
            await measure_link(Replies(*replies))  # type: ignore[arg-type]

    run(test())


def test_checking_an_invite_says_whether_it_is_good_and_uses_nothing_up() -> None:
    from ravnest.net.v1.control_pb2 import CheckRequest

    async def test() -> None:
        async with coordinator() as (ends, node):
            invite = ends.admission.invite("127.0.0.1", ends.port, uses=1)
            joiner = ends.joiner(invite)
            for _ in range(2):
                reply = await joiner.check(CheckRequest())
                assert (
                    reply.good and reply.reason == f"invite {invite.token.id} is good, with 0 uses left after this one"
                )
            ends.admission.tokens.redeem(invite.token.id, "a key", "anna", 0.0)
            reply = await joiner.check(CheckRequest())
            assert not reply.good and "has been used up; ask the requester" in reply.reason
            assert (await node.check(CheckRequest())).good

    run(test())


def test_a_long_line_is_measured_for_longer_within_bounds() -> None:
    assert needed_seconds(0.0) == needed_seconds(0.05) == MAX_SECONDS
    assert needed_seconds(0.2) == pytest.approx(3.0)
    assert needed_seconds(9.0) == MAX_LONG_SECONDS

"""A stage's link to a machine in the same home does not count as the home's line to the internet."""

import asyncio
from typing import Any, cast

import pytest

from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.pacing.budget import StateBudget
from ravnest.net.v1.control_pb2 import Neighbour
from ravnest.provider.links.stage_link import StageLink
from tests.net.streams.pipes import Pipe


@pytest.mark.parametrize(("host", "is_near"), [("192.168.1.7", True), ("8.8.4.4", False), ("", False)])
def test_the_foreground_of_a_link_follows_the_host_that_dialled(host: str, is_near: bool) -> None:
    async def test() -> None:
        budget = StateBudget()
        end = StageLink(Neighbour(node="b", link="l"), True, NodeIdentity.new(), cast(Any, None))
        end.paces(budget)
        connection: Any = Pipe(1)
        connection.peer_host = host
        carrying = asyncio.create_task(end.accept(connection))
        await asyncio.sleep(0)
        assert end.link.foreground is (budget.nearby if is_near else budget)
        end.abort()
        carrying.cancel()
        await asyncio.gather(carrying, return_exceptions=True)

    asyncio.run(asyncio.wait_for(test(), 10.0))

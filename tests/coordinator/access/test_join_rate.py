"""How fast one invite, and one address, may bring new nodes into a swarm."""

import re

import pytest

from ravnest.coordinator.access.invites import DEFAULT_USES, uses_for
from ravnest.coordinator.access.join_rate import JoinPace, Rate
from ravnest.coordinator.swarm.swarm import SwarmLimits
from ravnest.errors import PeerError
from ravnest.net.connection import JOIN_TIMEOUT_SECONDS
from ravnest.net.identity.node_identity import NodeIdentity
from tests.swarms.in_process import a_request, attacked, run


def test_a_hundred_machines_behind_one_router_that_start_at_once_are_in_within_the_time_they_wait() -> None:
    pace = JoinPace()
    waits = [pace.take("invite 1", "address 192.0.2.1", 0.0)[0] for _ in range(100)]
    assert None not in waits
    assert waits[:32] == [0.0] * 32 and max(wait for wait in waits if wait is not None) < 20
    assert Rate().max_wait_seconds < JOIN_TIMEOUT_SECONDS


def test_one_that_asks_for_identities_without_an_end_is_refused_with_the_reason_and_let_in_later() -> None:
    pace = JoinPace(Rate(burst=2, interval_seconds=1.0, max_wait_seconds=3.0))
    waits = [pace.take("invite 1", "address 192.0.2.1", 0.0)[0] for _ in range(6)]
    assert waits == [0.0, 0.0, 1.0, 2.0, 3.0, None]
    why = pace.take("invite 1", "address 192.0.2.1", 0.0)[1]
    assert re.fullmatch(
        "too many new machines join with .* at once: 1 a second are admitted, .*; try again in a minute", why
    )
    # Neither does it help to come from elsewhere with the same invite, nor with another invite from there.
    assert pace.take("invite 1", "address 192.0.2.9", 0.0)[0] is None
    assert pace.take("invite 2", "address 192.0.2.1", 0.0)[0] is None
    assert pace.take("invite 2", "address 192.0.2.2", 0.0)[0] == 0.0
    assert pace.take("invite 1", "address 192.0.2.1", 10.0)[0] == 0.0


def test_what_is_remembered_of_invites_and_addresses_is_bounded() -> None:
    pace = JoinPace(Rate(burst=2, interval_seconds=0.1))
    for number in range(20_000):
        pace.take(f"invite {number}", f"address {number}", number * 1.0)
    assert len(pace) <= 4096 + 2


def test_an_invite_of_a_run_is_for_twice_the_machines_it_waits_for() -> None:
    assert uses_for(None) == uses_for(3) == DEFAULT_USES
    assert uses_for(100) == 200


def test_new_nodes_beyond_the_rate_are_refused_and_those_that_have_joined_are_not() -> None:
    async def test() -> None:
        limits = SwarmLimits(join_rate=Rate(burst=2, interval_seconds=60.0, max_wait_seconds=1.0))
        async with attacked(limits) as swarm:
            invite = swarm.invite(uses=9)
            anna = NodeIdentity.new()
            await swarm.ask(invite, a_request(anna.request(), "anna"))
            await swarm.ask(invite, a_request(NodeIdentity.new().request(), "ben"))
            with pytest.raises(PeerError, match=r"too many new machines join with .*; try again in a minute"):
                await swarm.ask(invite, a_request(NodeIdentity.new().request(), "mallory"))
            # The same key again: it brings no new identity.
            assert (await swarm.ask(invite, a_request(anna.request(), "anna"))).node_id == "anna"
            assert swarm.swarm.members.node_ids() == ["anna", "ben"]
            assert [(address, count) for address, count, _ in swarm.told.turned] == [("127.0.0.1", 1)]

    run(test())

"""Budgets of a port: which of the connections that have not proved their identity are closed."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.net.door.budgets import Budgets, IncomingConnection, budgets_for, connections_to_close, origin_of

SMALL = Budgets(incoming=32, waiting=16, waiting_per_address=8, per_node=4)
NOW = 1000.0


def waiting(host: str, port: int, age: float = 0.1, has_spoken: bool = False) -> IncomingConnection:
    return IncomingConnection((host, port), NOW - age, has_spoken)


def closed(connections: list[IncomingConnection], budgets: Budgets = SMALL) -> set[tuple[str, int]]:
    return {each.connection.peer for each in connections_to_close(connections, NOW, budgets)}


def test_a_few_connections_of_many_addresses_are_left_alone() -> None:
    connections = [waiting(f"192.0.2.{number}", 1) for number in range(SMALL.waiting)]
    assert closed(connections) == set()


def test_silent_connections_of_an_address_make_way_for_one_that_speaks() -> None:
    flood = [waiting("192.0.2.1", port, age=0.05) for port in range(100)]
    honest = waiting("192.0.2.1", 999, age=0.5, has_spoken=True)
    assert honest.peer not in closed([*flood, honest])
    assert len(closed([*flood, honest])) == 101 - SMALL.waiting_per_address


def test_the_newest_of_those_that_speak_stay() -> None:
    flood = [waiting("192.0.2.1", port, age=float(port + 1), has_spoken=True) for port in range(20)]
    assert closed(flood) == {("192.0.2.1", port) for port in range(SMALL.waiting_per_address, 20)}


def test_an_attacker_with_a_few_addresses_does_not_shut_out_one_with_another() -> None:
    flood = [waiting(f"192.0.2.{host}", port, has_spoken=True) for host in range(5) for port in range(8)]
    honest = waiting("198.51.100.7", 1, age=3.0)
    gone = closed([*flood, honest])
    assert honest.peer not in gone and len(gone) == 41 - SMALL.waiting


@pytest.mark.parametrize(
    ("connection", "reason"),
    [
        (waiting("192.0.2.1", 1, age=4.9), ""),
        (waiting("192.0.2.1", 1, age=5.1), "said nothing for 5 s"),
        (waiting("192.0.2.1", 1, age=24.0, has_spoken=True), ""),
        (waiting("192.0.2.1", 1, age=26.0, has_spoken=True), "did not prove its identity within 25 s"),
        (replace(waiting("192.0.2.1", 1, age=110.0), caller="invite:0"), ""),
        (replace(waiting("192.0.2.1", 1, age=130.0), caller="invite:0"), "used an invite for more than 120 s"),
        (replace(waiting("192.0.2.1", 1, age=1e6), caller="anna"), ""),
    ],
)
def test_each_step_of_a_proof_has_its_time(connection: IncomingConnection, reason: str) -> None:
    closing = connections_to_close([connection], NOW, SMALL)
    assert [each.reason for each in closing] == ([reason] if reason else [])


def test_the_nodes_of_a_swarm_are_not_counted_among_those_that_wait() -> None:
    nodes = [replace(waiting("192.0.2.1", port), caller=f"node-{port}") for port in range(500)]
    assert closed(nodes) == set()


def test_a_node_keeps_its_newest_connections() -> None:
    connections = [replace(waiting("192.0.2.1", port, age=float(port)), caller="anna") for port in range(10)]
    assert closed(connections) == {("192.0.2.1", port) for port in range(SMALL.per_node, 10)}


def test_the_addresses_of_one_network_of_ipv6_share_a_budget() -> None:
    assert origin_of("2001:db8::1") == origin_of("2001:db8::ffff:1") == "2001:db8::/64"
    assert origin_of("2001:db8:0:1::1") != origin_of("2001:db8::1")
    assert origin_of("::ffff:192.0.2.1") == origin_of("192.0.2.1") == "192.0.2.1"
    assert origin_of("fe80::1%eth0") == "fe80::/64" and origin_of("::1") == "::1"


@pytest.mark.parametrize("descriptors", [64, 256, 1024, 4096, 65_536, 1 << 20])
def test_a_process_keeps_descriptors_for_itself(descriptors: int) -> None:
    budgets = budgets_for(descriptors)
    assert budgets.incoming <= max(64, descriptors // 2)
    assert budgets.waiting_per_address <= budgets.waiting < budgets.incoming


CONNECTIONS = st.lists(
    st.builds(
        IncomingConnection,
        st.tuples(st.sampled_from(["192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::2"]), st.integers(0, 200)),
        st.floats(NOW - 150, NOW),
        st.booleans(),
        st.sampled_from(["", "", "", "invite:1", "anna", "ben"]),
    ),
    max_size=120,
    unique_by=lambda connection: connection.peer,
)


@given(connections=CONNECTIONS)
def test_what_is_left_is_within_every_budget_and_nothing_is_closed_without_need(
    connections: list[IncomingConnection],
) -> None:
    closing = connections_to_close(connections, NOW, SMALL)
    gone = [each.connection for each in closing]
    assert len(gone) == len(set(gone)) and all(each.reason for each in closing)
    left = [connection for connection in connections if connection not in gone]
    unproved = [connection for connection in left if not connection.is_node]
    assert len(unproved) <= SMALL.waiting
    assert all(count <= SMALL.waiting_per_address for count in Counter(c.origin for c in unproved).values())
    assert all(count <= SMALL.per_node for count in Counter(c.caller for c in left if c.is_node).values())
    assert connections_to_close(left, NOW, SMALL) == []

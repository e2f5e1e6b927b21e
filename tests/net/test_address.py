"""An address reads back as it was written, a malformed one says what is wrong, and how far one reaches is known."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.errors import PeerError
from ravnest.net.address import (
    is_nearby,
    is_wildcard,
    join_address,
    outward_address,
    own_address_towards,
    reach,
    split_address,
)

HOSTS = st.sampled_from(["127.0.0.1", "localhost", "::1", "fe80::2", "train.example.org", "203.0.113.5"])


@given(HOSTS, st.integers(1, 65535))
def test_an_address_reads_back_as_it_was_written(host: str, port: int) -> None:
    assert split_address(join_address(host, port)) == (host, port)


def test_an_ipv6_host_stands_in_brackets() -> None:
    assert join_address("::1", 7700) == "[::1]:7700"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "HOST:PORT"),
        ("127.0.0.1", "HOST:PORT"),
        (":7700", "HOST:PORT"),
        ("127.0.0.1:0", "1 to 65535"),
        ("127.0.0.1:65536", "1 to 65535"),
        ("127.0.0.1:port", "1 to 65535"),
        ("::1:7700", "brackets"),
        ("[zz]:7700", "not an IPv6 host"),
        ("a b:7700", "not a host name"),
        ("a/b:7700", "not a host name"),
    ],
)
def test_a_malformed_address_names_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(PeerError, match=words):
        split_address(text)


@given(st.text(max_size=60))
def test_any_text_is_an_address_or_a_peer_error(text: str) -> None:
    with contextlib.suppress(PeerError):
        host, port = split_address(text)
        assert split_address(join_address(host, port)) == (host, port)


@pytest.mark.parametrize(
    ("host", "how_far"),
    [
        ("127.0.0.1", "machine"),
        ("127.8.8.8", "machine"),
        ("::1", "machine"),
        ("localhost", "machine"),
        ("192.168.1.7", "network"),
        ("10.1.2.3", "network"),
        ("169.254.0.1", "network"),
        ("100.64.0.1", "network"),
        ("fe80::2", "network"),
        ("8.8.8.8", "internet"),
        ("2606:4700::1111", "internet"),
        ("train.example.org", "internet"),
    ],
)
def test_how_far_an_address_reaches(host: str, how_far: str) -> None:
    assert reach(host) == how_far


def test_a_wildcard_is_no_address_to_dial() -> None:
    assert is_wildcard("0.0.0.0") and is_wildcard("::")
    assert not is_wildcard("127.0.0.1") and not is_wildcard("localhost")


def test_this_machine_knows_which_of_its_addresses_leads_where() -> None:
    assert own_address_towards("127.0.0.9", 7700).startswith("127.")
    assert not is_wildcard(outward_address())
    with pytest.raises(PeerError, match="there is no route from this machine to"):
        own_address_towards("no such host", 7700)


@pytest.mark.parametrize(
    ("host", "own", "nearby"),
    [
        ("10.1.2.3", (), True),
        ("192.168.1.5", (), True),
        ("172.16.0.9", (), True),
        ("::ffff:192.168.1.5", (), True),
        ("fe80::2%eth0", (), True),
        ("fd12::1", (), True),
        ("127.0.0.1", (), True),
        ("8.8.4.4", (), False),
        ("8.8.4.4", ("8.8.4.4",), True),
        ("2a00:1450:1:2::9", ("2a00:1450:1:2::1",), True),
        ("2a00:1450:1:3::9", ("2a00:1450:1:2::1",), False),
        ("train.example.org", ("192.168.1.5",), False),
    ],
)
def test_a_connection_within_a_home_or_an_office_is_told_from_one_that_leaves_it(
    host: str, own: tuple[str, ...], nearby: bool
) -> None:
    found, reason = is_nearby(host, own)
    assert found == nearby and reason

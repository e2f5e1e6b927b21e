"""An invite reads back as it was written, and a malformed one says what is wrong with it."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.errors import PeerError
from ravnest.net import Invite

TOKENS = st.text("ABCxyz019-_.~", min_size=1, max_size=60)
HOSTS = st.sampled_from(["127.0.0.1", "localhost", "::1", "fe80::2", "train.example.org", "203.0.113.5"])


@given(HOSTS, st.integers(1, 65535), TOKENS)
def test_an_invite_reads_back_as_it_was_written(host: str, port: int, token: str) -> None:
    invite = Invite(host, port, token)
    assert Invite.parse(f"  {invite}\n") == invite


def test_an_ipv6_host_stands_in_brackets() -> None:
    assert str(Invite("::1", 7700, "t")) == "ravnest://[::1]:7700/#t"
    assert Invite.parse("ravnest://[::1]:7700/#t").host == "::1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "does not begin with ravnest://"),
        ("http://127.0.0.1:1/#t", "does not begin with ravnest://"),
        ("ravnest://127.0.0.1:7700", "token after # is missing"),
        ("ravnest://127.0.0.1:7700/#", "token after # is missing"),
        ("ravnest://127.0.0.1:7700/#a b", "characters no token has"),
        ("ravnest://127.0.0.1/#t", "HOST:PORT"),
        ("ravnest://:7700/#t", "HOST:PORT"),
        ("ravnest://127.0.0.1:0/#t", "1 to 65535"),
        ("ravnest://127.0.0.1:65536/#t", "1 to 65535"),
        ("ravnest://127.0.0.1:port/#t", "1 to 65535"),
        ("ravnest://::1:7700/#t", "brackets"),
        ("ravnest://[zz]:7700/#t", "no IPv6 host"),
        ("ravnest://a b:7700/#t", "no host name"),
        ("ravnest://127.0.0.1:7700/path/#t", "1 to 65535"),
    ],
)
def test_a_malformed_invite_names_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(PeerError, match=words):
        Invite.parse(text)


def test_an_error_about_an_invite_keeps_its_token_secret() -> None:
    with pytest.raises(PeerError) as caught:
        Invite.parse("ravnest://127.0.0.1/#SECRET")
    assert "SECRET" not in str(caught.value)


@given(st.text(max_size=60) | st.text(max_size=40).map(lambda rest: f"ravnest://{rest}"))
def test_any_text_is_an_invite_or_a_peer_error(text: str) -> None:
    with contextlib.suppress(PeerError):
        Invite.parse(text)

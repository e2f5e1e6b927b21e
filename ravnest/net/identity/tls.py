"""Mutual TLS for gRPC: the keys of a node, and channels and ports that use them.

A server asks for its keys at every handshake. So a new or revoked invite, and a certificate that arrived or was renewed
while the server runs, count from the next connection on. Open connections stay open.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import grpc
from grpc import aio

from ravnest.errors import PeerError, RefusedError
from ravnest.net.connection import CHANNEL_OPTIONS


@dataclass(frozen=True, slots=True)
class TlsKeys:
    """A private key, its certificate, and the roots that the other side's certificate must come from; in PEM."""

    key: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    roots: bytes = field(repr=False)


def server_credentials(
    current: Callable[[], TlsKeys], on_connection: Callable[[], None] = lambda: None
) -> grpc.ServerCredentials:
    """Credentials for one port. Callers without a certificate from the roots are refused at the handshake.

    `on_connection` and then `current` are called for every new connection, on a thread of gRPC's. If `current` raises,
    the handshake uses the keys that it returned last.
    """
    given = current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        on_connection()
        keys = current()
        if keys == given:
            return None
        configuration = _configuration(keys)
        given = keys
        return configuration

    return grpc.dynamic_ssl_server_credentials(
        _configuration(given),
        changed,  # type: ignore[arg-type]  # the stubs forget None, which means "as before"
        require_client_authentication=True,
    )


def channel_credentials(keys: TlsKeys) -> grpc.ChannelCredentials:
    """Credentials of a caller that shows its certificate and trusts only the roots."""
    return grpc.ssl_channel_credentials(keys.roots, keys.key, keys.certificate)


def open_secure_channel(address: str, keys: TlsKeys, expected_host: str) -> aio.Channel:
    """A channel to `host:port` that accepts only `expected_host` there. It connects on its first use."""
    return aio.secure_channel(address, channel_credentials(keys), options=[*CHANNEL_OPTIONS, *expecting(expected_host)])


def expecting(host: str) -> list[tuple[str, str]]:
    """Channel options: the certificate at the other end must name `host`, at any address."""
    return [("grpc.ssl_target_name_override", host)]


def tls_failure(peer: str, shown: str, details: str | None) -> PeerError | None:
    """The error for a call that gRPC ended as unavailable, if TLS is the reason; otherwise None.

    `shown` names this node's own proof, as in "this invite" or "the certificate of node anna".
    """
    words = details or ""
    for fragment, sentence in _TLS_FAILURES:
        if fragment in words:
            # A connection also closes early when the peer is just being restarted.
            kind = PeerError if sentence == _REFUSED else RefusedError
            return kind(sentence.format(peer=peer, shown=shown))
    return None


# gRPC reads no alert after its own side of a TLS 1.3 handshake is done, and a server refuses certificates only then. So
# a refused certificate looks like a connection that closes before HTTP/2 begins.
_REFUSED: Final = (
    "{peer} does not accept {shown}: it has expired, was revoked, or is another swarm's; "
    "ask the requester for a new invite"
)
_STRANGER: Final = "{peer} does not belong to this swarm; check the address, or ask for a new invite"
_TLS_FAILURES: Final = (
    (
        "Hostname Verification Check failed",
        "{peer} is another node of this swarm than the one expected there; join again so that addresses are renewed",
    ),
    (
        "certificate has expired",
        "the certificate of {peer} has expired, or the clock of this machine is wrong; check the clock on both sides",
    ),
    (
        "certificate is not yet valid",
        "the certificate of {peer} is not valid yet by the clock of this machine; set the clock right",
    ),
    ("CERTIFICATE_VERIFY_FAILED", _STRANGER),
    # The same failure, if both authorities have the same name, as all authorities of swarms do.
    ("certificate signature failure", _STRANGER),
    ("WRONG_VERSION_NUMBER", "{peer} does not speak TLS; check that the address is a ravnest node's"),
    ("Socket closed", _REFUSED),
    ("Connection reset by peer", _REFUSED),
    ("Broken pipe", _REFUSED),
)


def _configuration(keys: TlsKeys) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(keys.key, keys.certificate)], root_certificates=keys.roots)

"""Who may be spoken to, and how: the security of connections, and the options every connection has.

Plaintext stays on the loopback interface: opening a channel or a port for any other host without TLS credentials
is refused with a sentence.
"""

import hmac
from dataclasses import dataclass
from typing import Final, Self

import grpc
from grpc import aio

from ravnest.errors import PeerError, RunError
from ravnest.net.frames import DEFAULT_LIMITS
from ravnest.net.invite import is_loopback, join_address, split_address

CHUNK_BYTES: Final = 1 << 20
"""How much of an artifact or an upload one message carries."""

MESSAGE_BYTES: Final = DEFAULT_LIMITS.frame_bytes + CHUNK_BYTES
"""The largest message a connection takes: a frame at its limit, with room for framing."""

JOIN_TIMEOUT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Credentials:
    """What this node proves itself with: nothing on loopback, certificates elsewhere."""

    channel: grpc.ChannelCredentials | None = None
    server: grpc.ServerCredentials | None = None

    @classmethod
    def loopback(cls) -> Self:
        """Plaintext, good for addresses of this machine alone."""
        return cls()


def open_channel(address: str, credentials: Credentials) -> aio.Channel:
    """A channel to `host:port`, connected when it is first used. PeerError for plaintext to another machine."""
    host, _ = split_address(address)
    if credentials.channel is not None:
        return aio.secure_channel(address, credentials.channel, options=CHANNEL_OPTIONS)
    if not is_loopback(host):
        raise PeerError(
            f"{address} is not on this machine and this node has no certificate; "
            "plaintext is for 127.0.0.1 and ::1 alone, join with an invite that brings TLS"
        )
    return aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def bind_port(server: aio.Server, host: str, port: int, credentials: Credentials) -> int:
    """Make the server listen; returns the port, chosen by the system for port 0. RunError when that is refused."""
    address = join_address(host, port)
    if credentials.server is None and not is_loopback(host):
        raise RunError(
            f"cannot listen on {address} without TLS: plaintext is for 127.0.0.1 and ::1 alone; "
            "listen on a loopback address or give the server certificates"
        )
    try:
        if credentials.server is not None:
            bound = server.add_secure_port(address, credentials.server)
        else:
            bound = server.add_insecure_port(address)
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise RunError(
            f"cannot listen on {address}: the port is taken or the address is not this machine's; "
            "choose another with --listen HOST:PORT (port 0 takes any free one)"
        )
    return bound


def same_secret(presented: str, expected: str) -> bool:
    """Whether two secrets are equal, in a time that does not tell how much of them is."""
    return hmac.compare_digest(presented.encode(), expected.encode())


# A window and frames this large let a 4 MiB message flow without waiting for window updates; measured at 1.4 times
# the throughput of the defaults. The window is fixed, so it also bounds what a slow reader makes us hold.
_HTTP2_OPTIONS: Final = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.http2.lookahead_bytes", 4 << 20),
    ("grpc.http2.max_frame_size", 1 << 20),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

CHANNEL_OPTIONS: Final = [
    *_HTTP2_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    # One connection per channel: otherwise channels of one process to the same address share a connection, and
    # closing one peer's channel would not close its connection.
    ("grpc.use_local_subchannel_pool", 1),
]

SERVER_OPTIONS: Final = [
    *_HTTP2_OPTIONS,
    # Without this two servers would silently share a port, and providers would reach either.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
]

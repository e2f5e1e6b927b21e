"""The options every connection has, and the port of a server. There is no plaintext: every port and channel has TLS."""

import socket
from typing import Final

import grpc
from grpc import aio

from ravnest.errors import RunError
from ravnest.net.address import join_address
from ravnest.net.frame_limits import DEFAULT_LIMITS

CHUNK_BYTES: Final = 1 << 20
"""How much of an artifact or an upload one message carries."""

MESSAGE_BYTES: Final = DEFAULT_LIMITS.frame_bytes + CHUNK_BYTES
"""The largest message a connection takes: a frame at its limit, with room for framing."""

METADATA_BYTES: Final = 8192
"""The most metadata a call may carry."""

JOIN_BYTES: Final = 4096
"""The largest request to join; it travels as metadata."""

JOIN_TIMEOUT_SECONDS: Final = 60.0

HANDSHAKE_SECONDS: Final = 20.0
"""Whoever has not proved who it is by then is hung up on: until then it costs a connection and nobody knows it."""


PING_SECONDS: Final = 2.0
"""After so long with nothing from the other end it is asked whether it is there."""
PING_ANSWER_SECONDS: Final = 4.0
"""A connection over which nothing comes for so long after that is dead, and one on which the other end's system has
confirmed nothing of what was sent for so long (TCP_USER_TIMEOUT, which gRPC sets to the same)."""

LAST_PING_SECONDS: Final = 20.0
"""The same for pings of gRPC's own, with which it measures the line: while one of those is on its way no other is sent.
Behind what was buffered before a line became twenty times slower it may well be on its way for 10 s."""


def bind_port(server: aio.Server, host: str, port: int, credentials: grpc.ServerCredentials) -> int:
    """Make the server listen; returns the port, chosen by the system for port 0. RunError when that is refused."""
    address = join_address(host, port)
    # Tried here first: gRPC writes its own account of a failure to the terminal, and raises one without the reason.
    reason, bound = bind_refusal(host, port), 0
    if not reason:
        try:
            bound = server.add_secure_port(address, credentials)
        except RuntimeError:
            reason = "the port is taken or the address is not this machine's"
    if bound == 0:
        raise RunError(
            f"cannot listen on {address}: {reason}; choose another with --listen HOST:PORT (port 0 takes any free one)"
        )
    return bound


def bind_refusal(host: str, port: int) -> str:
    """Why the system does not let this address be listened on; empty when it does."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


# The window is gRPC's own, which it fits to the measured line. A fixed one of 4 MiB gave 0.95 of its rate under TLS on
# loopback (medians of seven runs with bare gRPC on a busy machine, so within its noise). With it what is held for a
# peer that does not read stayed within 16 MiB; without it 19 were seen.
_HTTP2_OPTIONS: Final = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_metadata_size", METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", 2 * METADATA_BYTES),
    ("grpc.http2.max_frame_size", 1 << 20),
    ("grpc.keepalive_time_ms", int(PING_SECONDS * 1000)),
    ("grpc.keepalive_timeout_ms", int(PING_ANSWER_SECONDS * 1000)),
    ("grpc.http2.ping_timeout_ms", int(LAST_PING_SECONDS * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

CHANNEL_OPTIONS: Final = [
    *_HTTP2_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    # One connection per channel: otherwise channels of one process to the same address share a connection, and
    # closing one peer's channel would not close its connection.
    ("grpc.use_local_subchannel_pool", 1),
    # Whoever waits for a connection tries again by itself: a channel that is slower at it would hold that up.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 400),
]

SERVER_OPTIONS: Final = [
    *_HTTP2_OPTIONS,
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_SECONDS * 1000)),
    # More wait at the caller's end.
    ("grpc.max_concurrent_streams", 256),
    # Without this two servers would silently share a port, and providers would reach either.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
]

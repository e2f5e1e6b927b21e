"""Connection settings: the options of every gRPC channel and server, and binding a port. There is no plaintext mode."""

from typing import Final

import grpc
from grpc import aio

from ravnest.errors import RunError
from ravnest.net.address import bind_refusal, join_address
from ravnest.net.frame_limits import DEFAULT_LIMITS

CHUNK_BYTES: Final = 1 << 20
"""Bytes of an artifact or an upload in one message."""

MESSAGE_BYTES: Final = DEFAULT_LIMITS.frame_bytes + CHUNK_BYTES
"""Maximum size of a message: a frame at its limit, with room for framing."""

METADATA_BYTES: Final = 8192
"""Maximum size of the metadata of a call."""

JOIN_BYTES: Final = 4096
"""Maximum size of a request to join, which travels as metadata."""

JOIN_TIMEOUT_SECONDS: Final = 60.0

HANDSHAKE_SECONDS: Final = 20.0
"""Timeout of the TLS handshake. An unproven caller occupies a connection until then."""


PING_SECONDS: Final = 2.0
"""After this time without a byte from the peer, gRPC sends a keepalive ping."""
PING_ANSWER_SECONDS: Final = 4.0
"""Timeout of a keepalive ping. It is also TCP_USER_TIMEOUT: a connection breaks when the peer's system acknowledges
nothing of what was sent for this time."""

LAST_PING_SECONDS: Final = 20.0
"""Timeout of the pings with which gRPC measures bandwidth. gRPC sends no keepalive ping while one of those is on its
way, and behind the buffers of a connection that became twenty times slower it may take 10 s."""


def bind_port(server: aio.Server, host: str, port: int, credentials: grpc.ServerCredentials) -> int:
    """Make the server listen. Returns the port, which the system chooses for port 0. RunError when the system
    refuses."""
    address = join_address(host, port)
    # Tried here first, because gRPC prints its own message about a failure to the terminal, and its error lacks the
    # reason.
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


# The flow-control window is gRPC's own, which follows the measured bandwidth. With a fixed window of 4 MiB, throughput
# under TLS on loopback was 0.95 of it (medians of seven runs with bare gRPC on a busy machine, within its noise).
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
    # One connection per channel: otherwise channels of one process to the same address share a connection, and closing
    # the channel to one peer would not close its connection.
    ("grpc.use_local_subchannel_pool", 1),
    # Callers retry by themselves, so a slow reconnect of the channel would only add to their backoff.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 400),
]

SERVER_OPTIONS: Final = [
    *_HTTP2_OPTIONS,
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_SECONDS * 1000)),
    # Further calls wait at the caller.
    ("grpc.max_concurrent_streams", 256),
    # Without this, two servers could silently share a port, and a provider would reach either of them.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
]

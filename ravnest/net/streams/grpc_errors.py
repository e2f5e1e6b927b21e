"""Translation of gRPC's errors into a PeerError with one sentence."""

import re
from typing import Final

import grpc

from ravnest.errors import PeerError, RefusedError
from ravnest.net.identity.tls import tls_failure

DETAILS_CHARACTERS: Final = 2000
"""Longer sentences are cut, because gRPC carries them in headers of limited size."""


def peer_error(peer: str, code: grpc.StatusCode | None, details: str | None, shown: str = "") -> PeerError:
    """The error for a call to `peer` that ended with this status.

    The calling side passes `shown`, the name of its own proof of identity.
    """
    words = (details or "").strip() or "no reason given"
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        # Only our own servers use this code; the details are the message of the error that was raised there.
        return RefusedError(words)
    if code is grpc.StatusCode.ABORTED:
        # The same, for an error after which a retry may succeed.
        return PeerError(words)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return RefusedError(f"{peer} did not accept this node: {words}")
    if code is grpc.StatusCode.UNAVAILABLE:
        # An established connection that breaks is also "Socket closed"; only before that can TLS be the reason.
        if shown and "failed to connect" in words and (failure := tls_failure(peer, shown, words)) is not None:
            return failure
        return PeerError(
            f"cannot reach {peer}: {_plain(words)}; check that it is running and that the address is right"
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return PeerError(f"{peer} does not know this call; run the same version of ravnest on both sides")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return PeerError(f"{peer} did not answer in time; check that it is running and reachable")
    if code is grpc.StatusCode.CANCELLED:
        return PeerError(f"the connection to {peer} was closed")
    return PeerError(f"the connection to {peer} failed: {_plain(words)}")


def broken(peer: str, why: BaseException | str, shown: str = "") -> PeerError:
    """The error for a stream that broke without a status."""
    if isinstance(why, grpc.aio.AioRpcError):
        return peer_error(peer, why.code(), why.details(), shown)
    words = why if isinstance(why, str) else (str(why) or type(why).__name__)
    return PeerError(f"the connection to {peer} failed: {_plain(words)}")


def _plain(words: str) -> str:
    # gRPC nests its reasons, "failed to connect to all addresses; last error: UNKNOWN: ipv4:...: Connection refused
    # (111)". Users need the innermost one.
    words = words.rpartition("last error: ")[2]
    words = re.sub(r"^[A-Z]+: ", "", words)
    words = re.sub(r"^(ipv4|ipv6|unix):\S+: ", "", words)
    return words.rstrip(".;")

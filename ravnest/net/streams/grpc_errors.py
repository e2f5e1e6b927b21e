"""What gRPC says when something goes wrong, as one sentence in a PeerError."""

import re
from typing import Final

import grpc

from ravnest.errors import PeerError, RefusedError
from ravnest.net.identity.tls import tls_failure

DETAILS_CHARACTERS: Final = 2000
"""Longer sentences are cut, since gRPC carries them in headers, whose size is limited."""


def peer_error(peer: str, code: grpc.StatusCode | None, details: str | None, shown: str = "") -> PeerError:
    """The error for a call to `peer` that ended with this status.

    `shown` is given by whoever connects: it says what this node proved itself with.
    """
    words = (details or "").strip() or "no reason given"
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        # Only our own servers use this code: the details are the sentence of the error raised there.
        return RefusedError(words)
    if code is grpc.StatusCode.ABORTED:
        # The same for what may go better another time.
        return PeerError(words)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return RefusedError(f"{peer} did not accept this node: {words}")
    if code is grpc.StatusCode.UNAVAILABLE:
        # A connection that breaks later says "Socket closed" as well; only while it is made is TLS the reason.
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
    """The error for a stream that broke without a status: `why` in words."""
    if isinstance(why, grpc.aio.AioRpcError):
        return peer_error(peer, why.code(), why.details(), shown)
    words = why if isinstance(why, str) else (str(why) or type(why).__name__)
    return PeerError(f"the connection to {peer} failed: {_plain(words)}")


def _plain(words: str) -> str:
    # gRPC nests its reasons, "failed to connect to all addresses; last error: UNKNOWN: ipv4:...: Connection refused
    # (111)": the innermost one is what a person needs.
    words = words.rpartition("last error: ")[2]
    words = re.sub(r"^[A-Z]+: ", "", words)
    words = re.sub(r"^(ipv4|ipv6|unix):\S+: ", "", words)
    return words.rstrip(".;")

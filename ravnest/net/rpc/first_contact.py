"""First contact: fetches the swarm's authority from its coordinator, and compares it with the invite's fingerprint.

The coordinator serves TLS with the authority's own certificate. In TLS 1.3 a caller has seen and checked it before it
has to show anything itself. The handshake ends there, when only the greeting has been sent.
"""

import asyncio
import hmac
import socket
import ssl
import time
from datetime import UTC, datetime
from typing import Final

from ravnest.errors import PeerError
from ravnest.net.identity import certificates
from ravnest.net.identity.certificates import Certificate
from ravnest.net.identity.identity import COORDINATOR_HOST
from ravnest.net.identity.swarm_invite import SwarmInvite

PIN_TIMEOUT_SECONDS: Final = 20.0


async def pin_authority(
    invite: SwarmInvite, timeout_seconds: float = PIN_TIMEOUT_SECONDS, now: float | None = None
) -> Certificate:
    """The certificate of the swarm's authority, the only root to trust from here on.

    PeerError when the coordinator is unreachable, does not speak TLS, does not answer in time, belongs to another swarm
    than the invite, or when the clocks differ too much for any certificate to be accepted.
    """
    peer = f"the coordinator at {invite.address}"
    certificate = await _fetch(invite.host, invite.port, peer, timeout_seconds)
    if not hmac.compare_digest(certificates.fingerprint(certificate), invite.fingerprint):
        raise PeerError(
            f"what answers at {invite.address} is not the swarm the invite is for; nothing was sent to it: check the "
            "address and ask the requester for a new invite"
        )
    moment = datetime.fromtimestamp(time.time() if now is None else now, UTC)
    if not certificate.not_valid_before_utc <= moment <= certificate.not_valid_after_utc:
        raise PeerError(
            f"by the clock of this machine it is {moment:%Y-%m-%d %H:%M} UTC, when the swarm's certificate is not "
            "valid; set the clock right and join again"
        )
    return certificate


async def _fetch(host: str, port: int, peer: str, timeout_seconds: float) -> Certificate:
    try:
        async with asyncio.timeout(timeout_seconds):
            writer = await _connected(host, port)
    except TimeoutError:
        raise PeerError(
            f"{peer} did not answer within {timeout_seconds:g} seconds; check that it is running, that the address is "
            "right and that no firewall is in between"
        ) from None
    except socket.gaierror:
        raise PeerError(f"cannot reach {peer}: there is no such host; check the address in the invite") from None
    except (ssl.SSLError, ConnectionResetError, BrokenPipeError, EOFError) as error:
        raise PeerError(f"what answers at {host}:{port} does not speak TLS 1.3 ({_reason(error)}); {_CHECK}") from None
    except (OSError, ValueError) as error:
        raise PeerError(f"cannot reach {peer}: {_reason(error)}; {_CHECK}") from None
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        # Aborted, because the coordinator waits for a certificate that does not come, and closes the connection by
        # itself.
        writer.transport.abort()
    if not shown:
        raise PeerError(f"what answers at {host}:{port} showed no certificate; {_CHECK}")
    return certificates.read_certificate(shown)


async def _connected(host: str, port: int) -> asyncio.StreamWriter:
    """A connection, with a few retries if it is closed at once, as a coordinator with too many connections does."""
    for pause in (*_RETRY_SECONDS, None):
        try:
            _, writer = await asyncio.open_connection(host, port, ssl=_context(), server_hostname=COORDINATOR_HOST)
            return writer
        except (ConnectionResetError, BrokenPipeError, EOFError, ssl.SSLEOFError):
            if pause is None:
                raise
            await asyncio.sleep(pause)
    raise AssertionError("the last try returns or raises")


_RETRY_SECONDS: Final = (0.25, 0.5, 1.0)
_CHECK: Final = "check that the coordinator is running and that the address in the invite is right"


def _context() -> ssl.SSLContext:
    # The library verifies no certificate here: the fingerprint proves more than any authority could.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    return context


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return "it closed the connection" if isinstance(error, EOFError | ConnectionError) else str(error)

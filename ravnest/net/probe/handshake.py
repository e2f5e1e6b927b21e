"""Test of whether a node can be dialled at an address: a TLS handshake that ends before any data is sent.

The node that answers must show the certificate of the expected node. In TLS 1.3 it does so before the caller shows one.
"""

import asyncio
import socket
import ssl

from ravnest.errors import PeerError
from ravnest.net.address import split_address
from ravnest.net.identity.certificates import Certificate, certificate_pem
from ravnest.net.identity.identity import node_host


async def probe(address: str, node_id: str, authority: Certificate, timeout_seconds: float) -> None:
    """Return when `node_id` answers at `address`; PeerError says why it cannot be dialled there."""
    host, port = split_address(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(cadata=certificate_pem(authority).decode())
    try:
        async with asyncio.timeout(timeout_seconds):
            _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=node_host(node_id))
    except TimeoutError:
        raise PeerError(f"nothing answers at {address} within {timeout_seconds:g} s") from None
    except ssl.SSLCertVerificationError:
        raise PeerError(f"what answers at {address} is not {node_id}") from None
    except socket.gaierror:
        raise PeerError(f"{host} is not the name of a host") from None
    except (OSError, EOFError, ValueError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error) or "it hung up"
        raise PeerError(f"{address} cannot be dialled: {reason}".lower()) from None
    writer.transport.abort()

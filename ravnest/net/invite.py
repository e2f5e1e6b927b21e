"""Addresses and invites: the one line that a requester hands to providers, `ravnest://HOST:PORT/#TOKEN`."""

import ipaddress
import re
from dataclasses import dataclass
from typing import Self

from ravnest.errors import PeerError


@dataclass(frozen=True, slots=True)
class Invite:
    """Where the coordinator listens, and the token it admits providers with."""

    host: str
    port: int
    token: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an invite as `str(invite)` writes it. Raises PeerError that names what is wrong with it."""
        line = text.strip()
        scheme, separator, rest = line.partition("://")
        if not separator or scheme.lower() != "ravnest":
            raise _malformed(line, "it does not begin with ravnest://")
        place, separator, token = rest.partition("#")
        if not separator or not token:
            raise _malformed(line, "the token after # is missing")
        if not _TOKEN.fullmatch(token):
            raise _malformed(line, "its token has characters no token has, or is far too long")
        try:
            host, port = split_address(place.removesuffix("/"))
        except PeerError as error:
            raise _malformed(line, str(error)) from None
        return cls(host, port, token)

    @property
    def address(self) -> str:
        """`host:port`, as the rest of the transport takes it."""
        return join_address(self.host, self.port)

    def __str__(self) -> str:
        return f"ravnest://{self.address}/#{self.token}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 host stands in brackets. Raises PeerError for anything else."""
    host, separator, port = address.rpartition(":")
    if not separator or not host:
        raise PeerError(f"{_shown(address)} is not an address: write HOST:PORT")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise PeerError(f"{_shown(address)} is not an address: {_shown(host)} is no IPv6 host") from None
    elif ":" in host:
        raise PeerError(f"{_shown(address)} is not an address: put the IPv6 host in brackets, as in [::1]:7700")
    elif not _HOST.fullmatch(host):
        raise PeerError(f"{_shown(address)} is not an address: {_shown(host)} is no host name")
    if not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        raise PeerError(f"{_shown(address)} is not an address: the port must be a number from 1 to 65535")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether traffic to this host stays on this machine. Names other than localhost are not looked up: False."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_TOKEN = re.compile(r"[A-Za-z0-9._~+:=-]{1,512}")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}")
_PORT = re.compile(r"[0-9]{1,5}")


def _malformed(line: str, why: str) -> PeerError:
    # The token is a secret: an error message shows only what stands before it.
    shown = _shown(line.partition("#")[0])
    return PeerError(f"the invite {shown} is malformed: {why}; copy the whole line, ravnest://HOST:PORT/#TOKEN")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")

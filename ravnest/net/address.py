"""Addresses: `host:port` as text, and the addresses at which other machines can reach this one."""

import contextlib
import ipaddress
import re
import socket
from collections.abc import Collection
from typing import Final
from urllib.parse import unquote

from ravnest.errors import PeerError


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, with an IPv6 host in brackets. Raises PeerError for anything else."""
    host, separator, port = address.rpartition(":")
    if not separator or not host:
        raise PeerError(f"{_shown(address)} is not an address: write HOST:PORT")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise PeerError(f"{_shown(address)} is not an address: {_shown(host)} is not an IPv6 host") from None
    elif ":" in host:
        raise PeerError(f"{_shown(address)} is not an address: put the IPv6 host in brackets, as in [::1]:7700")
    elif not _HOST.fullmatch(host):
        raise PeerError(f"{_shown(address)} is not an address: {_shown(host)} is not a host name")
    if not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        raise PeerError(f"{_shown(address)} is not an address: the port must be a number from 1 to 65535")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def peer_host(peer: str) -> str:
    """The host in gRPC's name of a peer, as in "ipv4:203.0.113.5:40312"; empty if it contains none."""
    kind, _, place = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    return unquote(place).rpartition(":")[0].strip("[]")


def peer_place(peer: str) -> tuple[str, int] | None:
    """Host and port in gRPC's name of a peer, with a mapped IPv4 host as plain IPv4; None if it contains none."""
    host, (_, _, port) = peer_host(peer), peer.rpartition(":")
    if not host or not port.isdecimal():
        return None
    return plain_host(host), int(port)


def plain_host(host: str) -> str:
    """The address without brackets and scope; an IPv4 address that an IPv6 socket reports is made plain IPv4."""
    plain = host.strip("[]").partition("%")[0]
    return plain.removeprefix("::ffff:") if "." in plain else plain


def is_ip_address(host: str) -> bool:
    """Whether the host is an address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_wildcard(host: str) -> bool:
    """Whether a server that listens on this host listens on every address of the machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def reach(host: str) -> str:
    """The distance from which this host can be dialled: "machine", "network" (a private one) or "internet".

    Names are not looked up: except localhost, all of them count as public.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "machine" if host == "localhost" else "internet"
    if address.is_loopback:
        return "machine"
    return "internet" if address.is_global else "network"


def is_nearby(host: str, own: Collection[str] = ()) -> tuple[bool, str]:
    """Whether connections to this host stay on a network that this machine is on, and why. Their rate then says nothing
    about the uplink. `own`: addresses of this machine. Names are not looked up, see `reach`."""
    host = plain_host(host)
    if reach(host) != "internet":
        return True, f"{host} is a private address"
    if host in own:
        return True, f"{host} is an address of this network"
    for each in own:
        if _subnet(each) is not None and _subnet(each) == _subnet(host):
            return True, f"{host} is in the same subnet as {each}"
    return False, f"{host} is a public address"


def own_address_towards(host: str, port: int) -> str:
    """The address of this machine that its connections to `host` come from. PeerError when there is no route.

    Asks the system for its route; sends nothing.
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PeerError(f"there is no route from this machine to {host}: {error.strerror or error}") from None


def own_addresses(host: str) -> tuple[str, ...]:
    """The address of this machine that its connections to this host come from; none for a name, which is not looked
    up, or without a route."""
    if not is_ip_address(host):
        return ()
    try:
        return (own_address_towards(host, 9),)
    except PeerError:
        return ()


def outward_address() -> str:
    """The address of this machine on its route to the internet; 127.0.0.1 when it is on no network."""
    for elsewhere in _ELSEWHERE:
        try:
            return own_address_towards(elsewhere, 9)
        except PeerError:
            continue
    return "127.0.0.1"


def bind_refusal(host: str, port: int) -> str:
    """Why the system does not let this address be listened on; empty when it does."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


_ELSEWHERE: Final = ("192.0.2.1", "2001:db8::1")
"""Addresses reserved for documentation: the route to them is the route to the internet."""
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}")
_PORT = re.compile(r"[0-9]{1,5}")


def _subnet(host: str) -> ipaddress.IPv6Network | None:
    """The subnet of a public IPv6 address: that of its household or office."""
    with contextlib.suppress(ValueError):
        if isinstance(address := ipaddress.ip_address(host), ipaddress.IPv6Address) and address.is_global:
            return ipaddress.IPv6Network((int(address), 64), strict=False)
    return None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")

"""Targets for the identity of a peer: requests to join, invites, addresses, certificates and stored key files."""

from functools import cache

from ravnest import __version__
from ravnest.coordinator.access.admission import Admission
from ravnest.coordinator.swarm.members import check_machine, check_version
from ravnest.graph.portable import FORMAT_VERSION
from ravnest.net.address import split_address
from ravnest.net.identity import certificates
from ravnest.net.identity.authority import AUTHORITY_FILE, SwarmAuthority
from ravnest.net.identity.identity import Callers, Identity
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.identity.swarm_invite import SwarmInvite
from ravnest.net.v1.control_pb2 import (
    JoinRequest,
)
from ravnest.net.version import PROTOCOL_VERSION
from tests.fuzz.files import File
from tests.fuzz.message_targets import control
from tests.fuzz.rule import Target


@cache
def _admission() -> Admission:
    return Admission.in_memory()


@cache
def _invite() -> SwarmInvite:
    return _admission().invite("127.0.0.1", 7700, uses=None)


def _join(data: bytes) -> None:
    request = JoinRequest()
    control(JoinRequest)(data)
    request.ParseFromString(data)
    check_version(request)
    check_machine(request)
    split_address(request.address)
    _admission().join(Identity("invite", _invite().token.id), request.certificate_request, request.name)


def _join_seeds() -> list[bytes]:
    request = JoinRequest(
        certificate_request=certificates.certificate_request(_key()),
        name="Anna's PC",
        address="[::1]:7700",
        version=__version__,
        protocol=PROTOCOL_VERSION,
        graph_format=FORMAT_VERSION,
    )
    return [request.SerializeToString()]


@cache
def _key() -> certificates.Key:
    return certificates.new_key()


@cache
def _authority() -> SwarmAuthority:
    return SwarmAuthority.new()


@cache
def _node() -> NodeIdentity:
    return NodeIdentity(_key())


def _invite_line(data: bytes) -> None:
    invite = SwarmInvite.parse(data.decode(errors="replace"))
    assert SwarmInvite.parse(invite.line) == invite


def _request(data: bytes) -> None:
    certificates.request_key(data)


def _certificate(data: bytes) -> None:
    authority = _authority().certificate
    certificate = certificates.read_certificate(data)
    certificates.fingerprint(certificate)
    Callers(authority).identify({"x509_pem_cert": [data]})
    _node().adopt(data, authority)


def _certificate_seeds() -> list[bytes]:
    issued = _authority().issue(certificates.certificate_request(_key()), "anna")
    shown = _invite().token.sign_pass(1e9)[1]
    made = [issued, _authority().certificate, shown]
    return [certificates.certificate_der(c) for c in made] + [certificates.certificate_pem(c) for c in made]


def _authority_file(data: bytes) -> None:
    with File(AUTHORITY_FILE, data) as path:
        SwarmAuthority.open(path.parent)


def _authority_file_seeds() -> list[bytes]:
    authority = _authority()
    return [certificates.key_pem(authority.key) + certificates.certificate_pem(authority.certificate)]


TARGETS = (
    Target("join", _join, _join_seeds),
    Target("invite", _invite_line, lambda: [_invite().line.encode()]),
    Target(
        "address", lambda data: split_address(data.decode(errors="replace")), lambda: [b"[::1]:7700", b"host.org:1"]
    ),
    Target("request", _request, lambda: [certificates.certificate_request(_key())]),
    Target("certificate", _certificate, _certificate_seeds),
    Target("authority_file", _authority_file, _authority_file_seeds),
)

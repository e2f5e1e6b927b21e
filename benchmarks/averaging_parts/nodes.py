"""Node identities for members: keys and certificates in a folder that all members can read."""

from pathlib import Path

from ravnest.coordinator.access.admission import Admission
from ravnest.net.identity.certificates import certificate_pem, read_certificate
from ravnest.net.identity.identity import Identity
from ravnest.net.identity.node_identity import NodeIdentity

_AUTHORITY = "authority.pem"


def node_name(index: int) -> str:
    return f"member-{index}"


def make_nodes(folder: Path, count: int) -> None:
    """Admit this many nodes to a swarm of their own."""
    admission = Admission.in_memory()
    (folder / _AUTHORITY).write_bytes(certificate_pem(admission.authority.certificate))
    for name in map(node_name, range(count)):
        node = NodeIdentity.open(folder / name)
        identity = Identity("invite", admission.invite("127.0.0.1", 1).token.id)
        node.adopt(admission.join(identity, node.request(), name).certificate, admission.authority.certificate)


def open_node(folder: Path, index: int) -> NodeIdentity:
    return NodeIdentity.open(folder / node_name(index), read_certificate((folder / _AUTHORITY).read_bytes()))

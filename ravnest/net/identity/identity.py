"""Identity of the other end of a connection, read from its certificate, and the calls that this identity may make.

TLS admits every caller whose certificate chains to a root that the server trusts. A coordinator's server trusts the
swarm's authority and the roots of its live invites. But the holder of an invite has the key of that invite's root, and
can sign any name with it. So a name counts only together with its issuer: `Callers` checks that the certificate was
signed by the root that belongs to the name.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ravnest.errors import PeerError
from ravnest.net.identity import certificates
from ravnest.net.identity.certificates import Certificate

AuthContext = Mapping[str, Iterable[bytes]] | None
"""The result of gRPC's `context.auth_context()`."""

Kind = Literal["invite", "node", "coordinator"]

COORDINATOR_NAME: Final = "coordinator"
COORDINATOR_HOST: Final = "coordinator.ravnest"
"""The host name in the coordinator's certificate, which callers check at every address."""

NODE_ID_CHARACTERS: Final = 40


@dataclass(frozen=True, slots=True)
class Identity:
    """A proven identity: an invite (of a provider about to join), a node that has joined, or the coordinator."""

    kind: Kind
    name: str

    def __str__(self) -> str:
        return self.name if self.kind != "invite" else f"the holder of invite {self.name}"


class Callers:
    """Identifies callers. `invite_root` finds the root of an invite by its id; `is_member` is False for removed
    nodes."""

    def __init__(
        self,
        authority: Certificate,
        invite_root: Callable[[str], Certificate | None] = lambda _: None,
        is_member: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._authority = authority
        self._invite_root = invite_root
        self._is_member = is_member

    def caller(self, auth_context: AuthContext, kinds: Collection[Kind], call: str) -> Identity:
        """The identity of the caller. PeerError when the swarm does not know it, or it may not make this call."""
        identity = self.identify(auth_context)
        allowed, reason = may_call(identity, kinds, call)
        if not allowed:
            raise PeerError(reason)
        return identity

    def identify(self, auth_context: AuthContext) -> Identity:
        """The identity of the other end of a connection. PeerError when the swarm does not know it."""
        shown = list((auth_context or {}).get("x509_pem_cert", ()))
        if len(shown) != 1:
            raise PeerError("the caller shows no certificate; join the swarm with an invite first")
        identity = self.identify_certificate(certificates.read_certificate(shown[0]))
        if identity.kind == "node" and not self._is_member(identity.name):
            raise PeerError(f"{identity.name} was thrown out of the swarm; ask the requester for a new invite")
        return identity

    def identify_certificate(self, certificate: Certificate) -> Identity:
        """The identity that a certificate proves. PeerError when this swarm did not issue it."""
        kind, _, name = certificates.common_name(certificate).partition(":")
        if kind == "node" and certificates.is_issued_by(certificate, self._authority) and is_node_id(name):
            return Identity("node", name)
        if kind == COORDINATOR_NAME and certificate == self._authority:
            return Identity("coordinator", COORDINATOR_NAME)
        if kind == "invite":
            root = self._invite_root(name)
            if root is not None and certificates.is_issued_by(certificate, root):
                return Identity("invite", name)
        raise PeerError("the caller's certificate is not one of this swarm; join it with an invite of its requester")


def may_call(identity: Identity, kinds: Collection[Kind], call: str) -> tuple[bool, str]:
    """Whether an identity of this kind may make this call, and the reason as a sentence."""
    if identity.kind in kinds:
        return True, f"{identity} may call {call}"
    if identity.kind == "invite":
        why = "an invite is only for joining; use the certificate that joining brings"
    elif identity.kind == "node":
        why = f"{_listed(kinds)} may, {identity} is a node that has joined already"
    else:
        why = f"{_listed(kinds)} may, not the coordinator"
    return False, f"{identity} may not call {call}: {why}"


def node_host(node_id: str) -> str:
    """The host name in a node's certificate, which callers check at every address.

    Nodes have their own domain, so that a node named "coordinator" cannot pass for the coordinator.
    """
    assert is_node_id(node_id), "node ids are made by as_node_id"
    return f"{node_id}.node.ravnest"


def node_common_name(node_id: str) -> str:
    assert is_node_id(node_id), "node ids are made by as_node_id"
    return f"node:{node_id}"


def invite_common_name(invite_id: str) -> str:
    return f"invite:{invite_id}"


def is_node_id(text: str) -> bool:
    """Whether this can be a node's id: one label of a host name, in lower case, without wildcards or dots."""
    return _NODE_ID.fullmatch(text) is not None


def as_node_id(name: str) -> str:
    """The node id nearest to the name of a machine; "provider" when no character of the name can be used."""
    text = re.sub(r"[^a-z0-9]+", "-", name.lower())[:NODE_ID_CHARACTERS].strip("-")
    return text or "provider"


_NODE_ID: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,58}[a-z0-9])?")


def _listed(kinds: Collection[Kind]) -> str:
    words = {"invite": "the holder of an invite", "node": "a node that has joined", "coordinator": "the coordinator"}
    return " or ".join(words[kind] for kind in sorted(kinds))

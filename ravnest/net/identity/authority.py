"""Certificate authority of a swarm, on the coordinator's side.

Its certificate is the root that every node trusts, and also the certificate that the coordinator shows in TLS, so that
one fingerprint in an invite covers both.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final, Self

from ravnest.errors import PeerError, RunError
from ravnest.net.identity import certificates
from ravnest.net.identity.certificates import Certificate, Key
from ravnest.net.identity.identity import COORDINATOR_HOST, COORDINATOR_NAME, node_common_name, node_host
from ravnest.net.identity.private_files import make_private_folder, read_private, write_private
from ravnest.net.identity.tls import TlsKeys

AUTHORITY_LIFETIME: Final = timedelta(days=3650)
NODE_LIFETIME: Final = timedelta(days=30)
AUTHORITY_FILE: Final = "authority.pem"


@dataclass(frozen=True, slots=True)
class SwarmAuthority:
    """The authority's key and certificate."""

    key: Key = field(repr=False)
    certificate: Certificate

    @classmethod
    def new(cls, now: float | None = None) -> Self:
        """A new authority, in memory only."""
        key = certificates.new_key()
        moment = time.time() if now is None else now
        return cls(
            key,
            certificates.authority_certificate(key, COORDINATOR_NAME, AUTHORITY_LIFETIME, moment, [COORDINATOR_HOST]),
        )

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The authority in `folder`, created there on the first call. RunError when it cannot be read or written."""
        make_private_folder(folder)
        path = folder / AUTHORITY_FILE
        data = read_private(path)
        if data is None:
            made = cls.new()
            # Key and certificate are one file, so that neither exists without the other.
            write_private(path, certificates.key_pem(made.key) + certificates.certificate_pem(made.certificate))
            return made
        try:
            key = certificates.read_key(data)
            certificate = certificates.read_certificate(data[data.index(b"-----BEGIN CERTIFICATE") :])
            if certificates.certificate_key(certificate) != key.public_key():
                raise ValueError("the certificate is not the key's")
        except (ValueError, TypeError, PeerError):
            raise RunError(
                f"{path} is damaged; restore it from a copy, or delete it and invite every provider again"
            ) from None
        return cls(key, certificate)

    @property
    def fingerprint(self) -> bytes:
        """The hash in an invite by which a provider recognises this swarm."""
        return certificates.fingerprint(self.certificate)

    def issue(self, request: bytes, node_id: str, now: float | None = None) -> Certificate:
        """A certificate for the key in a node's request; PeerError when the request is bad.

        Only the key is taken from the request; the coordinator decides the name.
        """
        return certificates.leaf_certificate(
            certificates.request_key(request),
            node_common_name(node_id),
            self.certificate.subject,
            self.key,
            NODE_LIFETIME,
            time.time() if now is None else now,
            [node_host(node_id)],
        )

    def tls_keys(self, invite_roots: Iterable[Certificate] = ()) -> TlsKeys:
        """The keys for the coordinator's server and its own calls. They admit nodes, and the holders of the given
        invites."""
        own = certificates.certificate_pem(self.certificate)
        roots = b"".join([own, *(certificates.certificate_pem(root) for root in invite_roots)])
        return TlsKeys(certificates.key_pem(self.key), own, roots)

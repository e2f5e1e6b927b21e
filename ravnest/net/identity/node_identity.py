"""Key and certificate of a provider. The key is created here and never leaves; joining brings the certificate."""

import contextlib
import time
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import Final, Self

from ravnest.errors import PeerError, RunError
from ravnest.net.identity import certificates
from ravnest.net.identity.certificates import Certificate, Key
from ravnest.net.identity.identity import AuthContext, Callers, Identity, Kind
from ravnest.net.identity.invite_key import InviteToken
from ravnest.net.identity.private_files import make_private_folder, read_private, write_private
from ravnest.net.identity.tls import TlsKeys

KEY_FILE: Final = "node.key"
CERTIFICATE_FILE: Final = "node.pem"


class NodeIdentity:
    """The identity of this provider in one swarm. Before joining it has a key but no name, and no node can call it."""

    def __init__(self, key: Key, folder: Path | None = None) -> None:
        self._key = key
        self.folder = folder
        """Folder of the identity, where other data of this provider may be kept too; None: in memory only."""
        self.node_id = ""
        self.expires_at = 0.0
        # Before joining, the server trusts a certificate whose key signs nothing, so no caller is admitted.
        alone = certificates.authority_certificate(key, "not joined", timedelta(days=1), time.time())
        self._keys = TlsKeys(
            certificates.key_pem(key), certificates.certificate_pem(alone), certificates.certificate_pem(alone)
        )
        self._callers = Callers(alone)

    @classmethod
    def new(cls) -> Self:
        """A new identity, in memory only: for a provider that lives as long as one swarm."""
        return cls(certificates.new_key())

    @classmethod
    def open(cls, folder: Path, authority: Certificate | None = None) -> Self:
        """The identity in `folder`, one for each swarm; the key is created there on the first call.

        With the `authority` of the swarm, a stored certificate is used if that authority issued it and it is still
        valid; otherwise it is ignored. RunError when the folder cannot be used.
        """
        make_private_folder(folder)
        path = folder / KEY_FILE
        data = read_private(path)
        if data is None:
            key = certificates.new_key()
            write_private(path, certificates.key_pem(key))
        else:
            try:
                key = certificates.read_key(data)
            except (ValueError, TypeError):
                raise RunError(f"{path} is damaged; delete it and join again with an invite") from None
        identity = cls(key, folder)
        kept = read_private(folder / CERTIFICATE_FILE)
        if authority is not None and kept is not None:
            with contextlib.suppress(PeerError):
                certificate = certificates.read_certificate(kept)
                if certificate.not_valid_after_utc.timestamp() > time.time():
                    identity._take_up(certificate, authority)
        return identity

    @property
    def joined(self) -> bool:
        return bool(self.node_id)

    def request(self) -> bytes:
        """The certificate request for joining, with the same key on every retry: a repeated join is the same join."""
        return certificates.certificate_request(self._key)

    def adopt(self, certificate_der: bytes, authority: Certificate) -> str:
        """Use and store the certificate that joining brought. Returns its node id. PeerError when it is for another
        key."""
        certificate = certificates.read_certificate(certificate_der)
        self._take_up(certificate, authority)
        if self.folder is not None:
            write_private(self.folder / CERTIFICATE_FILE, certificates.certificate_pem(certificate))
        return self.node_id

    def tls_keys(self) -> TlsKeys:
        """The current keys for this provider's server and its own calls."""
        return self._keys

    def caller(self, auth_context: AuthContext, kinds: Collection[Kind], call: str) -> Identity:
        """The identity of a caller of this provider. PeerError when it is not of this swarm or may not call."""
        return self._callers.caller(auth_context, kinds, call)

    def identify(self, certificate: Certificate) -> Identity:
        """The owner of this certificate. PeerError when it is not of this swarm."""
        return self._callers.identify_certificate(certificate)

    def _take_up(self, certificate: Certificate, authority: Certificate) -> None:
        callers = Callers(authority)
        identity = callers.identify_certificate(certificate)
        if identity.kind != "node" or certificates.certificate_key(certificate) != self._key.public_key():
            raise PeerError("the coordinator answered with a certificate for another key; join again")
        self._keys = TlsKeys(
            certificates.key_pem(self._key),
            certificates.certificate_pem(certificate),
            certificates.certificate_pem(authority),
        )
        self._callers = callers
        self.expires_at = certificate.not_valid_after_utc.timestamp()
        self.node_id = identity.name


def joiner_keys(token: InviteToken, authority: Certificate, now: float | None = None) -> TlsKeys:
    """The keys with which the holder of an invite calls the coordinator, for joining only."""
    key, shown = token.sign_pass(time.time() if now is None else now)
    return TlsKeys(
        certificates.key_pem(key), certificates.certificate_pem(shown), certificates.certificate_pem(authority)
    )

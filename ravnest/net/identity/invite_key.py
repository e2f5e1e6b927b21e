"""Token of an invite, and the key that both sides derive from its secret.

The secret is never sent. From it, the joiner and the coordinator derive the same key, the *invite root*. The joiner
signs itself a short-lived certificate with that key, and the coordinator trusts the root's certificate while the token
is valid. The coordinator stores only that certificate, which admits no caller by itself, and not the secret.
"""

import base64
import binascii
import secrets
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ravnest.net.identity import certificates
from ravnest.net.identity.certificates import Certificate, Key
from ravnest.net.identity.identity import invite_common_name

ID_BYTES: Final = 6
SECRET_BYTES: Final = 16

ROOT_LIFETIME: Final = timedelta(days=3650)
"""The coordinator decides at every handshake whether a token has expired; the lifetime of its root has no meaning."""

PASS_LIFETIME: Final = timedelta(days=1)
"""Tolerance for a joiner's clock that is behind; CLOCK_SKEW is the tolerance for one that is ahead."""


@dataclass(frozen=True, slots=True)
class InviteToken:
    """A secret, and a public id that names the invite for people and logs."""

    id: str
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Self:
        return cls(secrets.token_hex(ID_BYTES), secrets.token_bytes(SECRET_BYTES))

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read what `encode` wrote. ValueError, without the text in it, for anything else."""
        data = decode_url_safe(text, ID_BYTES + SECRET_BYTES)
        return cls(data[:ID_BYTES].hex(), data[ID_BYTES:])

    def encode(self) -> str:
        """The token as text, for an invite. Secret."""
        return encode_url_safe(bytes.fromhex(self.id) + self.secret)

    def root(self, now: float) -> Certificate:
        """The certificate that a coordinator trusts while the token is valid. Not secret."""
        return certificates.authority_certificate(self.root_key(), _root_name(self.id), ROOT_LIFETIME, now)

    def sign_pass(self, now: float) -> tuple[Key, Certificate]:
        """A new key, and a certificate which states that its bearer holds this invite."""
        key = certificates.new_key()
        issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _root_name(self.id))])
        name = invite_common_name(self.id)
        return key, certificates.leaf_certificate(key.public_key(), name, issuer, self.root_key(), PASS_LIFETIME, now)

    def root_key(self) -> Key:
        """The key that both sides derive from the secret. Secret."""
        # With 16 bytes more than the order of the curve, the remainder is close to uniform (FIPS 186-5, A.2.1).
        derivation = HKDF(hashes.SHA256(), length=48, salt=_SALT, info=f"invite root {self.id}".encode())
        number = int.from_bytes(derivation.derive(self.secret))
        return ec.derive_private_key(number % (_P256_ORDER - 1) + 1, ec.SECP256R1())


def encode_url_safe(data: bytes) -> str:
    """Base64 with the alphabet of URLs and without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def decode_url_safe(text: str, size_bytes: int) -> bytes:
    """The `size_bytes` bytes that `encode_url_safe` wrote as `text`. ValueError for anything else."""
    try:
        data = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("not base64") from None
    # Each value has one encoding: stray bits in the last character are refused.
    if len(data) != size_bytes or encode_url_safe(data) != text:
        raise ValueError("wrong length")
    return data


_SALT: Final = b"ravnest invite 1"
_P256_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


def _root_name(invite_id: str) -> str:
    return f"invite root {invite_id}"

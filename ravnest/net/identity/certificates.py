"""Keys and X.509 certificates, all of one kind: P-256 and SHA-256. Their meaning is decided in identity.py.

Only `request_key` and `read_certificate` accept bytes from peers. These two, and the functions that read a field of
such a certificate, raise PeerError and nothing else for anything unexpected.
"""

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ravnest.errors import PeerError, RefusedError

Key = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey
Certificate = x509.Certificate

CLOCK_SKEW: Final = timedelta(days=1)
"""Tolerance for a peer's clock that is behind: certificates are valid from this long before their creation."""

MAX_DER_BYTES: Final = 4096
"""Far more than the certificates and requests of this module need."""


def new_key() -> Key:
    """A new private key."""
    return ec.generate_private_key(ec.SECP256R1())


def authority_certificate(
    key: Key, common_name: str, lifetime: timedelta, now: float, hosts: Sequence[str] = ()
) -> Certificate:
    """A self-signed certificate that may sign others directly, and may serve the names in `hosts` itself."""
    name = _name(common_name)
    return _signed(name, name, key.public_key(), key, lifetime, now, hosts, authority=True)


def leaf_certificate(
    public_key: PublicKey,
    common_name: str,
    issuer_name: x509.Name,
    issuer_key: Key,
    lifetime: timedelta,
    now: float,
    hosts: Sequence[str] = (),
) -> Certificate:
    """A certificate that cannot sign others: for both ends of TLS if it names `hosts`, otherwise for callers only."""
    return _signed(_name(common_name), issuer_name, public_key, issuer_key, lifetime, now, hosts, authority=False)


def certificate_request(key: Key) -> bytes:
    """A signing request in DER. It proves that the sender has the key, and contains no name: the authority gives the
    name."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def request_key(der: bytes) -> PublicKey:
    """The public key of a request that is signed with that key. PeerError for any other bytes."""
    try:
        if len(der) > MAX_DER_BYTES:
            raise ValueError("too long")
        request = x509.load_der_x509_csr(der)
        key = request.public_key()
        if not request.is_signature_valid:
            raise ValueError("not signed with its own key")
    except Exception as error:  # the library raises many types, which are not part of its interface
        raise RefusedError(
            f"the certificate request cannot be used: {str(error)[:300]}; join again with a new key"
        ) from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise RefusedError(
            "the certificate request holds another kind of key than P-256; use the key that Ravnest makes"
        )
    return key


def read_certificate(data: bytes) -> Certificate:
    """A certificate in DER or PEM. PeerError for any other bytes."""
    try:
        if len(data) > 2 * MAX_DER_BYTES:
            raise ValueError("it is too long")
        pem = data.startswith(b"-----")
        certificate = x509.load_pem_x509_certificate(data) if pem else x509.load_der_x509_certificate(data)
        # Every bit of the signature must be used. The library does not check that, and one certificate would have many
        # encodings.
        if not certificate.public_bytes(serialization.Encoding.DER).endswith(b"\x00" + certificate.signature):
            raise ValueError("its signature has bits that are not used")
        return certificate
    except Exception as error:  # as above
        raise PeerError(f"a certificate cannot be read: {str(error)[:300]}") from None


def certificate_key(certificate: Certificate) -> PublicKey:
    """The public key of a certificate. PeerError when it is not a P-256 key."""
    try:
        key = certificate.public_key()
    except Exception:  # as above
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise PeerError("a certificate is for another kind of key than P-256, which no node of a swarm has")
    return key


def is_issued_by(certificate: Certificate, issuer: Certificate) -> bool:
    """Whether the issuer's own key signed the certificate, without a certificate in between."""
    try:
        certificate.verify_directly_issued_by(issuer)
    except Exception:  # as above
        return False
    return True


def common_name(certificate: Certificate) -> str:
    """The subject's common name; empty unless there is exactly one, and it is text."""
    try:
        found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except Exception:  # as above
        return ""
    return found[0].value if len(found) == 1 and isinstance(found[0].value, str) else ""


def fingerprint(certificate: Certificate) -> bytes:
    """SHA-256 of the certificate."""
    return hashlib.sha256(certificate_der(certificate)).digest()


def key_id(public_key: PublicKey) -> str:
    """SHA-256 of a public key, in hexadecimal. The same key means the same machine."""
    encoded = public_key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)
    return hashlib.sha256(encoded).hexdigest()


def certificate_der(certificate: Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)


def certificate_pem(certificate: Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(key: Key) -> bytes:
    """The private key, unencrypted: only for a private file or the TLS library."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def read_key(pem: bytes) -> Key:
    """A private key from a file of this program. ValueError for anything else."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except Exception as error:  # as above
        raise ValueError(str(error)) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("the key is not a P-256 key")
    return key


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _signed(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: PublicKey,
    issuer_key: Key,
    lifetime: timedelta,
    now: float,
    hosts: Sequence[str],
    *,
    authority: bool,
) -> Certificate:
    made = datetime.fromtimestamp(now, UTC)
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if authority or hosts:
        # TLS libraries apply an authority's purposes to the certificates that it signs, so it needs both.
        purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(made - CLOCK_SKEW)
        .not_valid_after(made + lifetime)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(_key_usage(authority), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    )
    if hosts:
        names = x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _key_usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )

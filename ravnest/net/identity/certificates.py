"""Keys and X.509 certificates, all of one kind: P-256 and SHA-256. What they mean is decided elsewhere.

Only `request_key` and `read_certificate` take bytes from peers; they, and what reads a field of such a certificate,
raise PeerError, and nothing else, for anything that is not exactly what they expect.
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
"""How far behind a peer's clock may be: certificates are valid from this long before they were made."""

MAX_DER_BYTES: Final = 4096
"""Far above what the certificates and requests made here need."""


def new_key() -> Key:
    """A fresh private key."""
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
    role: str = "",
) -> Certificate:
    """A certificate that can sign nothing: for both ends of TLS where it names `hosts`, for callers alone otherwise."""
    return _signed(_name(common_name, role), issuer_name, public_key, issuer_key, lifetime, now, hosts, authority=False)


def certificate_request(key: Key) -> bytes:
    """A signing request, in DER. It proves that its sender has the key and names nobody: the authority names."""
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
    except Exception as error:  # the library has many of its own, and they are no part of its interface
        raise RefusedError(
            f"the certificate request cannot be used: {str(error)[:300]}; join again with a new key"
        ) from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise RefusedError("the certificate request holds another kind of key than P-256; join with this ravnest's own")
    return key


def read_certificate(data: bytes) -> Certificate:
    """A certificate in DER or PEM. PeerError for any other bytes."""
    try:
        if len(data) > 2 * MAX_DER_BYTES:
            raise ValueError("it is too long")
        pem = data.startswith(b"-----")
        certificate = x509.load_pem_x509_certificate(data) if pem else x509.load_der_x509_certificate(data)
        # All of the signature's bits are used. The library does not look, so one certificate would have many forms.
        if not certificate.public_bytes(serialization.Encoding.DER).endswith(b"\x00" + certificate.signature):
            raise ValueError("its signature has bits that are not used")
        return certificate
    except Exception as error:  # as above
        raise PeerError(f"a certificate cannot be read: {str(error)[:300]}") from None


def certificate_key(certificate: Certificate) -> PublicKey:
    """The key a certificate is for. PeerError when it is not of the one kind used here."""
    try:
        key = certificate.public_key()
    except Exception:  # as above
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise PeerError("a certificate is for another kind of key than P-256, which no node of a swarm has")
    return key


def is_issued_by(certificate: Certificate, issuer: Certificate) -> bool:
    """Whether the issuer's own key signed the certificate, with nobody in between."""
    try:
        certificate.verify_directly_issued_by(issuer)
    except Exception:  # as above
        return False
    return True


def subject_field(certificate: Certificate, oid: x509.ObjectIdentifier) -> str:
    """A field of the subject, or an empty string unless it is there exactly once and is text."""
    try:
        found = certificate.subject.get_attributes_for_oid(oid)
    except Exception:  # as above
        return ""
    return found[0].value if len(found) == 1 and isinstance(found[0].value, str) else ""


def common_name(certificate: Certificate) -> str:
    """The subject's common name; empty when there is not exactly one."""
    return subject_field(certificate, NameOID.COMMON_NAME)


def role(certificate: Certificate) -> str:
    """The role the subject was given; empty when there is none."""
    return subject_field(certificate, NameOID.ORGANIZATIONAL_UNIT_NAME)


def fingerprint(certificate: Certificate) -> bytes:
    """SHA-256 of the certificate."""
    return hashlib.sha256(certificate_der(certificate)).digest()


def key_id(public_key: PublicKey) -> str:
    """SHA-256 of a public key, in hexadecimal: the same key is the same machine."""
    encoded = public_key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)
    return hashlib.sha256(encoded).hexdigest()


def certificate_der(certificate: Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)


def certificate_pem(certificate: Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(key: Key) -> bytes:
    """The private key, unencrypted: for a private file or for the TLS library, nothing else."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def read_key(pem: bytes) -> Key:
    """A private key of ours, from a file of ours. ValueError when it is not one."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except Exception as error:  # as above
        raise ValueError(str(error)) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("the key is not a P-256 key")
    return key


def _name(common_name: str, role: str = "") -> x509.Name:
    fields = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if role:
        fields.append(x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role))
    return x509.Name(fields)


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
        # TLS libraries take an authority's purposes as limits on those it signs for: it needs both.
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

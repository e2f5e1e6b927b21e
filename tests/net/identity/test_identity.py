"""A certificate names the node that it was issued to, and no node can invent another name for itself."""

import contextlib
import stat
import time
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.errors import PeerError, RunError
from ravnest.net.identity import certificates
from ravnest.net.identity.authority import SwarmAuthority
from ravnest.net.identity.certificates import Certificate
from ravnest.net.identity.identity import Callers, Identity, as_node_id, is_node_id, may_call, node_host
from ravnest.net.identity.invite_key import InviteToken
from ravnest.net.identity.node_identity import NodeIdentity, joiner_keys
from ravnest.net.identity.swarm_invite import SwarmInvite

SWARM = SwarmAuthority.new()
OTHER_SWARM = SwarmAuthority.new()
TOKEN = InviteToken.new()
ROOT = TOKEN.root(time.time())
CALLERS = Callers(SWARM.certificate, lambda token_id: ROOT if token_id == TOKEN.id else None)
REQUEST = NodeIdentity.new().request()
DAY = timedelta(days=1)


def shown(certificate: Certificate) -> dict[str, list[bytes]]:
    return {"x509_pem_cert": [certificates.certificate_pem(certificate)]}


def test_a_node_is_known_by_the_certificate_it_was_issued() -> None:
    assert CALLERS.identify(shown(SWARM.issue(REQUEST, "anna"))) == Identity("node", "anna")


def test_the_holder_of_an_invite_is_known_by_its_id() -> None:
    _, certificate = TOKEN.sign_pass(time.time())
    assert CALLERS.identify(shown(certificate)) == Identity("invite", TOKEN.id)


def test_the_coordinator_is_known_by_the_authority_itself() -> None:
    assert CALLERS.identify(shown(SWARM.certificate)) == Identity("coordinator", "coordinator")


def test_a_caller_without_a_certificate_is_refused() -> None:
    for context in (None, {}, {"x509_pem_cert": []}, {"transport_security_type": [b"insecure"]}):
        with pytest.raises(PeerError, match="shows no certificate"):
            CALLERS.identify(context)


def test_a_node_of_another_swarm_is_refused() -> None:
    with pytest.raises(PeerError, match="not one of this swarm"):
        CALLERS.identify(shown(OTHER_SWARM.issue(REQUEST, "anna")))


@pytest.mark.parametrize("name", ["node:anna", "coordinator", "invite:000000000000", "node:", "anna", "", "node:a.b"])
def test_the_holder_of_an_invite_cannot_sign_itself_another_name(name: str) -> None:
    key = certificates.new_key()
    forged = certificates.leaf_certificate(
        key.public_key(), name or "x", ROOT.subject, TOKEN.root_key(), DAY, time.time(), [node_host("anna")]
    )
    with pytest.raises(PeerError, match="not one of this swarm"):
        CALLERS.identify(shown(forged))


def test_a_signature_under_the_authoritys_name_with_another_key_is_refused() -> None:
    key = certificates.new_key()
    forged = certificates.leaf_certificate(
        key.public_key(), "node:anna", SWARM.certificate.subject, key, DAY, time.time(), [node_host("anna")]
    )
    with pytest.raises(PeerError, match="not one of this swarm"):
        CALLERS.identify(shown(forged))


def test_a_node_cannot_sign_for_another_node() -> None:
    key = certificates.new_key()
    anna = SWARM.issue(certificates.certificate_request(key), "anna")
    forged = certificates.leaf_certificate(key.public_key(), "node:bert", anna.subject, key, DAY, time.time())
    with pytest.raises(PeerError, match="not one of this swarm"):
        CALLERS.identify(shown(forged))


def test_a_node_that_was_thrown_out_is_refused() -> None:
    callers = Callers(SWARM.certificate, is_member=lambda node_id: node_id != "anna")
    with pytest.raises(PeerError, match="anna was thrown out"):
        callers.identify(shown(SWARM.issue(REQUEST, "anna")))
    assert callers.identify(shown(SWARM.issue(REQUEST, "bert"))).name == "bert"


def test_a_node_called_coordinator_is_not_the_coordinator() -> None:
    certificate = SWARM.issue(REQUEST, "coordinator")
    assert CALLERS.identify(shown(certificate)) == Identity("node", "coordinator")
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["coordinator.node.ravnest"]


def test_each_kind_may_make_its_own_calls_alone() -> None:
    invite, node, coordinator = Identity("invite", "ab12"), Identity("node", "anna"), Identity("coordinator", "")
    assert may_call(invite, ["invite"], "Join")[0] and may_call(node, ["node"], "Feed")[0]
    assert may_call(coordinator, ["node", "coordinator"], "Probe")[0]
    assert may_call(invite, ["node"], "Feed") == (
        False,
        "the holder of invite ab12 may not call Feed: an invite is only for joining; "
        "use the certificate that joining brings",
    )
    assert "anna is a node that has joined already" in may_call(node, ["invite"], "Join")[1]
    assert not may_call(coordinator, ["node"], "Link")[0]


@given(st.text(max_size=80))
def test_any_name_becomes_a_node_id_that_is_one_label_of_a_host(name: str) -> None:
    node_id = as_node_id(name)
    assert is_node_id(node_id)
    assert is_node_id(f"{node_id}-{2**31}")


@pytest.mark.parametrize("text", ["", "*", "a.b", "A", "-a", "a-", "a" * 61, "ä", "a\n", "a b"])
def test_text_that_could_mean_another_host_is_not_a_node_id(text: str) -> None:
    assert not is_node_id(text)


def test_a_request_with_another_kind_of_key_is_refused() -> None:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    for key in (rsa.generate_private_key(65537, 1024), ec.generate_private_key(ec.SECP384R1())):
        der = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)
        with pytest.raises(PeerError, match="another kind of key"):
            SWARM.issue(der, "anna")


def test_a_request_for_a_key_its_sender_does_not_have_is_refused() -> None:
    damaged = bytearray(REQUEST)
    damaged[-1] ^= 1
    with pytest.raises(PeerError, match="cannot be used"):
        SWARM.issue(bytes(damaged), "anna")


@given(st.binary(max_size=200) | st.tuples(st.integers(0, len(REQUEST) - 1), st.integers(1, 255)))
@settings(max_examples=300)
def test_any_bytes_are_a_request_or_a_peer_error(data: bytes | tuple[int, int]) -> None:
    with contextlib.suppress(PeerError):
        certificates.request_key(changed(REQUEST, data))


CERTIFICATE_DER = certificates.certificate_der(SWARM.issue(REQUEST, "anna"))


@given(st.binary(max_size=200) | st.tuples(st.integers(0, len(CERTIFICATE_DER) - 1), st.integers(1, 255)))
@settings(max_examples=300)
def test_any_changed_certificate_is_refused_with_a_peer_error(data: bytes | tuple[int, int]) -> None:
    with pytest.raises(PeerError):
        CALLERS.identify_certificate(certificates.read_certificate(changed(CERTIFICATE_DER, data)))


def test_no_bit_of_a_certificate_can_be_changed() -> None:
    for position in range(len(CERTIFICATE_DER)):
        for bit in range(8):
            with pytest.raises(PeerError):
                CALLERS.identify_certificate(
                    certificates.read_certificate(changed(CERTIFICATE_DER, (position, 1 << bit)))
                )


def changed(original: bytes, data: bytes | tuple[int, int]) -> bytes:
    """The bytes given, or the original with one of its bytes changed."""
    if isinstance(data, bytes):
        return data
    damaged = bytearray(original)
    damaged[data[0]] ^= data[1]
    return bytes(damaged)


def test_both_sides_derive_the_same_root_from_a_token_and_another_from_another() -> None:
    read = InviteToken.decode(TOKEN.encode())
    assert read == TOKEN and read.root(0.0).public_key() == ROOT.public_key()
    assert InviteToken(TOKEN.id, b"another secret!!").root(0.0).public_key() != ROOT.public_key()
    assert InviteToken("000000000000", TOKEN.secret).root(0.0).public_key() != ROOT.public_key()


def test_the_key_derived_from_a_token_never_changes_between_versions() -> None:
    root = FIXED_TOKEN.root(0.0)
    encoded = root.public_key().public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)
    assert encoded.hex() == "0315c5fe3a05810897c30a5b8c52651461dc937e57f020ca488392efa3f0065302"


INVITES = st.builds(
    SwarmInvite,
    st.sampled_from(["127.0.0.1", "localhost", "::1", "train.example.org"]),
    st.integers(1, 65535),
    st.builds(InviteToken, st.binary(min_size=6, max_size=6).map(bytes.hex), st.binary(min_size=16, max_size=16)),
    st.binary(min_size=32, max_size=32),
)


@given(INVITES)
def test_an_invite_reads_back_as_it_was_written(invite: SwarmInvite) -> None:
    assert SwarmInvite.parse(f" {invite.line}\n") == invite


@given(INVITES)
def test_an_invite_can_be_logged_without_its_secret(invite: SwarmInvite) -> None:
    for text in (str(invite), repr(invite), f"{invite.token}", repr(invite.token)):
        assert invite.token.encode() not in text and invite.token.secret.hex() not in text
        assert repr(invite.token.secret) not in text


# Not random: the lines are names of tests, which must be the same in every process that runs them.
FIXED_TOKEN = InviteToken("0123456789ab", bytes(range(16)))
LINE = SwarmInvite("127.0.0.1", 7700, FIXED_TOKEN, bytes(range(32))).line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "does not begin with ravnest://"),
        (LINE.replace("ravnest:", "https:"), "does not begin with ravnest://"),
        (LINE.partition("#")[0], "after # is missing"),
        (LINE.replace("#", ""), "after # is missing"),
        (LINE.rpartition(".")[0], "fingerprint after the token is missing"),
        (LINE.replace(":7700", ""), "HOST:PORT"),
        (LINE.replace("7700", "77000"), "1 to 65535"),
        (LINE.replace("/#", "/x/#"), "stands between"),
        (LINE[:-1], "cut short or changed"),
        (LINE + "A", "cut short or changed"),
        (LINE + "=", "cut short or changed"),
        (LINE + "A" * 2000, "far too long"),
    ],
)
def test_a_malformed_invite_names_what_is_wrong_and_keeps_its_secret(text: str, words: str) -> None:
    with pytest.raises(PeerError, match=words) as caught:
        SwarmInvite.parse(text)
    assert FIXED_TOKEN.encode()[8:] not in str(caught.value)


@given(st.text(max_size=90) | st.text(max_size=90).map(lambda rest: f"ravnest://{rest}"))
@settings(max_examples=300)
def test_any_text_is_an_invite_or_a_peer_error(text: str) -> None:
    with contextlib.suppress(PeerError):
        SwarmInvite.parse(text)


@given(st.integers(0, len(LINE) - 1), st.characters())
@settings(max_examples=300)
def test_an_invite_with_one_character_changed_never_reads_as_the_same(place: int, character: str) -> None:
    text = LINE[:place] + character + LINE[place + 1 :]
    with contextlib.suppress(PeerError):
        assert SwarmInvite.parse(text).line == text.strip() or text[:10].lower() == LINE[:10]


def test_the_authority_is_the_same_after_a_restart_and_its_key_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "identity"
    made = SwarmAuthority.open(folder)
    again = SwarmAuthority.open(folder)
    assert again.fingerprint == made.fingerprint
    assert again.key.private_numbers() == made.key.private_numbers()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600]


def test_a_key_that_others_may_read_is_not_used(tmp_path: Path) -> None:
    SwarmAuthority.open(tmp_path)
    (tmp_path / "authority.pem").chmod(0o640)
    with pytest.raises(RunError, match="chmod 600"):
        SwarmAuthority.open(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_a_damaged_authority_is_named_and_not_replaced(tmp_path: Path, content: bytes) -> None:
    SwarmAuthority.open(tmp_path)
    (tmp_path / "authority.pem").write_bytes(content)
    with pytest.raises(RunError, match="damaged"):
        SwarmAuthority.open(tmp_path)
    assert (tmp_path / "authority.pem").read_bytes() == content


def test_an_authority_with_the_certificate_of_another_is_damaged(tmp_path: Path) -> None:
    SwarmAuthority.open(tmp_path)
    mixed = certificates.key_pem(SWARM.key) + certificates.certificate_pem(OTHER_SWARM.certificate)
    (tmp_path / "authority.pem").write_bytes(mixed)
    with pytest.raises(RunError, match="damaged"):
        SwarmAuthority.open(tmp_path)


def test_a_provider_keeps_its_key_and_certificate_privately_and_takes_them_up_again(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    node = NodeIdentity.open(folder)
    assert not node.joined
    issued = certificates.certificate_der(SWARM.issue(node.request(), "anna"))
    assert node.adopt(issued, SWARM.certificate) == "anna"
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    again = NodeIdentity.open(folder, SWARM.certificate)
    assert again.node_id == "anna" and again.tls_keys() == node.tls_keys()
    assert not NodeIdentity.open(folder, OTHER_SWARM.certificate).joined


def test_a_certificate_that_has_expired_is_not_taken_up_again(tmp_path: Path) -> None:
    node = NodeIdentity.open(tmp_path)
    old = SWARM.issue(node.request(), "anna", now=time.time() - 40 * 86400)
    node.adopt(certificates.certificate_der(old), SWARM.certificate)
    assert not NodeIdentity.open(tmp_path, SWARM.certificate).joined


def test_a_provider_adopts_no_certificate_but_its_own_of_the_right_swarm() -> None:
    node, stranger = NodeIdentity.new(), NodeIdentity.new()
    for certificate, words in [
        (SWARM.issue(stranger.request(), "anna"), "another key"),
        (OTHER_SWARM.issue(node.request(), "anna"), "not one of this swarm"),
        (SWARM.certificate, "another key"),
    ]:
        with pytest.raises(PeerError, match=words):
            node.adopt(certificates.certificate_der(certificate), SWARM.certificate)
    assert not node.joined


def test_nothing_that_holds_a_key_shows_it() -> None:
    node = NodeIdentity.new()
    for holder in (SWARM, node, node.tls_keys(), SWARM.tls_keys(), joiner_keys(TOKEN, SWARM.certificate)):
        assert "PRIVATE" not in repr(holder) and "BEGIN" not in str(holder)

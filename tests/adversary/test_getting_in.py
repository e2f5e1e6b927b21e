"""Somebody tries to get into a swarm, or to be somebody else in it, over real sockets and TLS."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID
from grpc import aio

from ravnest.coordinator.access.swarm_store import SwarmState
from ravnest.coordinator.swarm.membership_log import remember
from ravnest.errors import PeerError, RefusedError
from ravnest.net.connection import CHANNEL_OPTIONS
from ravnest.net.identity import certificates
from ravnest.net.identity.identity import COORDINATOR_HOST, COORDINATOR_NAME, Identity, node_common_name
from ravnest.net.identity.invite_key import InviteToken
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.identity.swarm_invite import SwarmInvite
from ravnest.net.identity.tls import TlsKeys, expecting, open_secure_channel
from ravnest.net.rpc.call_server import REQUEST_KEY
from ravnest.net.rpc.first_contact import pin_authority
from tests.swarms.in_process import A_PICKLE, LocalSwarm, a_request, attacked, run

REFUSED = "does not accept this: it has expired, was revoked, or is another swarm's; ask the requester for a new invite"


def keys(key: certificates.Key, certificate: certificates.Certificate, root: certificates.Certificate) -> TlsKeys:
    pem = certificates.certificate_pem
    return TlsKeys(certificates.key_pem(key), pem(certificate), pem(root))


async def nobody_came(swarm: LocalSwarm) -> None:
    assert swarm.told.joined_ids == [] and swarm.swarm.members.node_ids() == []
    honest = await swarm.join("honest")
    await swarm.still_works(honest)


def test_joining_without_any_certificate() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            root = certificates.certificate_pem(swarm.admission.authority.certificate)
            channel = aio.secure_channel(
                swarm.address,
                grpc.ssl_channel_credentials(root),
                options=[*CHANNEL_OPTIONS, *expecting(COORDINATOR_HOST)],
            )
            request = a_request(NodeIdentity.new().request()).SerializeToString()
            with pytest.raises(aio.AioRpcError) as refused:
                await channel.unary_unary("/ravnest.v1.Coordinator/Join")(
                    b"", metadata=((REQUEST_KEY, request),), timeout=10
                )
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            await channel.close()
            await nobody_came(swarm)

    run(test())


def test_joining_with_a_token_of_ones_own_making() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            real = swarm.invite()
            for token in (InviteToken.new(), replace(real.token, secret=os.urandom(16))):
                with pytest.raises(PeerError, match=REFUSED):
                    await swarm.ask(replace(real, token=token), a_request(NodeIdentity.new().request()))
            await nobody_came(swarm)

    run(test())


def test_joining_with_an_expired_token() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            invite = swarm.invite(lifetime_seconds=60)
            holder = swarm.holder(invite)
            swarm.clock.now += 61
            with pytest.raises(PeerError, match=REFUSED):
                await holder.join(a_request(NodeIdentity.new().request()))
            await nobody_came(swarm)

    run(test())


def test_joining_with_a_token_that_expires_while_the_connection_is_open() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            invite = swarm.invite(lifetime_seconds=60, uses=9)
            holder = swarm.holder(invite)
            await holder.join(a_request(NodeIdentity.new().request(), "in time"))
            swarm.clock.now += 61
            with pytest.raises(PeerError, match=f"the invite {invite.token.id} expired at .* ask the requester"):
                await holder.join(a_request(NodeIdentity.new().request(), "too late"))
            assert swarm.swarm.members.node_ids() == ["in-time"]

    run(test())


def test_joining_with_a_revoked_token() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            invite = swarm.invite()
            holder = swarm.holder(invite)
            swarm.admission.tokens.revoke(invite.token.id, swarm.clock())
            for client in (holder, swarm.holder(invite)):
                with pytest.raises(PeerError, match=REFUSED):
                    await client.join(a_request(NodeIdentity.new().request()))
            await nobody_came(swarm)

    run(test())


def test_using_a_token_for_one_twice() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            invite = swarm.invite(uses=1)
            anna = await swarm.join("anna", invite)
            with pytest.raises(PeerError, match=f"the invite {invite.token.id} has been used up"):
                await swarm.ask(invite, a_request(NodeIdentity.new().request(), "anna"))
            assert swarm.told.joined_ids == ["anna"]
            await swarm.still_works(anna)

    run(test())


def test_replaying_the_request_that_somebody_else_joined_with() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            invite = swarm.invite(uses=1)
            anna = NodeIdentity.new()
            seen = a_request(anna.request(), "anna")
            await swarm.ask(invite, seen)
            reply = await swarm.ask(invite, seen)
            # The certificate is for anna's key again, which the thief does not have.
            assert reply.node_id == "anna"
            thief = NodeIdentity.new()
            with pytest.raises(PeerError, match="a certificate for another key"):
                thief.adopt(reply.certificate, swarm.admission.authority.certificate)
            stolen = certificates.read_certificate(reply.certificate)
            client = swarm.client(keys(certificates.new_key(), stolen, swarm.admission.authority.certificate))
            with pytest.raises(PeerError):
                await client.control("")

    run(test())


def test_a_node_of_another_swarm() -> None:
    async def test() -> None:
        async with attacked() as swarm, attacked() as elsewhere:
            stranger = await elsewhere.join("anna")
            authority = swarm.admission.authority.certificate
            own = stranger.node.tls_keys()
            shown = TlsKeys(own.key, own.certificate, certificates.certificate_pem(authority))
            client = swarm.client(shown)
            with pytest.raises(PeerError, match=REFUSED):
                await client.control("")
            with pytest.raises(PeerError, match=REFUSED):
                await swarm.client(shown).join(a_request(stranger.node.request()))
            await nobody_came(swarm)
            await elsewhere.still_works(stranger)

    run(test())


def test_a_request_that_asks_for_another_name_and_the_coordinators_role() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            honest = await swarm.join("anna")
            key = certificates.new_key()
            names = [
                x509.NameAttribute(NameOID.COMMON_NAME, node_common_name("anna")),
                x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, "coordinator"),
            ]
            greedy = (
                x509.CertificateSigningRequestBuilder()
                .subject_name(x509.Name(names))
                .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
                .add_extension(
                    x509.SubjectAlternativeName([x509.DNSName(COORDINATOR_HOST), x509.DNSName("anna.node.ravnest")]),
                    critical=False,
                )
                .sign(key, hashes.SHA256())
                .public_bytes(serialization.Encoding.DER)
            )
            reply = await swarm.ask(swarm.invite(), a_request(greedy, "anna"))
            issued = certificates.read_certificate(reply.certificate)
            assert (reply.node_id, certificates.common_name(issued)) == ("anna-2", "node:anna-2")
            assert [field.oid for field in issued.subject] == [NameOID.COMMON_NAME]
            assert issued.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
            hosts = issued.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            assert hosts.get_values_for_type(x509.DNSName) == ["anna-2.node.ravnest"]

            # What it signs itself with that counts for nothing, and a server under the coordinator's name fools nobody.
            forged_key = certificates.new_key()
            forged = certificates.leaf_certificate(
                forged_key.public_key(), "node:anna", issued.subject, key, certificates.CLOCK_SKEW, swarm.clock()
            )
            authority = swarm.admission.authority.certificate
            with pytest.raises(PeerError):
                await swarm.client(keys(forged_key, forged, authority)).control("")
            await swarm.still_works(honest)

    run(test())


@pytest.mark.parametrize("name", ["coordinator", "../../etc", "*.node.ravnest", "node:anna", "", "\x1b[2J", "é" * 500])
def test_a_machine_that_calls_itself_something_it_may_not_be(name: str) -> None:
    async def test() -> None:
        async with attacked() as swarm:
            node = NodeIdentity.new()
            reply = await swarm.ask(swarm.invite(), a_request(node.request(), name))
            node.adopt(reply.certificate, swarm.admission.authority.certificate)
            callers = swarm.admission.caller({"x509_pem_cert": [node.tls_keys().certificate]}, ["node"], "Control")
            assert callers == Identity("node", reply.node_id)
            assert reply.node_id.isascii() and reply.node_id.replace("-", "").isalnum()

    run(test())


def test_the_holder_of_an_invite_who_signs_itself_a_nodes_or_the_coordinators_certificate() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            honest = await swarm.join("anna")
            invite = swarm.invite()
            root_key, root = invite.token.root_key(), invite.token.root(swarm.clock())
            for name in ("node:anna", COORDINATOR_NAME, "invite:000000000000"):
                key = certificates.new_key()
                forged = certificates.leaf_certificate(
                    key.public_key(), name, root.subject, root_key, certificates.CLOCK_SKEW, swarm.clock()
                )
                client = swarm.client(keys(key, forged, swarm.admission.authority.certificate))
                for call in (client.control, client.feed):
                    with pytest.raises(PeerError, match="the caller's certificate is not one of this swarm"):
                        await call("")
                with pytest.raises(PeerError, match="the caller's certificate is not one of this swarm"):
                    await client.join(a_request(NodeIdentity.new().request()))
            await swarm.still_works(honest)

    run(test())


@pytest.mark.parametrize(
    "request_bytes",
    [A_PICKLE, b"", b"\xff" * 4000, a_request(A_PICKLE).SerializeToString(), b"\x0a" + b"\xff" * 9 + b"\x01"],
    ids=["pickle", "nothing", "noise", "pickle for a key", "a length without end"],
)
def test_garbage_for_a_request_to_join(request_bytes: bytes) -> None:
    async def test() -> None:
        async with attacked() as swarm:
            invite = swarm.invite(uses=1)
            holder = joined_keys(swarm, invite)
            channel = open_secure_channel(swarm.address, holder, COORDINATOR_HOST)
            with pytest.raises(aio.AioRpcError) as refused:
                await channel.unary_unary("/ravnest.v1.Coordinator/Join")(
                    b"", metadata=((REQUEST_KEY, request_bytes),), timeout=10
                )
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert (refused.value.details() or "").isprintable()
            await channel.close()
            # And the invite is not used up by that.
            await swarm.join("honest", invite)

    run(test())


@pytest.mark.parametrize(
    "absurd",
    [{"memory_bytes": 2**63}, {"memory_bytes": 2**64 - 1}, {"threads": 2**32 - 1}],
    ids=lambda v: next(iter(v)),
)
def test_a_machine_that_says_it_is_larger_than_any_is(absurd: dict[str, int], tmp_path: Path) -> None:
    async def test() -> None:
        async with attacked() as swarm:
            state = SwarmState(tmp_path / "store.sqlite")
            remembering = asyncio.create_task(remember(swarm.swarm, state))
            invite = swarm.invite(uses=1)
            with pytest.raises(RefusedError, match=f"reports .*{value}.*.*more than 1125899906842624 and 65536"):
                await swarm.ask(invite, a_request(NodeIdentity.new().request(), **absurd))
            # The invite is not used up by that, and what is believed fits the store.
            await swarm.join("honest", invite)
            while not state.members():
                await asyncio.wait({remembering}, timeout=0.01)
            assert not remembering.done() and [member.node_id for member in state.members()] == ["honest"]
            remembering.cancel()
            state.close()

    (value,) = absurd.values()
    run(test())


def joined_keys(swarm: LocalSwarm, invite: SwarmInvite) -> TlsKeys:
    key, shown = invite.token.sign_pass(swarm.clock())
    return keys(key, shown, swarm.admission.authority.certificate)


def test_a_coordinator_that_poses_as_another_swarm_learns_nothing() -> None:
    async def test() -> None:
        async with attacked() as real, attacked() as impostor:
            invite = real.invite()
            # The address leads to the impostor, who has another authority.
            diverted = replace(invite, port=impostor.port)
            with pytest.raises(PeerError, match="is not the swarm the invite is for; nothing was sent to it"):
                await pin_authority(diverted)
            assert impostor.told.joined_ids == []

    run(test())


@pytest.mark.parametrize(
    "greeting", [b"", b"\x16", b"\x16\x03\x01\x40\x00", b"GET / HTTP/1.1\r\n", A_PICKLE, bytes(5000)]
)
def test_connections_that_never_finish_their_greeting_hold_nobody_up(greeting: bytes) -> None:
    async def test() -> None:
        async with attacked() as swarm:
            opened = [await asyncio.open_connection("127.0.0.1", swarm.port) for _ in range(30)]
            for _, writer in opened:
                writer.write(greeting)
            await nobody_came(swarm)
            for _, writer in opened:
                writer.transport.abort()

    run(test())
